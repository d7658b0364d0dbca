"""Which address other nodes reach this one at."""

from __future__ import annotations

import ipaddress
import socket

import psutil

from prorl_hpc.messages.errors import TransportError


def node_address(interface: str = "") -> str:
    """The IPv4 address to publish: of the interface of that name (``ib0``), or the one in that subnet
    (``10.1.0.0/16``); if none is named what this host's name resolves to, unless that is loopback, then the first
    interface that is up. Raises TransportError, which lists what this node has."""
    return choose_address(interface, addresses_here())


def addresses_here() -> dict[str, list[str]]:
    """IPv4 addresses by interface, loopback left out."""
    return {
        name: [a.address for a in found if a.family == socket.AF_INET and not a.address.startswith("127.")]
        for name, found in psutil.net_if_addrs().items()
    }


def choose_address(interface: str, addresses: dict[str, list[str]]) -> str:
    """As ``node_address``, on a node with these."""
    if interface:
        found = _in_subnet(interface, addresses) if "/" in interface else addresses.get(interface, [])
        if not found:
            known = "; ".join(f"{name} {', '.join(own)}" for name, own in sorted(addresses.items()) if own)
            what = "no address in that subnet" if "/" in interface else "no interface of that name with an IPv4 address"
            raise TransportError(
                f"cluster.interface={interface}: {socket.gethostname()} has {what}; it has: {known or 'none'}"
            )
        return found[0]
    try:
        named = socket.gethostbyname(socket.gethostname())
        if not named.startswith("127."):
            return named
    except OSError:
        pass
    return next((own[0] for own in addresses.values() if own), "127.0.0.1")


def _in_subnet(subnet: str, addresses: dict[str, list[str]]) -> list[str]:
    try:
        network = ipaddress.IPv4Network(subnet, strict=False)
    except ValueError as error:
        raise TransportError(
            f"cluster.interface={subnet}: must be the name of an interface (ib0) or an IPv4 subnet (10.1.0.0/16): {error}"
        ) from None
    return [own for all_ in addresses.values() for own in all_ if ipaddress.IPv4Address(own) in network]
