"""Room that an engine was seen to have, where it is less than what the probe says, and the most that is assumed."""

from __future__ import annotations

import math
from dataclasses import replace

from appliance.probe import Memory
from appliance.values import dataclass


@dataclass(frozen=True, kw_only=True)
class Limits:
    """In MiB, of the host's usable memory, and of what is free on a GPU, by its id, what is held back included; in
    GB/s, of host memory that was not measured."""

    host_mib: float = math.inf
    gpus_mib: tuple[tuple[str, float], ...] = ()
    dram_gb_s: float = math.inf

    def of_host(self, memory: Memory) -> float:
        """What plans may use of its memory."""
        return min(float(memory.usable_mib), self.host_mib)

    def of_gpu(self, id: str) -> float:
        return min((mib for name, mib in self.gpus_mib if name == id), default=math.inf)

    def with_host(self, mib: float) -> Limits:
        return replace(self, host_mib=min(self.host_mib, mib))

    def with_gpu(self, id: str, mib: float) -> Limits:
        return replace(self, gpus_mib=(*self.gpus_mib, (id, mib)))


NO_LIMITS = Limits()
