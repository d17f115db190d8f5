"""Files of /proc and /sys: short, read at once, and never trusted to be there or to hold what they should."""

from __future__ import annotations

import re
from pathlib import Path

# One CPU's block is below 4 KiB. Reading on would make the kernel ask every core for its frequency: 20 ms at 128 cores.
_MOST_BYTES = 16 * 1024


def first_bytes(path: Path) -> str:
    """At most 16 KiB in a single read; "" where the file cannot be read."""
    try:
        with path.open("rb", buffering=0) as file:
            return (file.read(_MOST_BYTES) or b"").decode("utf-8", "replace")
    except OSError:
        return ""


def parse_cpulist(text: str) -> tuple[int, ...]:
    """The kernel's list format, "0-3,8"; what is not a range of CPUs is left out."""
    cpus: set[int] = set()
    for part in text.strip().split(","):
        match = re.fullmatch(r"(\d{1,5})(?:-(\d{1,5}))?", part.strip(), re.ASCII)
        if match:
            first = int(match[1])
            cpus |= set(range(first, int(match[2] or first) + 1))
    return tuple(sorted(cpus))
