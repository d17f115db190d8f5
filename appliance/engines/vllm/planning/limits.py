"""Room that the engine was seen to have, where it is less than what is computed."""

from __future__ import annotations

import math

from appliance.values import dataclass


@dataclass(frozen=True, kw_only=True)
class Limits:
    """`kv_mib` of one rank's cache; `context` is what the engine itself named as the longest that fits."""

    kv_mib: float = math.inf
    context: float = math.inf


NO_LIMITS = Limits()
