"""Memory as one model may use it beside the others: what plans hold, and what is left.

Free memory as the kernel tells it is not what is free for another model: the mapped weights of a loaded one lie in the
page cache, which counts as free, and a prompt cache grows later. So a loaded model counts with all that it may hold.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from appliance.engines.gpus import device_id
from appliance.plan import MemoryPeak, Plan
from appliance.plan.plan import Memory
from appliance.probe import Hardware

HOST = "host"
HOST_SHARE = 0.96  # of usable host memory: planners leave 3 % free
LEAST_CACHE_MIB = 256.0  # of the caches that a plan may grow; more of them is welcome, and not needed


def held_by(plan: Plan, *, allocated_mib: float | None = None, peak: MemoryPeak | None = None) -> dict[str, float]:
    """Return what a loaded plan may hold by place, MiB: the highest of what was planned, what its engine allocated, and
    what its GPUs were seen to hold."""
    # Only buffers are in the engine's log: a prompt cache does not grow with them.
    over = max(0.0, allocated_mib / plan.predicted_mib - 1) if allocated_mib and plan.predicted_mib else 0.0
    places = _places(plan, lambda memory: memory.total + over * memory.as_logged)
    for card in peak.cards if peak else ():
        places[card.device] = max(places.get(card.device, 0.0), float(card.peak_mib))
    return places


def mapped_mib(plan: Plan) -> float:
    """Return the weights that a plan maps from their file, MiB: needed memory that the kernel counts as free."""
    is_mapped = dict(plan.knobs).get("load_mode") == "mmap"
    return max(0.0, plan.memory.weights - plan.memory.repacked) if is_mapped else 0.0


def needed_by(plan: Plan) -> dict[str, float]:
    """Return the free memory that loading the plan needs by place, MiB, with what its planner leaves free."""
    places = _places(plan, _without_growth)
    places[HOST] /= HOST_SHARE
    for share in plan.placement.shares:
        if not share.gpu.is_unified:
            places[share.gpu.id] += share.gpu.held_back_mib
    return places


def _places(plan: Plan, mib_of: Callable[[Memory], float]) -> dict[str, float]:
    places = {HOST: mib_of(plan.memory)}
    for share in plan.placement.shares:
        place = HOST if share.gpu.is_unified else share.gpu.id
        places[place] = places.get(place, 0.0) + mib_of(share.memory)
    return places


def _without_growth(memory: Memory) -> float:
    grows = memory.cache + memory.checkpoints
    return memory.total - grows + min(grows, LEAST_CACHE_MIB)


def free_on(hardware: Hardware) -> dict[str, float]:
    """Return what is free by place, MiB."""
    gpus = {device_id(gpu): float(gpu.vram_free_mib or 0) for gpu in hardware.gpus.gpus if not gpu.is_unified}
    return {HOST: float(hardware.memory.usable_mib), **gpus}


def less(hardware: Hardware, taken: Mapping[str, float]) -> Hardware:
    """Return the hardware with less memory free by place; negative figures give memory back."""
    memory = hardware.memory
    host = max(0, round(memory.usable_mib - taken.get(HOST, 0.0)))
    cards = tuple(
        gpu
        if gpu.is_unified or gpu.vram_free_mib is None or device_id(gpu) not in taken
        else replace(gpu, vram_free_mib=_within(gpu.vram_free_mib - taken[device_id(gpu)], gpu.vram_total_mib))
        for gpu in hardware.gpus.gpus
    )
    if memory.limit_mib is None:
        usable = replace(memory, available_mib=host)
    else:
        available_mib = max(host, memory.available_mib)
        usable = replace(memory, available_mib=available_mib, limit_used_mib=max(0, memory.limit_mib - host))
    return replace(hardware, memory=usable, gpus=replace(hardware.gpus, gpus=cards))


def beside_containers(hardware: Hardware, claimed: Mapping[str, float]) -> Hardware:
    """Return the hardware with less host memory free, by what models of other containers may still grow into, MiB.

    A claim of more than the machine has is no figure of a model, and must not stop this start: it is passed over.
    """
    memory = hardware.memory
    mib = claimed.get(HOST, 0.0)
    if not 0 < mib <= memory.total_mib:
        return hardware
    return replace(hardware, memory=replace(memory, available_mib=max(0, round(memory.available_mib - mib))))


def _within(mib: float, total_mib: int | None) -> int:
    return max(0, round(mib if total_mib is None else min(mib, total_mib)))


def added(*each: Mapping[str, float]) -> dict[str, float]:
    """Return the sums by place."""
    return {place: sum(one.get(place, 0.0) for one in each) for place in {place for one in each for place in one}}
