"""A recorded machine: a folder with /proc and /sys as a test describes them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

MIB = 1024 * 1024
V2_MOUNT = "30 23 0:26 / /sys/fs/cgroup ro,nosuid - cgroup2 cgroup rw,nsdelegate\n"
STAT_V2 = f"anon {900 * MIB}\nfile {600 * MIB}\ninactive_file {400 * MIB}\nactive_file {100 * MIB}\n"


def put(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name.lstrip("/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def v1_mount(controllers: str, root: str = "/") -> str:
    return f"33 31 0:30 {root} /sys/fs/cgroup/{controllers} rw,relatime shared:7 - cgroup cgroup rw,{controllers}\n"


def fake_network(root: Path, interfaces: Mapping[str, tuple[int, int]], *, default: str | None = "eth0") -> Path:
    """Write /proc and /sys of a network. Each interface has its own number and the number of its other end."""
    for name, (own, other) in interfaces.items():
        folder = root / "sys/class/net" / name
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "ifindex").write_text(f"{own}\n")
        (folder / "iflink").write_text(f"{other}\n")
    (root / "proc/net").mkdir(parents=True, exist_ok=True)
    rows = ["Iface\tDestination\tGateway \tFlags\tRefCnt\tUse\tMetric\tMask\t\tMTU\tWindow\tIRTT"]
    rows += [f"{default}\t00000000\t010011AC\t0003\t0\t0\t0\t00000000\t0\t0\t0"] if default else []
    (root / "proc/net/route").write_text("\n".join(rows) + "\n")
    return root
