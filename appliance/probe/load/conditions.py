"""Compute what else the machine did during a measurement, from counters before and after it and samples in between.
Pure.

A measurement under foreign load is only provisional. So a disturbance must be caused by others and large enough to
change a figure. Our own threads and our own CPU quota are part of the plan.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from appliance.probe.load.load import GpuLoad, GpuLoads, LoadSample
from appliance.probe.machine.hardware import GpuHolder, GpuProbe
from appliance.values import dataclass

# The kernel counts in hundredths of a second: over less than half a second, shares of a few per cent are not visible.
SHORTEST_S = 0.5
# Share of the CPUs that we may use. Caches, clock and memory bandwidth are shared, and decode is bound by bandwidth: it
# loses about the share that others take. Measurements vary by 5 % anyway.
FOREIGN_CPU = 0.05
# Threads of a matrix product wait for the slowest at each barrier. If no CPU is idle, one foreign process that takes
# half a core slows all our threads.
CROWDED, FOREIGN_CORES = 0.95, 0.5
STEAL = 0.02  # of the time in which a CPU was wanted; a vCPU that is taken away also delays a barrier
FOREIGN_GPU = 5  # per cent: a desktop that redraws a clock stays below, a video or a second model does not
SLOWED = 0.1  # of the samples: a single one may be a short event of the power supply
WORKING = 20  # per cent of utilization above which clocks count; an idle GPU clocks down, which means nothing

# NVML's bits of nvmlClocksEventReasons. Left out: an idle GPU and clocks set by the user, which are no slowdown.
REASONS = {
    0x0004: "power cap",
    0x0008: "hardware slowdown",
    0x0010: "sync boost",
    0x0020: "thermal slowdown by software",
    0x0040: "thermal slowdown by hardware",
    0x0080: "power brake",
}
# A power cap is not among them: a GPU with a power limit always works under it, also while it serves.
SLOWDOWN_BITS = 0x0008 | 0x0020 | 0x0040 | 0x0080
SLOWDOWNS = frozenset(word for bit, word in REASONS.items() if bit & SLOWDOWN_BITS)


@dataclass(frozen=True, kw_only=True)
class GpuConditions:
    """One device during the measurement. `clock_share` is the mean clock while it worked, relative to the highest."""

    index: int
    uuid: str | None = None
    clock_share: float | None = None
    utilization: float | None = None  # per cent, mean of the samples
    reasons: tuple[str, ...] = ()  # all reasons seen for not clocking higher
    slowed: float | None = None  # share of samples in which heat or the power supply slowed it
    # per cent; the larger of the utilization at rest and that of other processes
    foreign_utilization: int | None = None
    foreign: tuple[GpuHolder, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Conditions:
    """Shares from 0 to 1 over the interval; None means unknown."""

    interval_s: float
    cpus: int | None = None
    own_cpu: float | None = None  # of these CPUs' time
    foreign_cpu: float | None = None
    steal: float | None = None  # of the time in which a CPU was wanted
    gpus: tuple[GpuConditions, ...] = ()
    problem: str | None = None  # why nothing is known about the GPUs

    @property
    def crowd(self) -> str | None:
        """Describe others' load if it is so large that our work would disturb them; None if there is room."""
        cores = (self.foreign_cpu or 0.0) * (self.cpus or 0)
        is_crowded = cores >= max(FOREIGN_CORES, FOREIGN_CPU * (self.cpus or 0))
        cpu = _cpu_disturbances(replace(self, steal=None)) if is_crowded else ()
        gpus = (words for gpu in self.gpus for words in _gpu(replace(gpu, slowed=None)))
        return " and ".join([*cpu, *gpus]) or None

    @property
    def disturbance(self) -> str | None:
        """Describe what others did during the measurement, and how much; None if it was undisturbed."""
        return " and ".join([*_cpu_disturbances(self), *(words for gpu in self.gpus for words in _gpu(gpu))]) or None


def conditions(
    before: LoadSample,
    after: LoadSample,
    *,
    known: GpuProbe | None = None,
    gpus: GpuLoads | None = None,
) -> Conditions:
    """Compute the conditions. `known` is the probe before our engine started: processes that held memory then are not
    ours."""
    interval_s = max(0.0, after.time_s - before.time_s)
    gpus = gpus or GpuLoads()
    return Conditions(
        interval_s=interval_s,
        cpus=after.cpus,
        **(_cpu_shares(before, after, interval_s) if interval_s >= SHORTEST_S else {}),
        gpus=_gpus(known or GpuProbe(), gpus.samples, before.own_pids | after.own_pids | {*gpus.own_pids}),
        problem=gpus.problem,
    )


def _cpu_shares(before: LoadSample, after: LoadSample, interval_s: float) -> dict[str, float | None]:
    busy_s, own_s = _risen(before.busy_s, after.busy_s), _risen(before.own_s, after.own_s)
    steal_s = _risen(before.steal_s, after.steal_s)
    room_s = interval_s * after.cpus if after.cpus and after.cpus == before.cpus else None
    wanted_s = None if busy_s is None or steal_s is None else busy_s + steal_s
    # Our own time is exact to the nanosecond, that of CPUs is sampled at ticks: the difference may be negative.
    foreign_s = None if busy_s is None or own_s is None else max(0.0, busy_s - own_s)
    return {
        "own_cpu": None if own_s is None or room_s is None else min(1.0, own_s / room_s),
        "foreign_cpu": None if foreign_s is None or room_s is None else min(1.0, foreign_s / room_s),
        "steal": None if steal_s is None or wanted_s is None else steal_s / wanted_s if wanted_s else 0.0,
    }


