"""Host memory of a plan: what is loaded how, and the caches that what is left is for."""

from __future__ import annotations

import math
from dataclasses import replace

from appliance.engines.llama.planning import reasons
from appliance.engines.llama.planning.inputs import PlanInputs
from appliance.engines.llama.planning.memory.memory import (
    CHECKPOINTS_MAX,
    Copies,
    checkpoint_mib,
    copies,
    drafts_mib,
    host_overhead_mib,
    weights_mib,
)
from appliance.engines.llama.planning.memory.slots import conversation_mib
from appliance.engines.llama.planning.placement.batch import (
    load_mode,
)
from appliance.engines.llama.planning.placement.placement import Placed, PlacementJob
from appliance.plan import Memory, Placement
from appliance.plan.parts.choice import Choice
from appliance.values import dataclass

CACHE_MAX_MIB = 8192.0  # llama-server's own default
CACHE_SPARE = 0.05  # beside one conversation that fills the context, for a side request
CHECKPOINTS_SHARE = 0.25  # of what is left


def host_memory(inputs: PlanInputs, found: Memory, load_mode: str, has_gpu: bool) -> Memory:
    """What is copied beside the mapped file counts as allocated; its originals only in the engine's own sums."""
    copied = Copies() if has_gpu else copies(inputs.model, inputs.kernels.isa)
    is_mapped = "mmap" in load_mode
    return replace(
        found,
        weights=found.weights + copied.more,
        overhead=host_overhead_mib(inputs.model) + found.overhead,
        repacked=copied.made,
        mapped_twice=copied.originals + drafts_mib(inputs.model) if is_mapped else 0.0,
    )


def unified_mib(inputs: PlanInputs, placement: Placement) -> float:
    """What GPUs take of host memory, since they have none of their own."""
    unified = {device.id for device in inputs.resources.devices if device.is_unified}
    return sum(share.memory.total + share.gpu.held_back_mib for share in placement.shares if share.gpu.id in unified)


@dataclass(frozen=True, kw_only=True)
class Caches:
    """Of prompts, and checkpoints of what cannot be rolled back."""

    memory: Memory  # of the host, with them
    checkpoints: int | None  # of each slot; None for a model that needs none
    longest_mib: float  # one conversation that fills the context takes
    by_cache: Choice
    by_checkpoints: tuple[Choice, ...]

    @property
    def prompts_mib(self) -> int:
        return int(self.memory.cache)


def spare_beside(inputs: PlanInputs, placement: Placement) -> float:
    """MiB of host memory that may be filled beside GPUs that have none of their own."""
    return inputs.spare_mib - unified_mib(inputs, placement)


def caches(inputs: PlanInputs, host: Memory, spare_mib: float, *, kv_type: str, context: int, ubatch: int) -> Caches:
    """Those that fit beside `host`."""
    count, host, by_checkpoints = _with_checkpoints(inputs, host, kv_type, spare_mib)
    longest = conversation_mib(inputs.model, kv_type, context, ubatch=ubatch, checkpoints=count)
    host, by_cache = _with_prompts(inputs, host, kv_type, spare_mib, longest)
    return Caches(memory=host, checkpoints=count, longest_mib=longest, by_cache=by_cache, by_checkpoints=by_checkpoints)


def _with_checkpoints(
    inputs: PlanInputs, host: Memory, kv_type: str, spare_mib: float
) -> tuple[int | None, Memory, tuple[Choice, ...]]:
    """Copies of what cannot be rolled back, so that a chat that goes back is not read anew from its beginning."""
    each = checkpoint_mib(inputs.model, kv_type) * inputs.settings.slots
    if not each:
        return None, host, ()
    left = spare_mib - host.total - inputs.least_cache_mib
    count = int(
        max(0 if inputs.is_bare else 1, min(CHECKPOINTS_MAX, min(CACHE_MAX_MIB, left * CHECKPOINTS_SHARE) / each))
    )
    return count, replace(host, checkpoints=count * each), (reasons.checkpoints(count, each, CHECKPOINTS_MAX),)


def _with_prompts(
    inputs: PlanInputs, host: Memory, kv_type: str, spare_mib: float, longest_mib: float
) -> tuple[Memory, Choice]:
    """Without it a side request costs the conversation a whole prefill: it is off only where the model would not fit
    beside it. It is larger than the engine's default where one conversation can be."""
    asked = inputs.settings.cache_ram_mib
    if asked is not None:
        return replace(host, cache=float(asked)), reasons.cache_asked(inputs.settings)
    left = spare_mib - host.total
    most = max(CACHE_MAX_MIB, float(math.ceil(longest_mib * (1 + CACHE_SPARE))))
    size = float(int(min(most, max(inputs.least_cache_mib, left / 2))))
    return replace(host, cache=size), reasons.cache(inputs.model, kv_type, size, left, most)


def load_mode_of(inputs: PlanInputs, job: PlacementJob, placed: Placed) -> tuple[str, Choice]:
    """Locking only where the limit allows it: a refusal is said here and is not fatal."""
    settings, hardware, model = inputs.settings, inputs.hardware, inputs.model
    if settings.load_mode == "auto":
        needed = placed.host.total + inputs.least_cache_mib + host_overhead_mib(model)
        fits = needed <= spare_beside(inputs, placed.placement)
        mode, why = load_mode(job, inputs.resources, placed.placement, settings, fits=fits)
        return mode, Choice(name="load_mode", value=mode, reason=why, source="default" if mode == "mmap" else "memory")
    source = settings.sources["load_mode"]
    lockable = hardware.memory.memlock_limit_mib
    if "mlock" in settings.load_mode and lockable is not None and lockable < weights_mib(model):
        mode = "mmap" if "mmap" in settings.load_mode else "none"
        why = (
            f"{settings.load_mode} was asked for, but only {lockable:,.0f} MiB may be locked and the weights are "
            f"{weights_mib(model):,.0f}; give the container --ulimit memlock=-1"
        )
        return mode, Choice(name="load_mode", value=mode, reason=why, source=source, is_refusal=True)
    return settings.load_mode, Choice(name="load_mode", value=settings.load_mode, reason="asked for", source=source)
