"""What room is left for a plan after the engine ran out of memory while it loaded it. Pure."""

from __future__ import annotations

from appliance.engines.gpus import device_id
from appliance.engines.llama.planning.hardware.observed_limits import Limits
from appliance.engines.llama.planning.inputs import SPARE_SHARE
from appliance.plan import Plan, Shortage
from appliance.probe import Hardware
from appliance.values import dataclass


@dataclass(frozen=True, kw_only=True)
class Missing:
    """`limits` leave the plan `missing_mib` less than it takes in one place: the memory of a GPU, or of the host."""

    limits: Limits
    missing_mib: float
    where: str
    gpu_id: str | None


def missing(hardware: Hardware, plan: Plan, shortage: Shortage, limits: Limits) -> Missing | None:
    """None for a GPU that the plan does not use. What the plan takes counts, and not what seemed free: of a plan with
    room to spare, less room would change nothing."""
    gpu, held_back_mib, context_mib, where = None, 0.0, 0.0, "the host"
    if shortage.device is not None:
        used = {share.device: share for share in plan.placement.shares}
        share = used.get(shortage.device)
        gpu = next((each for each in hardware.gpus.gpus if share and device_id(each) == share.gpu.id), None)
        if share is None or gpu is None:
            return None
        held_back_mib, context_mib = share.gpu.held_back_mib, share.gpu.context_mib
        where = f"{shortage.device} ({share.gpu.name})"
    if gpu is None or gpu.is_unified:
        taken = taken_mib(hardware, plan, None)
        left = max(0.0, taken - shortage.refused_mib)
        # Nothing is added for the prompt cache, which is given up where a plan does not fit beside it.
        usable_mib = int(left / (1 - SPARE_SHARE))
        return Missing(limits=limits.with_host(usable_mib), missing_mib=taken - left, where=where, gpu_id=None)
    id = device_id(gpu)
    taken = taken_mib(hardware, plan, id)
    left = taken - shortage.refused_mib
    if shortage.free_mib is not None and shortage.free_mib < taken:
        # The log tells all that was missing, and not only of which buffer: a refused cache of 16 GiB may lack one.
        # What it says is free is so beside its context.
        left = shortage.free_mib + context_mib - held_back_mib
    left = max(0.0, left)
    less = limits.with_gpu(id, int(left + held_back_mib))
    return Missing(limits=less, missing_mib=taken - left, where=where, gpu_id=id)


def taken_mib(hardware: Hardware, plan: Plan, gpu_id: str | None) -> float:
    """Of that GPU's memory, or of the host's with the GPUs that have none of their own. Without the caches that grow
    only with use: loading does not need them."""
    if gpu_id is not None:
        return sum(share.memory.total for share in plan.placement.shares if share.gpu.id == gpu_id)
    unified = {device_id(gpu) for gpu in hardware.gpus.gpus if gpu.is_unified}
    on_gpus = sum(
        share.memory.total + share.gpu.held_back_mib for share in plan.placement.shares if share.gpu.id in unified
    )
    return plan.memory.total - plan.memory.cache - plan.memory.checkpoints + on_gpus
