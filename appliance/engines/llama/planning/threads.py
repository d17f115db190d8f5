"""Number of threads of a plan, and the cores that they run on. Pure.

llama.cpp cuts a matrix into parts. A thread that is done takes the next part (rates.py names the source), and all
threads wait for the last one. A slow core adds little, or makes the others wait. So the prediction is the number of
threads that compute most on the fastest cores. If slower cores are left out, an affinity mask keeps threads off them.
"""

from __future__ import annotations

from dataclasses import replace

from appliance.engines.llama.planning import reasons
from appliance.engines.llama.planning.arguments.launch import NUMA_MODES
from appliance.engines.llama.planning.arguments.numa import MASK_FLAG, Numa, numa_modes
from appliance.engines.llama.planning.hardware.rates import EVEN_PARTS, PARTS, CpuRates
from appliance.engines.llama.planning.placement.job_time import speed_of
from appliance.engines.llama.planning.placement.placement import Placed
from appliance.engines.llama.planning.placement.roofline import DEPTH, with_threads
from appliance.image_facts import EngineFacts
from appliance.model import Model
from appliance.plan import CHAT_TOKENS_IN, Costs, Placement
from appliance.plan.parts.choice import Choice
from appliance.probe import Cpu, Hardware
from appliance.settings import Settings
from appliance.values import dataclass

MASK_CPUS = 512  # CPUs that an affinity mask of the engine can name: GGML_MAX_N_THREADS


def thread_counts(settings: Settings, cpu: Cpu, rates: CpuRates | None) -> tuple[tuple[int, ...], Choice]:
    """Return the candidates, the predicted number first, and the reason for it.

    None is above what the container may use; the engine itself would count the host's cores. If cores are unequal, the
    candidates include all cores, and the fastest kinds alone.
    """
    most = cpu.threads_max
    if settings.threads:
        threads = min(settings.threads, most)
        return (threads,), reasons.threads_asked(settings, threads)
    cores = max(1, min(cpu.cores, most))
    first = rates.threads if rates and cpu.is_unequal else cores
    found = (first, *_kinds(cpu), cores, most, max(1, first // 2))
    counts = tuple(dict.fromkeys(count for count in found if count <= most))
    return counts, reasons.threads(cpu, first)


@dataclass(frozen=True, kw_only=True)
class Threads:
    """Predicted number of threads, NUMA mode and CPU affinity, with the reasons."""

    count: int
    reading: int  # while a prompt is read
    numa: Numa
    cpus: tuple[int, ...]
    choices: tuple[Choice, ...]


def threads_of(
    settings: Settings, engine: EngineFacts, hardware: Hardware, rates: CpuRates | None, placed: Placed, costs: Costs
) -> Threads:
    (first, *_), choice = thread_counts(settings, hardware.cpu, rates)
    numa = numa_modes(settings, engine, hardware, placed.placement, placed.host.weights)[0]
    count = min(first, numa.threads_max or first)
    if not placed.placement.is_whole and not numa.cpus:
        choice = _priced(choice, hardware.cpu, rates, costs, placed.placement, count)
    choice = choice if count == first else replace(choice, value=str(count))
    cpus = cpus_of(hardware.cpu, engine, numa, placed.placement, count)
    reading = count
    if not (settings.threads or cpus or placed.placement.is_whole) and count == hardware.cpu.cores:
        reading += hardware.cpu.prompt_threads_more
    if reading > count:
        choice = replace(choice, reason=f"{choice.reason}; {reading} read prompts, which fill the rest of the quota")
    return Threads(
        count=count,
        reading=reading,
        numa=numa,
        cpus=cpus,
        choices=(choice, numa.choice) if numa.choice else (choice,),
    )


def _priced(
    choice: Choice, cpu: Cpu, rates: CpuRates | None, costs: Costs, placement: Placement, threads: int
) -> Choice:
    """Return the choice; if cores are unequal, with the speed of the alternative in its reason.

    The alternative is all cores, or the fastest kind alone if all cores are predicted.
    """
    if not cpu.is_unequal or rates is None or choice.source != "probe":
        return choice
    other = rates.cores if threads < rates.cores else cpu.groups[0].cores
    speeds = tuple(
        speed_of(with_threads(costs, count, rates.cores, rates), DEPTH, CHAT_TOKENS_IN) for count in (threads, other)
    )
    # With a GPU, the GPU reads the prompts.
    of = "decode" if placement.shares else "prefill"
    here, there = (getattr(speed, f"{of}_tokens_per_s") for speed in speeds)
    return replace(choice, reason=reasons.unequal_threads(cpu, threads, other, f"{of} {here:,.1f}", f"{there:,.1f}"))


def _kinds(cpu: Cpu) -> tuple[int, ...]:
    """Return the number of cores of the fastest kind, of the two fastest kinds, and so on; empty if all are equal."""
    if not cpu.is_unequal:
        return ()
    ends = [sum(group.cores for group in cpu.groups[: at + 1]) for at in range(len(cpu.groups))]
    return tuple(min(end, cpu.cores) for end in ends)


def cpus_of(cpu: Cpu, engine: EngineFacts, numa: Numa, placement: Placement, threads: int) -> tuple[int, ...]:
    """Return the CPUs that threads are bound to; empty: threads may run on any CPU."""
    if numa.cpus or numa.mode in NUMA_MODES:
        return numa.cpus
    return _bound_cpus(cpu, engine, placement, threads)


def _bound_cpus(cpu: Cpu, engine: EngineFacts, placement: Placement, threads: int) -> tuple[int, ...]:
    """Return the CPUs of the fastest kinds of cores that hold `threads` threads.

    Empty if that is every CPU, if the plan computes nothing on the CPU, or if a kind's CPUs are unknown.
    """
    if placement.is_whole or MASK_FLAG not in engine.flags or not cpu.is_unequal:
        return ()
    held = 0
    cpus: list[int] = []
    for group in cpu.groups:
        if held >= threads:
            break
        if not group.cpus:
            return ()
        held += group.cores
        cpus += group.cpus
    is_all = len(cpus) >= cpu.logical
    return () if is_all or max(cpus, default=0) >= MASK_CPUS else tuple(sorted(cpus))


def parts_of(model: Model, *, is_repacked: bool) -> int:
    """Return into how many parts a thread's work is cut.

    Repacked experts are cut evenly (repack.cpp, forward_mul_mat_id), and they hold most of the bytes that a token
    reads.
    """
    return EVEN_PARTS if model.experts and is_repacked else PARTS
