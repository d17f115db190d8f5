"""How busy the machine is and with whose work: counters that only rise, asked for before and after a measurement.

It takes about a millisecond. GPUs are watched by a child, as everything that asks the driver is one: `gpu_load.py`.
"""

from __future__ import annotations

import json
import os
import re
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from appliance.probe.cgroup import CpuGroup, parse_pressure, query_cpu_groups, query_cpu_pressure
from appliance.probe.hardware import GpuHolder, GpuProbe
from appliance.run import Finished
from appliance.values import dataclass

TICKS_PER_S = os.sysconf("SC_CLK_TCK")  # of /proc, whatever the kernel's own tick is
_PROCESSES_MAX = 4096  # of our own tree: more is no tree of ours
_ABSURD = 1 << 40  # no clock, no MiB and no pid is as large


@dataclass(frozen=True, kw_only=True)
class GpuProcess(GpuHolder):
    utilization: int | None = None  # per cent of the time in which its kernels ran; None: the driver does not tell


@dataclass(frozen=True, kw_only=True)
class GpuLoad:
    """One device at one moment. Of a MIG slice clocks and reasons are those of the GPU that it is cut from."""

    index: int
    uuid: str | None = None
    sm_clock_mhz: int | None = None
    sm_clock_max_mhz: int | None = None
    memory_clock_mhz: int | None = None
    memory_clock_max_mhz: int | None = None
    reasons: int | None = None  # NVML's bits for why it does not clock higher
    utilization: int | None = None  # per cent of the last moments in which a kernel ran, whoever's
    used_mib: int | None = None
    processes: tuple[GpuProcess, ...] = ()


@dataclass(frozen=True, kw_only=True)
class GpuLoads:
    """What the child saw, oldest first. In the first and the last of `samples` the devices had time to come to rest, so
    `utilization` there is somebody else's. `problem` says in words why there is nothing."""

    samples: tuple[tuple[GpuLoad, ...], ...] = ()
    own_pids: frozenset[int] = frozenset()  # of our tree meanwhile: an engine may have come and gone
    problem: str | None = None


@dataclass(frozen=True, kw_only=True)
class LoadSample:
    """Counters since the machine or the group began, in seconds. None: nobody can say."""

    time_s: float  # monotonic
    cpus: int | None = None  # the CPUs that we may use and that are counted in the next two
    busy_s: float | None = None  # of programs, whoever's; interrupts are left out: they are anybody's
    steal_s: float | None = None  # that a hypervisor gave to others while something here wanted to run
    own_s: float | None = None  # CPU time of our process, its descendants and those of them that have ended
    own_pids: frozenset[int] = frozenset()
    group_pressure_s: float | None = None
    host_pressure_s: float | None = None
    groups: tuple[CpuGroup, ...] = ()


def parse_cpu_times(text: str, cpus: frozenset[int]) -> tuple[int, float, float] | None:
    """/proc/stat as the number of CPUs counted, their busy seconds and their stolen seconds: those of `cpus`, or all
    where none of these is listed, as in some containers. None: no such line."""
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


def parse_process_times(text: str) -> tuple[int, float] | None:
    """/proc/<pid>/stat as the parent's pid and the CPU seconds of it and of its children that were waited for."""
    fields = text.rpartition(")")[2].split()  # a name may hold anything, a bracket too
    if len(fields) < 15 or not all(_is_count(fields[place]) for place in (1, 11, 12, 13, 14)):
        return None
    return int(fields[1]), sum(int(field) for field in fields[11:15]) / TICKS_PER_S


def query_load(root: Path, *, own_pid: int | None = None, cpus: frozenset[int] | None = None) -> LoadSample:
    """The CPU's counters with /proc and /sys below `root`. `own_pid` heads the tree of what is our own work, by default
    this process: what else runs in our container is somebody else's, as is the rest of the machine."""
    cpus = frozenset(os.sched_getaffinity(0)) if cpus is None else cpus
    times = parse_cpu_times(_text(root / "proc/stat"), cpus)
    own = query_tree(root, os.getpid() if own_pid is None else own_pid)
    counted, busy_s, steal_s = times or (None, None, None)
    return LoadSample(
        time_s=time.monotonic(),
        cpus=counted,
        busy_s=busy_s,
        steal_s=steal_s,
        own_s=sum(own.values()) if own else None,
        own_pids=frozenset(own),
        group_pressure_s=query_cpu_pressure(root),
        host_pressure_s=parse_pressure(_text(root / "proc/pressure/cpu")),
        groups=query_cpu_groups(root),
    )


