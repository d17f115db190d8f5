"""Checks if other programs use the CPUs while doctor runs: they make an engine slower."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

from appliance.doctor.check import Check, judged, passed
from appliance.probe.load.conditions import conditions
from appliance.probe.load.counters import query_load
from appliance.probe.load.load import LoadSample

NAME = "other programs"
_REMEDY = "they slow the engine down: stop them, or give the engine CPUs of its own (docker run --cpuset-cpus)"


def query_work() -> LoadSample:
    """Return the CPU use so far. If `docker exec` started doctor, the appliance in the same container counts as our own
    work: everything that the container's first process started."""
    seen = query_load()
    if _is_begun_by_first():
        return seen
    beside = query_load(own_pid=1)
    own_s = None if seen.own_s is None or beside.own_s is None else seen.own_s + beside.own_s
    return replace(seen, own_s=own_s, own_pids=seen.own_pids | beside.own_pids)


def other_work_check(before: LoadSample, after: LoadSample) -> Check:
    """Return the check of the CPU share that other programs took between the two samples."""
    seen = conditions(before, after)
    if seen.foreign_cpu is None:
        return passed(NAME, "unknown")
    quiet = f"took {seen.foreign_cpu:.0%} of {seen.cpus} CPUs during this check"
    return judged(NAME, seen.crowd or quiet, _REMEDY if seen.crowd else None)


def _is_begun_by_first() -> bool:
    """True if process 1 is this process or an ancestor. A process that enters a container has a parent outside of it,
    shown as 0."""
    pid = os.getpid()
    while pid > 1:
        try:
            pid = int(Path(f"/proc/{pid}/stat").read_text("utf-8", "replace").rpartition(")")[2].split()[1])
        except (OSError, ValueError, IndexError):
            return True  # unknown: count our own process tree only
    return pid == 1
