"""Intervals of predicted speeds: 80 % of the results that predictions were compared with lie within them. Pure.

`python3 -m benchmarks.speed_model` computes the figures from the half of the published results that the constants are
fitted to. It also tells how many results of the other half lie within the intervals.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from appliance.model import Model
from appliance.plan import Placement, Speed

Group = Literal["one card", "mixture on one card", "several cards", "card and host", "CPU"]

# For decode and prefill: 80 % of a group's results have |ln(prediction / result)| below this.
SPREADS: Mapping[Group, tuple[float, float]] = {
    "one card": (0.1, 0.1),
    "mixture on one card": (0.15, 0.24),
    "several cards": (0.12, 0.33),
    "card and host": (0.21, 0.16),
    "CPU": (0.2, 0.19),
}


def group_of(placement: Placement, model: Model) -> Group:
    """Return the group whose results are like this plan."""
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
