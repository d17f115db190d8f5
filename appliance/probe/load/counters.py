"""The CPU's counters, which only rise: asked for before and after a measurement, in a millisecond or two."""

from __future__ import annotations

import os
import re
import time
from pathlib import Path

from appliance.probe.load.load import LoadSample
from appliance.probe.load.processes import query_tree

TICKS_PER_S = os.sysconf("SC_CLK_TCK")  # of /proc, whatever the kernel's own tick is
_STAT = Path("/proc/stat")


def parse_cpu_times(text: str, cpus: frozenset[int]) -> tuple[int, float, float] | None:
    """/proc/stat as the number of CPUs counted, their busy seconds and their stolen seconds: those of `cpus`, or all
    where none of these is listed, as in some containers. None: no such line.

    psutil tells the CPUs in order and without their numbers: beside one that is off, ours would be another's.
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
    """`own_pid` heads the tree of what is our own work, by default this process: what else runs in our container is
    somebody else's, as is the rest of the machine."""
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
    """The file's text; "" where it cannot be read: this container does not tell."""
    try:
        return path.read_text("utf-8", "replace")
    except OSError:
        return ""
