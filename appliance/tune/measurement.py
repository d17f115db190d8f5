"""What was seen of one plan, and what several looks at it come to: pure.

A start from a profile imports this: what only the search needs stays out.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace

from appliance.plan import Allocated, Plan
from appliance.probe.conditions import Conditions
from appliance.tune.curve import LONGER, Curve, Point
from appliance.tune.modes import Rated
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

    def in_words(self) -> str:
        """As in "40,960 f16, 2 threads …: 116.0 tok/s at 32, 42.1 at 2,048"."""
        if self.error:
            return f"{self.key}: {self.error}"
        speeds = ", ".join(f"{p.speed.in_words()} at {p.depth:,}" for p in self.points)
        return f"{self.key}: {speeds}" + (f" (disturbed: {self.disturbance})" if self.disturbance else "")


def curve_of(measurements: Iterable[Measurement]) -> Curve:
    """Of looks at one plan, at least one of them with points: at each depth their mean, a long one counted as often as
    it decoded more; disturbed ones only where there is no other."""
    seen = [m for m in measurements if m.points]
    calm = [m for m in seen if m.disturbance is None] or seen
    by_depth: dict[int, list[tuple[float, Point]]] = {}
    for measurement in calm:
        weight = float(LONGER if measurement.is_long else 1)
        for point in measurement.points:
            by_depth.setdefault(point.depth, []).append((weight / point.noisier**2, point))
    return Curve(points=tuple(_mean(by_depth[depth]) for depth in sorted(by_depth)))


def _mean(looks: Sequence[tuple[float, Point]]) -> Point:
    """Geometric, since noise is relative; prefill of the look that read the most."""
    if len(looks) == 1:
        return looks[0][1]
    whole = sum(weight for weight, _ in looks)
    decode_ms = math.exp(sum(weight * math.log(point.decode_ms) for weight, point in looks) / whole)
    read = max((point for _, point in looks), key=lambda point: point.prefill_tokens)
    return replace(read, decode_ms=decode_ms, noisier=min(point.noisier for _, point in looks))


def merit(plan: Plan) -> int:
    """Beside speed: a cache that is not rounded, then weights that the kernel may share and drop."""
    return 2 * (plan.kv_type in EXACT) + (plan.load_mode == "mmap")


def _closely(look: Measurement) -> int:
    """How closely it was looked: a glance, longer, or longer and in a deep context too."""
    return look.is_long + (look.is_long and len(look.points) > 2)


def rated(plans: Iterable[Plan], measurements: Sequence[Measurement]) -> list[Rated]:
    """Every plan that was measured.

    A plan that was only glanced at is left out where another of its window was looked at longer, and deeper: the best
    of many glances is the luckiest. So is one that failed at the last look, unless all did.
    """
    has_failed = {measurement.key: bool(measurement.error) for measurement in measurements}
    seen: dict[str, list[Measurement]] = {}
    for measurement in measurements:
        if measurement.points:
            seen.setdefault(measurement.key, []).append(measurement)
    seen = {key: looks for key, looks in seen.items() if not has_failed[key]} or seen
    found = []
    for plan in plans:
        if looks := seen.get(plan.key):
            closely = max(_closely(look) for look in looks)
            each = Rated(key=plan.key, window=plan.context, curve=curve_of(looks), merit=merit(plan))
            found.append((closely, each))
    closest: dict[int, int] = {}
    for closely, each in found:
        closest[each.window] = max(closely, closest.get(each.window, 0))
    return [each for closely, each in found if closely == closest[each.window]]
