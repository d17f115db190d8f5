"""Read files of /proc and /sys. They are short; none is trusted to exist or to be well-formed."""

from __future__ import annotations

import re
from pathlib import Path

# One CPU's block in /proc/cpuinfo is below 4 KiB. Reading more makes the kernel query every core's frequency: 20 ms at
# 128 cores.
_MOST_BYTES = 16 * 1024


def first_bytes(path: Path) -> str:
    """Return at most 16 KiB, in a single read; "" if the file cannot be read."""
    try:
        with path.open("rb", buffering=0) as file:
            return (file.read(_MOST_BYTES) or b"").decode("utf-8", "replace")
    except OSError:
        return ""


def parse_cpulist(text: str) -> tuple[int, ...]:
    """Parse the kernel's list format, "0-3,8"; other parts are skipped."""
    cpus: set[int] = set()
    for part in text.strip().split(","):
        match = re.fullmatch(r"(\d{1,5})(?:-(\d{1,5}))?", part.strip(), re.ASCII)
        if match:
            first = int(match[1])
            cpus |= set(range(first, int(match[2] or first) + 1))
    return tuple(sorted(cpus))
