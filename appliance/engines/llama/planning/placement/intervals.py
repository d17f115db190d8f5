"""How far predicted speeds are off: intervals that hold 80 % of the results they were compared with. Pure.

`python3 -m benchmarks.speed_model` makes the figures from the half of the published results that constants were fitted
to, and says how many of the other half lie within them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from appliance.model import Model
from appliance.plan import Placement, Speed

Group = Literal["one card", "mixture on one card", "several cards", "card and host", "CPU"]

# By group: of the logarithm of a prediction's ratio to the result, what 80 % stay below, of decode and of prefill.
SPREADS: Mapping[Group, tuple[float, float]] = {
    "one card": (0.1, 0.1),
    "mixture on one card": (0.15, 0.24),
    "several cards": (0.12, 0.33),
    "card and host": (0.21, 0.16),
    "CPU": (0.2, 0.19),
}


def group_of(placement: Placement, model: Model) -> Group:
    """Return the group of results that a plan is like."""
    if not placement.shares:
        return "CPU"
    if not placement.is_whole:
        return "card and host"
    if len(placement.shares) > 1:
        return "several cards"
    return "mixture on one card" if model.experts else "one card"


def with_intervals(speed: Speed, placement: Placement, model: Model) -> Speed:
    """Return the speed with the intervals of its group."""
    return speed.within(*SPREADS[group_of(placement, model)])
