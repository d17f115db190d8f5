"""Plans with what the engine's own loader says that they need: pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from appliance.engines.llama.planning.arguments.launch import launch_of
from appliance.plan import GpuAllocation, Memory, Plan
from appliance.values import dataclass


@dataclass(frozen=True, kw_only=True)
class Projection:
    """Needed MiB as (model, context, compute): of each GPU in the engine's order, and of the host."""

    devices: tuple[tuple[float, float, float], ...]
    host: tuple[float, float, float]


def refine(plans: Sequence[Plan], projections: Sequence[Projection | None]) -> list[Plan]:
    """The plans in their order with corrected figures, without those that do not fit by them.

    Of GPUs everything is taken; of the host only the buffers, since nothing is mapped or copied there while the loader
    computes. A plan without a projection, or with one of other devices, stays as it is.
    """
    refined = [_corrected(plan, found) for plan, found in zip(plans, projections, strict=True)]
    return [plan for plan in refined if all(s.memory.total <= s.gpu.free_mib for s in plan.placement.shares)]


def _corrected(plan: Plan, found: Projection | None) -> Plan:
    shares = plan.placement.shares
    if found is None or len(found.devices) != len(shares):
        return plan
    logits = _logits(plan)
    of_shares = [0.0] * (len(shares) - 1) + [logits] if shares else []  # the output is the last GPU's
    rows = zip(shares, found.devices, of_shares, strict=True)
    corrected = tuple(_share(share, sizes, logits) for share, sizes, logits in rows)
    if launch_of(plan).extras.adapters:  # which the loader does not load
        corrected = tuple(_with_weights_of(share, before) for share, before in zip(corrected, shares, strict=True))
    memory = replace(plan.memory, compute=_compute(plan.memory, found.host[2], 0.0 if shares else logits))
    return replace(plan, memory=memory, placement=replace(plan.placement, shares=corrected))


def _logits(plan: Plan) -> float:
    """MiB that the loader counts beyond the server: it computes with the logits of a whole batch, the server with one
    row a slot, which the plan has as its output."""
    rows = min(launch_of(plan).ubatch, plan.context)
    return plan.memory.output / plan.parallel * (rows - plan.parallel)


def _share(share: GpuAllocation, sizes: tuple[float, float, float], logits: float) -> GpuAllocation:
    model, context, compute = sizes
    memory = share.memory
    # The loader reckons the KV cache and recurrent states as one.
    kv = max(0.0, context - memory.state)
    return replace(share, memory=replace(memory, weights=model, kv=kv, compute=_compute(memory, compute, logits)))


def _with_weights_of(share: GpuAllocation, before: GpuAllocation) -> GpuAllocation:
    weights = max(share.memory.weights, before.memory.weights)
    return replace(share, memory=replace(share.memory, weights=weights))


def _compute(memory: Memory, projected: float, logits: float) -> float:
    """The larger of the two: either may miss what the other counts."""
    return max(memory.compute, projected - max(0.0, logits))
