"""Upper limits of memory and bandwidth that a start knows in addition to the probe."""

from __future__ import annotations

import math
from dataclasses import replace

from appliance.probe import Memory
from appliance.values import dataclass


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Upper limits for the plans of one start, for example after a load that ran out of memory."""

    host_mib: float = math.inf  # usable host memory
    gpus_mib: tuple[tuple[str, float], ...] = ()  # free memory by the GPU's id, with what is held back
    dram_gb_s: float = math.inf  # bandwidth that is assumed for host memory if it was not measured

    def of_host(self, memory: Memory) -> float:
        """Return the MiB of host memory that plans may use."""
        return min(float(memory.usable_mib), self.host_mib)

    def of_gpu(self, id: str) -> float:
        return min((mib for name, mib in self.gpus_mib if name == id), default=math.inf)

    def with_host(self, mib: float) -> Limits:
        return replace(self, host_mib=min(self.host_mib, mib))

    def with_gpu(self, id: str, mib: float) -> Limits:
        return replace(self, gpus_mib=(*self.gpus_mib, (id, mib)))


NO_LIMITS = Limits()
