"""A recorded machine: a folder that holds /proc and /sys as a test describes them."""

from __future__ import annotations

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
