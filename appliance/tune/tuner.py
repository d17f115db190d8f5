"""The loop: what to measure next, measured, until nothing promising is left or the time is up."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from appliance.command import Command
from appliance.errors import EngineArgumentsError, EngineError, EngineLibraryError
from appliance.plan import Plan, with_measured
from appliance.tune.measure import Step, common_depths, measure
from appliance.tune.search import CHAT, Measurement, Workload, best, job_s, next_plan, plan_of, scaled

SAME_FOR_EVERY_PLAN = (EngineArgumentsError, EngineLibraryError)


@dataclass(frozen=True, kw_only=True)
class Tuned:
    """The winner and everything that was seen on the way."""

    plan: Plan
    chosen: Measurement
    measurements: tuple[Measurement, ...]
    workload: Workload
    seconds: float
    stopped_by: str  # "everything measured" or "budget"


async def tune(
    plans: Sequence[Plan],
    start: Callable[[Plan], Command],
    *,
    budget_s: float,
    tell: Callable[[Step], None],
    done: Callable[[Measurement], None],
) -> Tuned:
    """Measures until nothing promising is left or the budget cannot hold another plan.

    A plan that the engine fails on becomes a Measurement with its words. Raises the EngineError of the first that
    failed when none could be measured, and at once when it is one that no other plan can mend.
    """
    began = time.monotonic()
    workload = scaled(CHAT, plans[0].context)
    measurements: list[Measurement] = []
    failures: list[EngineError] = []
    stopped_by = "everything measured"
    while (plan := next_plan(plans, measurements, workload)) is not None:
        left_s = budget_s - (time.monotonic() - began)
        if measurements and left_s < max(m.seconds for m in measurements):
            stopped_by = "budget"
            break
        plan_began = time.monotonic()
        try:
            measurement = await measure(plan, start, left_s=left_s, at=common_depths(measurements), tell=tell)
        except SAME_FOR_EVERY_PLAN:
            raise
        except EngineError as error:
            failures.append(error)
            seconds = time.monotonic() - plan_began
            measurement = Measurement(
                threads=plan.threads, ubatch=plan.ubatch, variant=plan.variant, error=error.message, seconds=seconds
            )
        measurements.append(measurement)
        done(measurement)
    chosen = best(measurements, workload)
    if chosen is None:
        raise failures[0]
    return Tuned(
        plan=with_measured(plan_of(plans, chosen), _why(chosen, measurements, workload)),
        chosen=chosen,
        measurements=tuple(measurements),
        workload=workload,
        seconds=time.monotonic() - began,
        stopped_by=stopped_by,
    )


def _why(chosen: Measurement, measurements: Sequence[Measurement], workload: Workload) -> str:
    took = f"{job_s(chosen, workload):.1f} s for a {workload.name} job"
    others = [job_s(m, workload) for m in measurements if m is not chosen and m.points]
    if not others:
        return f"the only one measured: {took}"
    return f"best of {len(others) + 1} measured: {took}, the next {min(others):.1f} s"


def speed_in_words(tuned: Tuned) -> str:
    """As in "decodes 116.0 tok/s at 32 tokens of context, 42.1 at 2,048; a chat job takes 3.1 s"."""
    first, *rest = (f"{1000 / point.decode_ms:.1f} tok/s at {point.depth:,}" for point in tuned.chosen.points)
    curve = ", ".join((f"{first} tokens of context", *rest))
    return f"decodes {curve}; a {tuned.workload.name} job takes {job_s(tuned.chosen, tuned.workload):.1f} s"
