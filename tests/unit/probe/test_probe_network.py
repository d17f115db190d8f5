"""Detection of an own network from interfaces: /proc and /sys as recorded in containers and on hosts."""

from __future__ import annotations

from pathlib import Path

import pytest

from appliance.probe.machine.network import has_own_network, is_loopback, why_unreachable
from tests.unit.probe.machine import fake_network

HOST = {"lo": (1, 1), "eth0": (4, 4)}
CONTAINER = {"lo": (1, 1), "eth0": (119, 120)}


@pytest.mark.parametrize(
    ("interfaces", "is_own"),
    [
        (CONTAINER, True),
        (HOST, False),
        ({**HOST, "eth0.7": (5, 4)}, False),  # a VLAN on a card that is here
        ({"lo": (1, 1)}, False),
        ({}, False),
    ],
)
def test_the_default_route_tells(tmp_path: Path, interfaces: dict[str, tuple[int, int]], is_own: bool) -> None:
    default = "eth0.7" if "eth0.7" in interfaces else "eth0"
    assert has_own_network(fake_network(tmp_path, interfaces, default=default)) is is_own


def test_a_host_with_bridges_is_a_host_though_its_own_link_leads_elsewhere(tmp_path: Path) -> None:
    """Example: containers run inside a container, and one of them uses the network of the outer container."""
    root = fake_network(tmp_path, {**CONTAINER, "docker0": (5, 5)})
    assert has_own_network(root)
    (root / "sys/class/net/docker0/bridge").mkdir()
    assert not has_own_network(root)


def test_a_tap_of_a_rootless_container_is_its_own(tmp_path: Path) -> None:
    root = fake_network(tmp_path, {"lo": (1, 1), "tap0": (2, 2)}, default="tap0")
    assert not has_own_network(root)
    (root / "sys/class/net/tap0/tun_flags").write_text("0x1002")
    assert has_own_network(root)


def test_a_network_of_version_6_alone(tmp_path: Path) -> None:
    root = fake_network(tmp_path, CONTAINER, default=None)
    assert not has_own_network(root), "without a route nobody is reached anyway"
    any_6, row = (
        "0" * 32,
        "{to} 00 {any} 00 fe800000000000000000000000000001 00000400 00000001 00000000 00000003 {name}",
    )
    lines = [row.format(to=any_6, any=any_6, name=name) for name in ("lo", "eth0")]
    (root / "proc/net/ipv6_route").write_text("\n".join(lines))
    assert has_own_network(root)


@pytest.mark.parametrize("host", ["127.0.0.1", "127.1.2.3", "::1", "localhost"])
def test_a_loopback_is_reached_from_inside_alone(tmp_path: Path, host: str) -> None:
    assert is_loopback(host)
    assert host in (why_unreachable(host, fake_network(tmp_path, CONTAINER)) or "")
    assert why_unreachable(host, fake_network(tmp_path, HOST)) is None


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "172.17.0.2", "appliance"])
def test_other_addresses_are_reached(tmp_path: Path, host: str) -> None:
    assert why_unreachable(host, fake_network(tmp_path, CONTAINER)) is None
