"""Memory limits for the next plan after the engine ran out of memory while it loaded one. Pure."""

from __future__ import annotations

from appliance.engines.gpus import device_id
from appliance.engines.llama.planning.hardware.observed_limits import Limits
from appliance.engines.llama.planning.inputs import SPARE_SHARE
from appliance.plan import Plan, Shortage
from appliance.probe import Hardware
from appliance.values import dataclass


@dataclass(frozen=True, kw_only=True)
class Missing:
    """Memory that a plan lacked in one place, and the limits that follow for the next plan."""

    limits: Limits  # they leave `missing_mib` less in that place than the plan takes
    missing_mib: float
    where: str  # the place, for messages
    gpu_id: str | None  # None: host memory


def missing(hardware: Hardware, plan: Plan, shortage: Shortage, limits: Limits) -> Missing | None:
    """Return the memory that the plan lacked, by what the engine's log said; None for a GPU that it does not use.

    The new limit is counted from the memory that the plan takes, not from the memory that seemed free: if the plan
    leaves room, a limit below the free memory would change nothing.
    """
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
        # The prompt cache needs no room of its own: it is given up if the plan does not fit otherwise.
        usable_mib = int(left / (1 - SPARE_SHARE))
        return Missing(limits=limits.with_host(usable_mib), missing_mib=taken - left, where=where, gpu_id=None)
    id = device_id(gpu)
    taken = taken_mib(hardware, plan, id)
    left = taken - shortage.refused_mib
    if shortage.free_mib is not None and shortage.free_mib < taken:
        # The free memory in the log gives the exact shortage: a refused cache of 16 GiB may lack one GiB only. That
        # figure is without the CUDA context, so the context is added.
        left = shortage.free_mib + context_mib - held_back_mib
    left = max(0.0, left)
    less = limits.with_gpu(id, int(left + held_back_mib))
    return Missing(limits=less, missing_mib=taken - left, where=where, gpu_id=id)


def taken_mib(hardware: Hardware, plan: Plan, gpu_id: str | None) -> float:
    """Return the MiB that the plan takes of a GPU, or of the host if `gpu_id` is None.

    Host memory includes GPUs that share it. Prompt cache and checkpoints are left out: loading does not need them.
    """
    if gpu_id is not None:
        return sum(share.memory.total for share in plan.placement.shares if share.gpu.id == gpu_id)
    unified = {device_id(gpu) for gpu in hardware.gpus.gpus if gpu.is_unified}
    on_gpus = sum(
        share.memory.total + share.gpu.held_back_mib for share in plan.placement.shares if share.gpu.id in unified
    )
    return plan.memory.total - plan.memory.cache - plan.memory.checkpoints + on_gpus
