"""Measurements of a plan, and their combination into a curve. Pure.

A start from a profile imports this file, so code that only the search needs is elsewhere.
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
MARGIN = 1.5  # another measurement is begun only if so many times the longest one so far fits into the time left
# A resumed tuning does not try again what failed so often; a single failure may have had a passing cause. This holds
# for optional parts (speculative decoding, slots, KV cache types). A plan's failure counts at once, since other plans
# can take its place.
TRIES = 2


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """One measurement of the plan `key`. If the engine failed, `error` is its message and there are no points.

    `is_long` is True if it decoded LONGER times as many tokens. `conditions` describe other load on the machine.
    """

    key: str
    points: tuple[Point, ...] = ()
    is_long: bool = False
    load_s: float = 0.0
    seconds: float = 0.0  # including the load
    cost_s: float | None = None  # seconds without a load, on the engine that served; None: `seconds`
    allocated: Allocated | None = None
    error: str | None = None
    lacking_device: str | None = None
    lacking_mib: float | None = None
    conditions: Conditions | None = None

    @property
    def spent_s(self) -> float:
        return self.seconds if self.cost_s is None else self.cost_s

    @property
    def disturbance(self) -> str | None:
        """Other load that disturbed the measurement; None if there was none or it is unknown."""
        return self.conditions.disturbance if self.conditions else None

    def describe(self) -> str:
        """Return words such as "context 40,960, kv_type f16, threads 2 …: 116.0 tok/s at 32, 42.1 at 2,048"."""
        if self.error:
            return f"{self.key}: {self.error}"
        speeds = ", ".join(f"{p.speed.describe()} at {p.depth:,}" for p in self.points)
        return f"{self.key}: {speeds}" + (f" (disturbed: {self.disturbance})" if self.disturbance else "")


def curve_of(measurements: Iterable[Measurement]) -> Curve:
    """Return the curve of one plan: at each depth the mean of its measurements, weighted by decoded tokens. Disturbed
    measurements count only if there are no others. At least one measurement must have points."""
    by_depth: dict[int, list[tuple[float, Point]]] = {}
    for measurement in _calm(measurements):
        for point in measurement.points:
            by_depth.setdefault(point.depth, []).append((_weight(measurement, point.noise_factor), point))
    return Curve(points=tuple(_mean(by_depth[depth]) for depth in sorted(by_depth)))


def _mean(looks: Sequence[tuple[float, Point]]) -> Point:
    """Return the geometric mean of points, since noise is relative. Prefill is from those that read the most tokens."""
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
    """Return the preference between equally fast plans: an exact KV cache first, then the engine's own preference."""
    return 2 * (plan.kv_type in EXACT) + plan.launch.tie_break


def scored(plans: Iterable[Plan], measurements: Sequence[Measurement]) -> list[Scored]:
    """Return the measured plans with their curves. Plans whose last measurement failed are left out, unless that holds
    for all."""
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
    """Return the relative noise of the combined measurements of a plan."""
    return NOISE / math.sqrt(
        sum(_weight(look, max(point.noise_factor for point in look.points)) for look in _calm(looks))
    )


def _weight(look: Measurement, noise_factor: float) -> float:
    return (LONGER if look.is_long else 1) / noise_factor**2


def _calm(looks: Iterable[Measurement]) -> list[Measurement]:
    seen = [look for look in looks if look.points]
    return [look for look in seen if look.disturbance is None] or seen
