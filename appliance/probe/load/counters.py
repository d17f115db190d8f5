"""The CPU's cumulative counters, read before and after a measurement in a millisecond or two."""

from __future__ import annotations

import os
import re
import time
from pathlib import Path

from appliance.probe.load.load import LoadSample
from appliance.probe.load.processes import query_tree

TICKS_PER_S = os.sysconf("SC_CLK_TCK")  # the unit of /proc, whatever the kernel's own tick is
_STAT = Path("/proc/stat")


def parse_cpu_times(text: str, cpus: frozenset[int]) -> tuple[int, float, float] | None:
    """Parse /proc/stat into the number of CPUs counted, their busy seconds and their stolen seconds.

    Counts `cpus`, or all CPUs if none of them is listed, as in some containers. None if there is no usable line. psutil
    is not used: it returns the CPUs in order without numbers, so if one is offline the others would be mixed up.
    """
    total: tuple[float, float] | None = None
    each: dict[int, tuple[float, float]] = {}
    for line in text.splitlines():
        name, *fields = line.split()[:9] or [""]
        match = re.fullmatch(r"cpu(\d{0,5})", name, re.ASCII)
        if match is None or len(fields) < 8 or not all(_is_count(field) for field in fields):
            continue
        user, nice, system, _, _, _, _, steal = (int(field) / TICKS_PER_S for field in fields)
        if match[1]:
            each[int(match[1])] = (user + nice + system, steal)
        else:
            total = (user + nice + system, steal)
    ours = [times for cpu, times in each.items() if cpu in cpus]
    if ours:
        return len(ours), sum(busy for busy, _ in ours), sum(steal for _, steal in ours)
    return None if total is None else (len(each) or len(cpus) or 1, *total)


def query_load(*, own_pid: int | None = None) -> LoadSample:
    """Sample the counters. Our own work is the process tree below `own_pid`, by default this process.

    Everything else counts as foreign, also in our container.
    """
    counted, busy_s, steal_s = parse_cpu_times(_text(_STAT), frozenset(os.sched_getaffinity(0))) or (None, None, None)
    own = query_tree(os.getpid() if own_pid is None else own_pid)
    return LoadSample(
        time_s=time.monotonic(),
        cpus=counted,
        busy_s=busy_s,
        steal_s=steal_s,
        own_s=sum(own.values()) if own else None,
        own_pids=frozenset(own),
    )


def _is_count(word: str) -> bool:
    return word.isascii() and word.isdecimal() and len(word) < 20


def _text(path: Path) -> str:
    """Return the file's text, or "" if it cannot be read, as in some containers."""
    try:
        return path.read_text("utf-8", "replace")
    except OSError:
        return ""
