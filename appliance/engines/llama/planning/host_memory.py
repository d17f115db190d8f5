"""Host memory of a plan: how weights are loaded, and the sizes of the prompt cache and context checkpoints."""

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
CACHE_SPARE = 0.05  # room for a side request, as a share of a conversation that fills the context
CHECKPOINTS_SHARE = 0.25  # share of the remaining host memory that checkpoints may take


def host_memory(inputs: PlanInputs, found: Memory, load_mode: str, has_gpu: bool) -> Memory:
    """Return the placement's host memory with the programs' overhead and the copies that the CPU backend makes.

    Copies count as allocated. Their mapped originals count only in the sums of the engine's log (`mapped_twice`),
    because the kernel may drop those pages.
    """
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
    """Return the MiB of host memory that the plan's GPUs use, because they have no memory of their own."""
    unified = {device.id for device in inputs.resources.devices if device.is_unified}
    return sum(share.memory.total + share.gpu.held_back_mib for share in placement.shares if share.gpu.id in unified)


@dataclass(frozen=True, kw_only=True)
class Caches:
    """Prompt cache and context checkpoints of a plan, and the reasons for their sizes."""

    memory: Memory  # host memory with both
    checkpoints: int | None  # checkpoints of each slot; None: the model needs none
    longest_mib: float  # size of one conversation that fills the context
    by_cache: Choice
    by_checkpoints: tuple[Choice, ...]

    @property
    def prompts_mib(self) -> int:
        return int(self.memory.cache)


def spare_beside(inputs: PlanInputs, placement: Placement) -> float:
    """Return the MiB of host memory that may be filled, less what GPUs without memory of their own use."""
    return inputs.spare_mib - unified_mib(inputs, placement)


def caches(inputs: PlanInputs, host: Memory, spare_mib: float, *, kv_type: str, context: int, ubatch: int) -> Caches:
    """Return the largest prompt cache and checkpoints that fit in `spare_mib` after `host`."""
    count, host, by_checkpoints = _with_checkpoints(inputs, host, kv_type, spare_mib)
    longest = conversation_mib(inputs.model, kv_type, context, ubatch=ubatch, checkpoints=count)
    host, by_cache = _with_prompts(inputs, host, kv_type, spare_mib, longest)
    return Caches(memory=host, checkpoints=count, longest_mib=longest, by_cache=by_cache, by_checkpoints=by_checkpoints)


def _with_checkpoints(
    inputs: PlanInputs, host: Memory, kv_type: str, spare_mib: float
) -> tuple[int | None, Memory, tuple[Choice, ...]]:
    """Return the number of context checkpoints, the host memory with them, and the reason.

    States and sliding windows cannot be rolled back. Without checkpoints a chat that is edited would be read again
    from its beginning.
    """
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
    """Return the host memory with the prompt cache, and the reason for its size.

    Without the cache, a side request costs the conversation a whole prefill: it is off only if the model would not fit
    otherwise. It is larger than the engine's default if one conversation may be larger.
    """
    asked = inputs.settings.cache_ram_mib
    if asked is not None:
        return replace(host, cache=float(asked)), reasons.cache_asked(inputs.settings)
    left = spare_mib - host.total
    most = max(CACHE_MAX_MIB, float(math.ceil(longest_mib * (1 + CACHE_SPARE))))
    size = float(int(min(most, max(inputs.least_cache_mib, left / 2))))
    return replace(host, cache=size), reasons.cache(inputs.model, kv_type, size, left, most)


def load_mode_of(inputs: PlanInputs, job: PlacementJob, placed: Placed) -> tuple[str, Choice]:
    """Return how weights are loaded, and the reason. mlock beyond RLIMIT_MEMLOCK is refused, but is no error."""
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
