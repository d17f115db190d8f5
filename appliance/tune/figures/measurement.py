"""What was seen of one plan, and what several looks at it come to: pure.

A start from a profile imports this: what only the search needs stays out.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace

from appliance.plan import Allocated, Plan
from appliance.probe.load.conditions import Conditions
from appliance.tune.figures.curve import LONGER, NOISE, Curve, Point
from appliance.tune.figures.modes import Scored
from appliance.values import dataclass

EXACT = ("f32", "f16", "bf16")
# What failed so often is not tried again by a tuning that goes on; once may have been of what was there then. That is
# for what can be done without; a plan's failure counts at once, as others are there to take its place.
MARGIN = 1.5  # times what the longest look so far took, before another is begun
TRIES = 2


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """One look at the plan of this key. With `error` there are no points: the engine ended, and these are its words.

    `is_long` is a look of LONGER times the tokens; `conditions` are what else the machine was doing.
    """

    key: str
    points: tuple[Point, ...] = ()
    is_long: bool = False
    load_s: float = 0.0
    seconds: float = 0.0
    allocated: Allocated | None = None
    error: str | None = None
    lacking_device: str | None = None
    lacking_mib: float | None = None
    conditions: Conditions | None = None

    @property
    def disturbance(self) -> str | None:
        """What spoilt the figures; None where nothing did, or nobody can say."""
        return self.conditions.disturbance if self.conditions else None

    def describe(self) -> str:
        """As in "context 40,960, kv_type f16, threads 2 …: 116.0 tok/s at 32, 42.1 at 2,048"."""
        if self.error:
            return f"{self.key}: {self.error}"
        speeds = ", ".join(f"{p.speed.describe()} at {p.depth:,}" for p in self.points)
        return f"{self.key}: {speeds}" + (f" (disturbed: {self.disturbance})" if self.disturbance else "")


def curve_of(measurements: Iterable[Measurement]) -> Curve:
    """Of looks at one plan, at least one of them with points: at each depth their mean, a long one counted as often as
    it decoded more; disturbed ones only where there is no other."""
    by_depth: dict[int, list[tuple[float, Point]]] = {}
    for measurement in _calm(measurements):
        for point in measurement.points:
            by_depth.setdefault(point.depth, []).append((_weight(measurement, point.noise_factor), point))
    return Curve(points=tuple(_mean(by_depth[depth]) for depth in sorted(by_depth)))


def _mean(looks: Sequence[tuple[float, Point]]) -> Point:
    """Geometric, since noise is relative; prefill of those looks that read the most."""
    if len(looks) == 1:
        return looks[0][1]
    read = max(point.prefill_tokens for _, point in looks)
    alike = [(weight, point) for weight, point in looks if point.prefill_tokens == read]
    return replace(
        alike[0][1],
        decode_ms=_geometric((weight, point.decode_ms) for weight, point in looks),
        prefill_ms=_geometric((1.0, point.prefill_ms) for _, point in alike),
        noise_factor=min(point.noise_factor for _, point in looks),
    )


def _geometric(values: Iterable[tuple[float, float]]) -> float:
    values = list(values)
    whole = sum(weight for weight, _ in values)
    return math.exp(sum(weight * math.log(value) for weight, value in values) / whole)


def tie_break(plan: Plan) -> int:
    """Beside speed: a cache that is not rounded, then what the engine says."""
    return 2 * (plan.kv_type in EXACT) + plan.launch.tie_break


def scored(plans: Iterable[Plan], measurements: Sequence[Measurement]) -> list[Scored]:
    """Every plan that was measured, but for one that failed at the last look, unless all did."""
    has_failed = {measurement.key: bool(measurement.error) for measurement in measurements}
    seen: dict[str, list[Measurement]] = {}
    for measurement in measurements:
        if measurement.points:
            seen.setdefault(measurement.key, []).append(measurement)
    seen = {key: looks for key, looks in seen.items() if not has_failed[key]} or seen
    return [
        Scored(
            key=plan.key, context=plan.context, curve=curve_of(looks), tie_break=tie_break(plan), noise=noise_of(looks)
        )
        for plan in plans
        if (looks := seen.get(plan.key))
    ]


def noise_of(looks: Iterable[Measurement]) -> float:
    """Relative, of the time that these looks come to."""
    return NOISE / math.sqrt(
        sum(_weight(look, max(point.noise_factor for point in look.points)) for look in _calm(looks))
    )


def _weight(look: Measurement, noise_factor: float) -> float:
    return (LONGER if look.is_long else 1) / noise_factor**2


def _calm(looks: Iterable[Measurement]) -> list[Measurement]:
    seen = [look for look in looks if look.points]
    return [look for look in seen if look.disturbance is None] or seen