def query_tree(root: Path, own_pid: int) -> dict[int, float]:
    """The CPU seconds of `own_pid` and of its descendants, by pid; empty when it is not there.

    A child's time goes to its parent when it is waited for, so the sum does not fall when one ends.
    """
    tree: dict[int, float] = {}
    waiting = [own_pid]
    children = _children_lists(root, own_pid)
    while waiting and len(tree) < _PROCESSES_MAX:
        pid = waiting.pop()
        times = None if pid in tree else parse_process_times(_text(root / f"proc/{pid}/stat"))
        if times is not None:
            tree[pid] = times[1]
            waiting += children(pid)
    return tree


def parse_answer(finished: Finished) -> GpuLoads:
    if finished.returncode == 0:
        return parse_gpu_loads(finished.stdout)
    last = (finished.stderr.strip().splitlines() or ["it printed nothing"])[-1]
    return GpuLoads(problem=f"the child that watches GPUs ended with {finished.returncode}: {last[:200]}")


def parse_gpu_loads(text: str) -> GpuLoads:
    """What the child printed. Anything else than its report is a problem, never an exception."""
    try:
        report = json.loads(text.splitlines()[-1])
        if isinstance(report.get("problem"), str):
            return GpuLoads(problem=report["problem"])
        return GpuLoads(
            samples=tuple(tuple(_gpu_load(entry) for entry in sample) for sample in report["samples"]),
            own_pids=frozenset(pid for each in report["own_pids"] if (pid := _count(each)) is not None),
        )
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
        return GpuLoads(problem=f"the child that watches GPUs printed another thing than its report: {text[:80]!r}")


def only_known(loads: GpuLoads, known: GpuProbe) -> GpuLoads:
    """Without the devices that `only_visible` left out of the probe: they are not ours."""
    uuids = {gpu.uuid for gpu in known.gpus if gpu.uuid}
    nameless = {gpu.index for gpu in known.gpus if gpu.uuid is None}
    samples = tuple(
        tuple(gpu for gpu in sample if gpu.uuid in uuids or gpu.index in nameless) for sample in loads.samples
    )
    return replace(loads, samples=samples)


def _children_lists(root: Path, own_pid: int) -> Callable[[int], list[int]]:
    """The kernel's own lists of children; where it keeps none, one walk over all processes."""
    if (root / f"proc/{own_pid}/task/{own_pid}/children").is_file():
        return lambda pid: list(_listed(root, pid))
    below: dict[int, list[int]] = defaultdict(list)
    for pid in _numbered(root / "proc"):
        if (times := parse_process_times(_text(root / f"proc/{pid}/stat"))) is not None:
            below[times[0]].append(pid)
    return lambda pid: below.get(pid, [])


def _listed(root: Path, pid: int) -> Iterator[int]:
    for thread in _numbered(root / f"proc/{pid}/task"):  # any thread may have started one
        words = _text(root / f"proc/{pid}/task/{thread}/children").split()
        yield from (int(word) for word in words if _is_count(word))


def _numbered(folder: Path) -> list[int]:
    try:
        return [int(name) for name in os.listdir(folder) if _is_count(name)]  # noqa: PTH208 - half the time of iterdir
    except OSError:
        return []  # it ended meanwhile


def _gpu_load(entry: dict[str, Any]) -> GpuLoad:
    clocks = ("sm_clock_mhz", "sm_clock_max_mhz", "memory_clock_mhz", "memory_clock_max_mhz")
    return GpuLoad(
        index=_count(entry["index"]) or 0,
        uuid=entry.get("uuid") if isinstance(entry.get("uuid"), str) else None,
        processes=tuple(_process(each) for each in entry.get("processes") or ()),
        **{name: _count(entry.get(name)) for name in (*clocks, "reasons", "utilization", "used_mib")},
    )


def _process(entry: dict[str, Any]) -> GpuProcess:
    return GpuProcess(
        pid=_count(entry["pid"]) or 0,
        name=entry.get("name") if isinstance(entry.get("name"), str) else None,
        used_mib=_count(entry.get("used_mib")),
        utilization=_count(entry.get("utilization")),
    )


def _count(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < _ABSURD else None


def _is_count(word: str) -> bool:
    return word.isascii() and word.isdecimal() and len(word) < 20


def _text(path: Path) -> str:
    """The file's text; "" where it cannot be read: a process ended, or this kernel does not tell."""
    try:
        return path.read_text("utf-8", "replace")
    except OSError:
        return ""
