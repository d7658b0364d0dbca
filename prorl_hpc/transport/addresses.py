"""Which address other nodes reach this one at."""

from __future__ import annotations

import socket

import psutil

from prorl_hpc.messages.errors import TransportError


def node_address(interface: str = "") -> str:
    """The IPv4 address to publish: of ``interface`` if named, else what this host's name resolves to,
    unless that is loopback, then the first interface that is up."""
    addresses: dict[str, list[str]] = {
        name: [a.address for a in found if a.family == socket.AF_INET and not a.address.startswith("127.")]
        for name, found in psutil.net_if_addrs().items()
    }
    if interface:
        if not addresses.get(interface):
            known = ", ".join(sorted(n for n, a in addresses.items() if a)) or "none"
            raise TransportError(
                f"cluster.interface={interface} has no IPv4 address here; interfaces that have one: {known}"
            )
        return addresses[interface][0]
    try:
        named = socket.gethostbyname(socket.gethostname())
        if not named.startswith("127."):
            return named
    except OSError:
        pass
    return next((a[0] for a in addresses.values() if a), "127.0.0.1")
