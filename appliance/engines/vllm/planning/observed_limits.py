"""Room that the engine was seen to have, where it is less than what is computed."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import field

from appliance.values import dataclass


@dataclass(frozen=True, kw_only=True)
class Limits:
    """`kv_mib` of one rank's cache; `context` is what the engine itself named as the longest that fits; `free_mib` is
    what it found free of cards, by their id, with its context already there."""

    kv_mib: float = math.inf
    context: float = math.inf
    free_mib: Mapping[str, float] = field(default_factory=dict)

    def free_of(self, card: str) -> float:
        return self.free_mib.get(card, math.inf)


NO_LIMITS = Limits()
