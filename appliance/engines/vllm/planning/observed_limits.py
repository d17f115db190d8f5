"""Limits of memory and context that a failed start revealed. They are lower than the planner's own figures."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import field

from appliance.values import dataclass


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Limits; infinity means none. `kv_mib` is for the cache of one rank. `context` is the longest context that the
    engine said fits. `free_mib` is what the engine found free on a GPU, by id, after its CUDA context was allocated."""

    kv_mib: float = math.inf
    context: float = math.inf
    free_mib: Mapping[str, float] = field(default_factory=dict)

    def free_of(self, card: str) -> float:
        return self.free_mib.get(card, math.inf)


NO_LIMITS = Limits()
