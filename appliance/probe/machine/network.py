"""Tell from the interfaces whether this container has its own network.

If it has, a server on the loopback address cannot be reached from outside, whichever port is published.
"""

from __future__ import annotations

import ipaddress
from pathlib import Path

from appliance.probe.machine.sysfs import first_bytes


def is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:  # a host name
        return False


def has_own_network(root: Path = Path("/")) -> bool:
    """True if the default route uses an interface whose peer is outside: veth, macvlan, or a rootless container's tap.

    False in the host's network, where it is a physical card, or where there are bridges.
    """
    folder = root / "sys/class/net"
    names = {path.name for path in folder.glob("*")}
    if any((folder / name / "bridge").exists() for name in names):
        return False
    indices = {first_bytes(folder / name / "ifindex").strip() for name in names}
    return any(
        (folder / name / "tun_flags").exists() or first_bytes(folder / name / "iflink").strip() not in indices
        for name in _default_interfaces(root) & names
    )


def why_unreachable(host: str, root: Path = Path("/")) -> str | None:
    """Return a warning if nothing outside this container can reach the listening address `host`, else None."""
    if not is_loopback(host) or not has_own_network(root):
        return None
    return f"only this container can reach {host}: a port published with -p leads to another address"


def _default_interfaces(root: Path) -> set[str]:
    routes = (line.split() for line in first_bytes(root / "proc/net/route").splitlines())
    found = {row[0] for row in routes if len(row) > 7 and row[1] == row[7] == "00000000"}  # destination and mask
    routes = (line.split() for line in first_bytes(root / "proc/net/ipv6_route").splitlines())
    return found | {row[9] for row in routes if len(row) > 9 and set(row[0] + row[1]) == {"0"} and row[9] != "lo"}
