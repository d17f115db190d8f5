"""(plans, measurements) -> what to measure next, and which was best: pure.

One coordinate after the other, as tuner.py calls it. `guided.py` is the search for many knobs that a predictor leads.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from appliance.engines.llama_server import Allocated
from appliance.plan import Plan
from appliance.tune.curve import Curve, Point
from appliance.tune.workload import CHAT, Workload, scaled
from appliance.tune.workload import job_s as of_curve

__all__ = [
    "CHAT", "NOISE", "Measurement", "Point", "Workload", "best", "job_s", "next_plan", "plan_of", "scaled",
]  # fmt: skip

NOISE = 0.03  # a challenger that is not better by more than this may owe it to chance; the earlier plan stays


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """What one plan did. With `error` there are no points: the engine ended, and these are its words."""

    threads: int
    ubatch: int
    points: tuple[Point, ...] = ()
    load_s: float = 0.0
    seconds: float = 0.0
    allocated: Allocated | None = None
    error: str | None = None
    variant: str = ""  # of the plan: where its layers lay; empty for the CPU alone

    def in_words(self) -> str:
        """As in "2 threads, ubatch 512: 116.0 tok/s at 32, 42.1 at 2,048"."""
        what = f"{self.threads} threads, ubatch {self.ubatch}" + (f", {self.variant}" if self.variant else "")
        if self.error:
            return f"{what}: {self.error}"
        return f"{what}: " + ", ".join(f"{1000 / p.decode_ms:.1f} tok/s at {p.depth:,}" for p in self.points)


def job_s(measurement: Measurement, workload: Workload) -> float:
    """Seconds for one job from an empty cache; infinite for a plan that failed."""
    return of_curve(Curve(points=measurement.points), workload) if measurement.points else float("inf")


def best(measurements: Sequence[Measurement], workload: Workload) -> Measurement | None:
    """The shortest job, in the order measured: a later one must be better by more than the noise."""
    chosen: Measurement | None = None
    for measurement in measurements:
        if not measurement.points:
            continue
        if chosen is None or job_s(measurement, workload) < job_s(chosen, workload) * (1 - NOISE):
            chosen = measurement
    return chosen


def next_plan(plans: Sequence[Plan], measurements: Sequence[Measurement], workload: Workload) -> Plan | None:
    """One coordinate after the other: variants of the placement, threads at the best of them, then ubatch at the best
    threads, then None."""
    seen = {(m.threads, m.ubatch, m.variant) for m in measurements}
    first = plans[0]
    leader = best(measurements, workload) or first
    by_variant = [p for p in plans if (p.threads, p.ubatch) == (first.threads, first.ubatch)]
    by_threads = [p for p in plans if p.ubatch == first.ubatch and p.variant == leader.variant]
    by_ubatch = [p for p in plans if p.threads == leader.threads]
    for candidate in (*by_variant, *by_threads, *by_ubatch):
        if _key(candidate) not in seen:
            return candidate
    return None


def plan_of(plans: Sequence[Plan], measurement: Measurement) -> Plan:
    return next(p for p in plans if _key(p) == (measurement.threads, measurement.ubatch, measurement.variant))


def _key(plan: Plan) -> tuple[int, int, str]:
    return plan.threads, plan.ubatch, plan.variant
