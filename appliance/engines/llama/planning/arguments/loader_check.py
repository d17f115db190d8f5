"""Correction of plans by the memory that the engine's own loader says they need. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from appliance.engines.llama.planning.arguments.launch import launch_of
from appliance.plan import GpuAllocation, Memory, Plan
from appliance.values import dataclass


@dataclass(frozen=True, kw_only=True)
class Projection:
    """Memory that the loader says a plan needs, MiB as (model, context, compute): each GPU in order, and the host."""

    devices: tuple[tuple[float, float, float], ...]
    host: tuple[float, float, float]


def refine(plans: Sequence[Plan], projections: Sequence[Projection | None]) -> list[Plan]:
    """Return the plans in their order with corrected figures, without those that no longer fit.

    All figures of GPUs are corrected. On the host only the buffers are, because the loader maps and copies nothing
    while it computes. A plan stays as it is if it has no projection, or one with another number of devices.
    """
    refined = [_corrected(plan, found) for plan, found in zip(plans, projections, strict=True)]
    return [plan for plan in refined if all(s.memory.total <= s.gpu.free_mib for s in plan.placement.shares)]


def _corrected(plan: Plan, found: Projection | None) -> Plan:
    shares = plan.placement.shares
    if found is None or len(found.devices) != len(shares):
        return plan
    logits = _logits(plan)
    of_shares = [0.0] * (len(shares) - 1) + [logits] if shares else []  # the output lies on the last GPU
    rows = zip(shares, found.devices, of_shares, strict=True)
    corrected = tuple(_share(share, sizes, logits) for share, sizes, logits in rows)
    if launch_of(plan).extras.adapters:  # the loader does not load adapters, so its weights may be too small
        corrected = tuple(_with_weights_of(share, before) for share, before in zip(corrected, shares, strict=True))
    elif slots := launch_of(plan).slots:  # nor does it know slots of experts
        corrected = tuple(_with_more(share, mib) for share, mib in zip(corrected, slots.mib, strict=True))
    memory = replace(plan.memory, compute=_compute(plan.memory, found.host[2], 0.0 if shares else logits))
    return replace(plan, memory=memory, placement=replace(plan.placement, shares=corrected))


def _logits(plan: Plan) -> float:
    """Return the MiB that the loader counts and the server does not need.

    The loader counts logits for every token of a ubatch. The server needs one row for each slot, which is the plan's
    `output`.
    """
    rows = min(launch_of(plan).ubatch, plan.context)
    return plan.memory.output / plan.parallel * (rows - plan.parallel)


def _share(share: GpuAllocation, sizes: tuple[float, float, float], logits: float) -> GpuAllocation:
    model, context, compute = sizes
    memory = share.memory
    # The loader's context figure is the sum of KV cache and recurrent states.
    kv = max(0.0, context - memory.state)
    return replace(share, memory=replace(memory, weights=model, kv=kv, compute=_compute(memory, compute, logits)))


def _with_weights_of(share: GpuAllocation, before: GpuAllocation) -> GpuAllocation:
    weights = max(share.memory.weights, before.memory.weights)
    return replace(share, memory=replace(share.memory, weights=weights))


def _with_more(share: GpuAllocation, mib: float) -> GpuAllocation:
    return replace(share, memory=replace(share.memory, weights=share.memory.weights + mib))


def _compute(memory: Memory, projected: float, logits: float) -> float:
    """Return the larger of the two figures, because each may miss a part that the other counts."""
    return max(memory.compute, projected - max(0.0, logits))
