"""The address that other nodes reach a node at, by interface or subnet."""

from __future__ import annotations

import pytest

from prorl_hpc.messages.errors import TransportError
from prorl_hpc.transport.addresses import addresses_here, choose_address, node_address

NODE = {"lo": [], "eth0": ["10.1.2.3"], "eth0:1": [], "ib0": ["192.168.7.9", "172.16.0.5"]}


@pytest.mark.parametrize(
    ("interface", "address"),
    [
        ("ib0", "192.168.7.9"),
        ("10.1.0.0/16", "10.1.2.3"),
        ("172.16.0.0/12", "172.16.0.5"),
        ("172.16.0.9/24", "172.16.0.5"),
    ],
)
def test_an_address_is_chosen_by_interface_or_subnet(interface: str, address: str) -> None:
    assert choose_address(interface, NODE) == address


@pytest.mark.parametrize(
    ("interface", "told"),
    [
        ("eth9", r"cluster\.interface=eth9: .* has no interface of that name .*; it has: eth0 10\.1\.2\.3; ib0 192"),
        ("10.9.0.0/16", r"has no address in that subnet; it has: eth0 10\.1\.2\.3; ib0 192\.168\.7\.9, 172\.16\.0\.5"),
        (
            "10.1.0.0/99",
            r"cluster\.interface=10\.1\.0\.0/99: must be the name of an interface \(ib0\) or an IPv4 subnet",
        ),
        ("fd00::/8", r"IPv4 subnet"),
    ],
)
def test_what_a_node_has_is_told(interface: str, told: str) -> None:
    with pytest.raises(TransportError, match=told):
        choose_address(interface, NODE)


def test_this_machine() -> None:
    if not any(addresses_here().values()):
        assert node_address() == "127.0.0.1"
        return
    own = node_address()
    assert node_address(f"{own}/32") == own
