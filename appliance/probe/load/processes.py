"""Our own tree of processes and the CPU time that it took, by psutil: imported when something is watched."""

from __future__ import annotations

from contextlib import suppress

import psutil  # type: ignore[import-untyped]


def query_tree(own_pid: int) -> dict[int, float]:
    """The CPU seconds of `own_pid` and of its descendants, by pid; empty when it is not there, or /proc is hidden.

    A child's time goes to its parent when it is waited for, so the sum does not fall when one ends.
    """
    tree: dict[int, float] = {}
    # Denied: /proc is mounted with hidepid, and a part of the tree would make our own work that of others.
    with suppress(psutil.NoSuchProcess, psutil.AccessDenied):
        head = psutil.Process(own_pid)
        for process in (head, *head.children(recursive=True)):
            with suppress(psutil.NoSuchProcess):  # it ended meanwhile
                tree[process.pid] = _cpu_seconds(process)
        return tree
    return {}


def _cpu_seconds(process: psutil.Process) -> float:
    """Of it and of those of its children that were waited for."""
    times = process.cpu_times()
    return float(times.user + times.system + times.children_user + times.children_system)
