"""(plans, measurements) -> what to measure next, and which was best: pure.

Speed is a curve over depth. Each measurement holds points of it; a job's decode time is the integral of the curve over
the depths that the job passes, straight lines between points and level beyond the last.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from appliance.engines.llama_server import Allocated
from appliance.plan import Plan

NOISE = 0.03  # a challenger that is not better by more than this may owe it to chance; the earlier plan stays


@dataclass(frozen=True, kw_only=True)
class Point:
    """Speed with `depth` tokens in the cache: milliseconds a token, decode at this depth and prefill up to it."""

    depth: int
    decode_ms: float
    prefill_ms: float
    prefill_tokens: int


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


@dataclass(frozen=True, kw_only=True)
class Workload:
    """A job: so many tokens in, so many out."""

    name: str
    tokens_in: int
    tokens_out: int


CHAT = Workload(name="chat", tokens_in=512, tokens_out=256)


def scaled(workload: Workload, context: int) -> Workload:
    """The same proportions inside a smaller window."""
    whole = workload.tokens_in + workload.tokens_out
    if whole <= context:
        return workload
    tokens_in = context * workload.tokens_in // whole
    return Workload(name=f"{workload.name} (scaled to {context})", tokens_in=tokens_in, tokens_out=context - tokens_in)


def decode_ms(points: Sequence[Point], depth: float) -> float:
    """Milliseconds a token at `depth`: linear between points, level outside them."""
    ordered = sorted(points, key=lambda point: point.depth)
    if depth <= ordered[0].depth:
        return ordered[0].decode_ms
    for low, high in itertools.pairwise(ordered):
        if depth <= high.depth:
            share = (depth - low.depth) / (high.depth - low.depth)
            return low.decode_ms + share * (high.decode_ms - low.decode_ms)
    return ordered[-1].decode_ms


def prefill_s(points: Sequence[Point], tokens: int) -> float:
    """Seconds to read `tokens` tokens into an empty cache: each stretch at its measured rate, the rest at the last."""
    seconds, done = 0.0, 0
    ordered = sorted(points, key=lambda point: point.depth)
    for point in ordered:
        step = max(0, min(tokens, point.depth) - done)
        seconds += step * point.prefill_ms / 1000
        done += step
    return seconds + (tokens - done) * ordered[-1].prefill_ms / 1000


def job_s(measurement: Measurement, workload: Workload) -> float:
    """Seconds for one job from an empty cache; infinite for a plan that failed."""
    if not measurement.points:
        return float("inf")
    steps = 16
    width = workload.tokens_out / steps
    depths = (workload.tokens_in + (i + 0.5) * width for i in range(steps))
    decode = sum(decode_ms(measurement.points, depth) * width for depth in depths) / 1000
    return prefill_s(measurement.points, workload.tokens_in) + decode


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
