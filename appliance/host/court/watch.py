"""Watches the CPU while both builds work: time that neither of them, nor this command, has used is foreign."""

from __future__ import annotations

import time
from collections.abc import Sequence

import psutil  # type: ignore[import-untyped]
from docker.api import APIClient
from docker.errors import APIError

from appliance.values import dataclass

# As `probe/load/conditions.py`, which the wheel of the host command does not have; a test compares them.
FOREIGN_CPU = 0.05
STEAL = 0.02


@dataclass(frozen=True, kw_only=True)
class Sample:
    """Counters in seconds. `own_s` is None if Docker does not tell what the containers used."""

    time_s: float
    busy_s: float
    steal_s: float
    own_s: float | None


def available_mib() -> float:
    """Return the memory that new programs can have, by the kernel's own estimate."""
    return float(psutil.virtual_memory().available) / 2**20


class CpuWatch:
    """Reads the counters of this machine and of the containers that work."""

    def __init__(self, client: APIClient) -> None:
        self._client = client

    def sample(self, container_ids: Sequence[str]) -> Sample:
        times = psutil.cpu_times()
        mine = psutil.Process().cpu_times()
        theirs = [self._container_s(each) for each in container_ids]
        known = [each for each in theirs if each is not None]
        return Sample(
            time_s=time.monotonic(),
            busy_s=times.user + times.nice + times.system,
            steal_s=getattr(times, "steal", 0.0),
            own_s=mine.user + mine.system + sum(known) if len(known) == len(theirs) else None,
        )

    def _container_s(self, id_: str) -> float | None:
        try:
            told = self._client.stats(id_, stream=False, one_shot=True)
            return float(told["cpu_stats"]["cpu_usage"]["total_usage"]) / 1e9
        except (APIError, KeyError, TypeError):
            return None


def disturbance(before: Sample, after: Sample, *, cpus: int) -> str:
    """Describe what others did between the samples; empty if they left the CPUs alone. Unknown counts as disturbed."""
    seconds = (after.time_s - before.time_s) * cpus
    busy_s, steal_s = after.busy_s - before.busy_s, after.steal_s - before.steal_s
    if before.own_s is None or after.own_s is None or seconds <= 0:
        return "it is not known what other programs did: Docker tells no CPU time"
    foreign = (busy_s - (after.own_s - before.own_s)) / seconds
    if foreign > FOREIGN_CPU:
        return f"other programs took more than {FOREIGN_CPU:.0%} of {cpus} CPUs"
    if busy_s + steal_s > 0 and steal_s / (busy_s + steal_s) > STEAL:
        return f"the hypervisor took more than {STEAL:.0%} of the CPU time for other machines"
    return ""
