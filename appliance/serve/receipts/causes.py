"""Which causes slowed an answer down, from what was read at its beginning and its end. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from enum import StrEnum

from appliance.probe.load.conditions import SLOWDOWN_BITS, WORKING, Conditions
from appliance.probe.load.load import GpuMoment
from appliance.values import dataclass

SLOW = 1.5  # times as long as the profile says
# Below this the clock of the kernel, the network and the first token of a pause between two batches decide.
SLOW_LEAST_S = 0.2
# A cause that explains less of the time lost is not named.
SHARE = 0.15
CAPPED_CLOCK = 0.8  # of the highest clock, while the GPU works: an uncapped one stays above


class Cause(StrEnum):
    OTHER_PROGRAMS = "other_programs"  # they took CPU time
    GPU_CLOCK = "gpu_clock"  # capped, or lowered by heat or the power supply
    PARALLEL_REQUESTS = "parallel_requests"  # other requests ran at the same time
    COLD_CACHE = "cold_cache"  # the prompt had been read before, and was not in the cache any more
    RESTART = "restart"  # the engine was restarted, so that its cache was empty
    MODEL_LOAD = "model_load"  # the model was not loaded, or waited for the memory of another
    TUNING = "tuning"  # the request waited for a measurement to end, or ran beside one


@dataclass(frozen=True, kw_only=True)
class Facts:
    """What was read of one answer. Times are in seconds."""

    seconds: float
    expected_s: float  # by the profile, with all of the prompt in the cache that had been read before
    load_s: float = 0.0  # waited until the model was loaded
    held_s: float = 0.0  # waited for an engine that was away on purpose
    lost_s: float = 0.0  # to read the part of the prompt again that had been read before
    lost_by: Cause = Cause.COLD_CACHE  # what emptied the cache
    is_first_after_restart: bool = False
    is_beside_tuning: bool = False
    beside: float = 0.0  # mean number of other requests that ran meanwhile
    conditions: Conditions | None = None  # of the CPUs; None: unknown
    clock_share: float | None = None  # of working GPUs that were capped; None: none was, or unknown

    @property
    def excess_s(self) -> float:
        return self.seconds - self.expected_s

    @property
    def is_slow(self) -> bool:
        return self.seconds > SLOW * self.expected_s and self.excess_s > SLOW_LEAST_S


def causes(facts: Facts) -> tuple[Cause, ...]:
    """Return the causes of a slow answer, the largest first; empty for one that was not slow."""
    if not facts.is_slow:
        return ()
    largest: dict[Cause, float] = {}
    for cause, seconds in _shares(facts):
        if seconds >= SHARE * facts.excess_s:
            largest[cause] = max(seconds, largest.get(cause, 0.0))
    return tuple(sorted(largest, key=lambda cause: -largest[cause]))


def _shares(facts: Facts) -> Iterator[tuple[Cause, float]]:
    """Yield each cause with the time that it may have cost."""
    ran_s = facts.seconds - facts.held_s - facts.load_s
    yield Cause.MODEL_LOAD, facts.load_s
    yield Cause.TUNING, facts.held_s
    if facts.is_beside_tuning:
        yield Cause.TUNING, ran_s / 2  # the other engine computed as well
    yield facts.lost_by, facts.lost_s
    if facts.is_first_after_restart:
        # Pages and kernels are loaded as the first answer needs them: all that nothing else explains.
        yield Cause.RESTART, facts.excess_s - facts.lost_s - facts.held_s - facts.load_s
    yield Cause.PARALLEL_REQUESTS, ran_s * facts.beside / (1 + facts.beside)
    if facts.conditions is not None and facts.conditions.crowd:
        cores, cpus = (facts.conditions.foreign_cpu or 0.0) * (facts.conditions.cpus or 0), facts.conditions.cpus or 1
        # Threads wait for the slowest one: whoever takes a core from one thread takes it from all.
        yield Cause.OTHER_PROGRAMS, ran_s * min(1.0, cores) * max(0.5, min(1.0, cores / cpus))
    if facts.clock_share is not None:
        yield Cause.GPU_CLOCK, ran_s * (1 - facts.clock_share)


def capped_share(looks: Iterable[Iterable[GpuMoment]]) -> float | None:
    """Return the lowest clock of a working GPU, relative to its highest, if something capped it; None if nothing did,
    or if it is unknown. An idle GPU clocks down, which means nothing."""
    shares = [
        share
        for look in looks
        for gpu in look
        if (gpu.utilization or 0) >= WORKING
        and (share := gpu.clock_share) is not None
        and (share < CAPPED_CLOCK or (gpu.reasons or 0) & SLOWDOWN_BITS)
    ]
    return min(shares, default=None)