def _risen(before: float | None, after: float | None) -> float | None:
    """Return the increase; None if unknown, or if the counter fell because the machine migrated or the group is new."""
    return after - before if before is not None and after is not None and after >= before else None


def _cpu_disturbances(seen: Conditions) -> Iterator[str]:
    if seen.foreign_cpu is not None and seen.cpus:
        cores = seen.foreign_cpu * seen.cpus
        is_crowded = seen.foreign_cpu + (seen.own_cpu or 0.0) > CROWDED and cores >= FOREIGN_CORES
        if seen.foreign_cpu > FOREIGN_CPU or is_crowded:
            yield f"other programs took {seen.foreign_cpu:.0%} of {_cpus(seen.cpus)} ({cores:.1f} cores)"
    if seen.steal is not None and seen.steal > STEAL:
        yield f"the hypervisor took {seen.steal:.0%} of the CPU time for other machines"


def _cpus(count: int) -> str:
    return "the CPU" if count == 1 else f"{count} CPUs"


def _gpu(gpu: GpuConditions) -> Iterator[str]:
    if gpu.slowed is not None and gpu.slowed > SLOWED:
        why = ", ".join(word for word in gpu.reasons if word in SLOWDOWNS)
        clock = "" if gpu.clock_share is None else f", at {gpu.clock_share:.0%} of its clock"
        yield f"GPU {gpu.index} was slowed down ({why}) for {gpu.slowed:.0%} of the time{clock}"
    if gpu.foreign_utilization is not None and gpu.foreign_utilization > FOREIGN_GPU:
        who = f": {people(gpu.foreign)}" if gpu.foreign else ""
        yield f"GPU {gpu.index} was {gpu.foreign_utilization} % busy with the work of others{who}"


def people(holders: Sequence[GpuHolder]) -> str:
    """Describe processes, such as "python (pid 4711), a process (pid 12)"."""
    return ", ".join(f"{(holder.name or 'a process').rsplit('/', 1)[-1]} (pid {holder.pid})" for holder in holders)


def _gpus(known: GpuProbe, samples: Sequence[Sequence[GpuLoad]], own_pids: frozenset[int]) -> tuple[GpuConditions, ...]:
    devices = dict.fromkeys((gpu.index, gpu.uuid) for sample in samples for gpu in sample)
    return tuple(
        _one_gpu(known, [gpu for sample in samples for gpu in sample if (gpu.index, gpu.uuid) == each], own_pids)
        for each in devices
    )


def _one_gpu(known: GpuProbe, looks: Sequence[GpuLoad], own_pids: frozenset[int]) -> GpuConditions:
    """Conditions of one GPU. The first and the last sample were taken while our engine rested."""
    # our engine works in these samples; it rests in the first and the last, so all load there is of others
    meanwhile = looks[1:-1]
    probed = next((gpu for gpu in known.gpus if (gpu.uuid, gpu.index) == (looks[0].uuid, looks[0].index)), None)
    earlier = {holder.pid for holder in probed.holders} if probed else set()
    ours = _ours(looks, earlier, own_pids)
    others = {process.pid: process for look in looks for process in look.processes if process.pid not in ours}
    # Clocks of an idle GPU are low by design and do not show heat or power limits.
    working = [look for look in meanwhile if (look.utilization or 0) >= WORKING]
    reasons = [look.reasons for look in meanwhile if look.reasons is not None]
    return GpuConditions(
        index=looks[0].index,
        uuid=looks[0].uuid,
        clock_share=_mean([_share(look.sm_clock_mhz, look.sm_clock_max_mhz) for look in working]),
        utilization=_mean([look.utilization for look in meanwhile]),
        reasons=tuple(word for bit, word in REASONS.items() if any(bit & each for each in reasons)),
        slowed=_mean([bool(each & SLOWDOWN_BITS) for each in reasons]),
        foreign_utilization=_foreign_utilization(looks, ours),
        foreign=tuple(GpuHolder(pid=p.pid, name=p.name, used_mib=p.used_mib) for p in others.values()),
    )


def _ours(looks: Sequence[GpuLoad], earlier: set[int], own_pids: frozenset[int]) -> set[int]:
    """Return the pids of our engine.

    In a container the driver may use the host's pids, so none is in our process tree. Then ours are the first ones that
    appear and were not there before our engine.
    """
    listed = [{process.pid for process in look.processes} - earlier for look in looks]
    if any(pids & own_pids for pids in listed):
        return set(own_pids) - earlier
    return next((pids for pids in listed if pids), set())


def _foreign_utilization(looks: Sequence[GpuLoad], ours: set[int]) -> int | None:
    # Two sources: the whole GPU while we rest, and single processes while we work. Some drivers name no processes in a
    # container, and a job that began later is in no sample at rest. The larger figure is used.
    at_rest = [look.utilization for look in (looks[0], looks[-1]) if look.utilization is not None]
    told = [
        sum(process.utilization or 0 for process in others)
        for look in looks[1:-1]
        if not (others := [process for process in look.processes if process.pid not in ours])
        or any(process.utilization is not None for process in others)
    ]
    of_processes = _mean([min(100, each) for each in told])
    return max([*at_rest, *([] if of_processes is None else [round(of_processes)])], default=None)


def _share(clock: int | None, most: int | None) -> float | None:
    return min(1.0, clock / most) if clock is not None and most else None


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None
