"""The machine as an engine found it that ran out of memory while it loaded a plan, to plan anew for. Pure."""

from __future__ import annotations

from dataclasses import replace

from appliance.engines.llama.planning.decide import SPARE_SHARE, least_cache
from appliance.engines.llama.planning.devices import device_id
from appliance.plan import Plan, Shortage
from appliance.probe import Gpu, Hardware
from appliance.settings import Settings
from appliance.values import dataclass


@dataclass(frozen=True, kw_only=True)
class Narrowed:
    """`hardware` has `missing_mib` less than the plan takes in one place: of a GPU's own memory, or of the host's."""

    hardware: Hardware
    missing_mib: float
    where: str
    gpu_id: str | None

    def is_smaller(self, after: Plan, before: Plan) -> bool:
        """Whether it takes less there. Only then another attempt is worth a load."""
        return _taken_mib(self.hardware, after, self.gpu_id) < _taken_mib(self.hardware, before, self.gpu_id)


def narrowed(hardware: Hardware, plan: Plan, shortage: Shortage, settings: Settings) -> Narrowed | None:
    """None for a GPU that the plan does not use. What the plan takes counts, and not what seemed free: of a plan with
    room to spare, less room would change nothing."""
    gpu, held_back_mib, where = None, 0.0, "the host"
    if shortage.device is not None:
        used = {share.device: share for share in plan.placement.shares}
        share = used.get(shortage.device)
        gpu = next((each for each in hardware.gpus.gpus if share and device_id(each) == share.id), None)
        if share is None or gpu is None:
            return None
        held_back_mib, where = share.held_back_mib, f"{shortage.device} ({share.name})"
    if gpu is None or gpu.is_unified:
        taken_mib = _taken_mib(hardware, plan, None)
        left_mib = max(0.0, taken_mib - shortage.refused_mib)
        usable_mib = int((left_mib + least_cache(settings)) / (1 - SPARE_SHARE))
        memory = replace(hardware.memory, available_mib=min(hardware.memory.available_mib, usable_mib))
        less = replace(hardware, memory=memory)
        return Narrowed(hardware=less, missing_mib=taken_mib - left_mib, where=where, gpu_id=None)
    taken_mib = _taken_mib(hardware, plan, device_id(gpu))
    left_mib = taken_mib - shortage.refused_mib
    if shortage.free_mib is not None and shortage.free_mib < taken_mib:
        # The log tells all that was missing, and not only of which buffer: a refused cache of 16 GiB may lack one.
        left_mib = shortage.free_mib - held_back_mib
    left_mib = max(0.0, left_mib)
    less = _with_free(hardware, gpu, int(left_mib + held_back_mib))
    return Narrowed(hardware=less, missing_mib=taken_mib - left_mib, where=where, gpu_id=device_id(gpu))


def _with_free(hardware: Hardware, gpu: Gpu, free_mib: int) -> Hardware:
    gpus = tuple(replace(each, vram_free_mib=free_mib) if each is gpu else each for each in hardware.gpus.gpus)
    return replace(hardware, gpus=replace(hardware.gpus, gpus=gpus))


def _taken_mib(hardware: Hardware, plan: Plan, gpu_id: str | None) -> float:
    """Of that GPU's memory, or of the host's with the GPUs that have none of their own. Without the caches that grow
    only with use: loading does not need them."""
    if gpu_id is not None:
        return sum(share.memory.total for share in plan.placement.shares if share.id == gpu_id)
    unified = {device_id(gpu) for gpu in hardware.gpus.gpus if gpu.is_unified}
    on_gpus = sum(share.memory.total + share.held_back_mib for share in plan.placement.shares if share.id in unified)
    return plan.memory.total - plan.memory.cache - plan.memory.checkpoints + on_gpus
