"""Our own process tree and its CPU time, by psutil. Imported only when something is watched."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path

import psutil  # type: ignore[import-untyped]


def query_tree(own_pid: int) -> dict[int, float]:
    """CPU seconds of `own_pid` and its descendants, by pid; empty if the process does not exist or /proc is hidden.

    A child's time is added to its parent when it is waited for, so the sum does not fall when a child ends.
    """
    tree: dict[int, float] = {}
    # Access denied: /proc is mounted with hidepid. A part of the tree would count our own work as foreign.
    with suppress(psutil.NoSuchProcess, psutil.AccessDenied):
        head = psutil.Process(own_pid)
        for process in (head, *_below(head)):
            with suppress(psutil.NoSuchProcess):  # the process ended meanwhile
                tree[process.pid] = _cpu_seconds(process)
        return tree
    return {}


def _below(head: psutil.Process) -> Iterator[psutil.Process]:
    """Yield the descendants of the process, by the kernel's lists of children.

    psutil reads every process of the machine for that: 3 ms for 134 of them. Kernels without the lists (gVisor) leave
    that as the only way.
    """
    if not Path(f"/proc/{head.pid}/task/{head.pid}/children").exists():
        yield from head.children(recursive=True)
        return
    pids = [head.pid]
    while pids:
        for child in _children(pids.pop()):
            with suppress(psutil.NoSuchProcess):  # it ended meanwhile, or /proc hides it
                yield psutil.Process(child)
                pids.append(child)


def _children(pid: int) -> Iterator[int]:
    with suppress(OSError):  # the process ended meanwhile, or /proc hides it
        for thread in Path(f"/proc/{pid}/task").iterdir():
            with suppress(FileNotFoundError, ProcessLookupError):  # the thread ended meanwhile
                yield from map(int, (thread / "children").read_text().split())


def _cpu_seconds(process: psutil.Process) -> float:
    """CPU time of the process and of its children that were waited for."""
    times = process.cpu_times()
    return float(times.user + times.system + times.children_user + times.children_system)


def private_mib(pids: Iterable[int]) -> float:
    """Memory of these processes and their descendants that is no file's, MiB: the kernel counts it as used. Processes
    that end meanwhile, or may not be looked at, count nothing."""
    found = 0.0
    for pid in pids:
        with suppress(psutil.NoSuchProcess, psutil.AccessDenied):
            head = psutil.Process(pid)
            for process in (head, *_below(head)):
                with suppress(psutil.NoSuchProcess):
                    memory = process.memory_info()
                    found += max(0, memory.rss - memory.shared) / 2**20
    return found
