"""The loop: what to measure next, measured, until nothing promising is left or the time is up."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from appliance.command import Command
from appliance.errors import EngineNotReadyError
from appliance.plan import Plan
from appliance.tune.measure import Step, deepest, measure
from appliance.tune.search import CHAT, Measurement, Workload, best, job_s, next_plan, plan_of, scaled


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

    Raises EngineNotReadyError when no plan could be measured, with the words of the first that failed.
    """
    began = time.monotonic()
    workload = scaled(CHAT, plans[0].context)
    measurements: list[Measurement] = []
    stopped_by = "everything measured"
    while (plan := next_plan(plans, measurements, workload)) is not None:
        left_s = budget_s - (time.monotonic() - began)
        if measurements and left_s < max(m.seconds for m in measurements):
            stopped_by = "budget"
            break
        measurement = await measure(plan, start, left_s=left_s, deep=deepest(measurements), tell=tell)
        measurements.append(measurement)
        done(measurement)
    chosen = best(measurements, workload)
    if chosen is None:
        message = f"no plan could be measured: {measurements[0].error}"
        raise EngineNotReadyError(message, hint="the engine's last lines are above; `--tune off` serves the prediction")
    return Tuned(
        plan=plan_of(plans, chosen),
        chosen=chosen,
        measurements=tuple(measurements),
        workload=workload,
        seconds=time.monotonic() - began,
        stopped_by=stopped_by,
    )


def speed_in_words(tuned: Tuned) -> str:
    """As in "decodes 116.0 tok/s at 32 tokens of context, 42.1 at 2,048; a chat job takes 3.1 s"."""
    first, *rest = (f"{1000 / point.decode_ms:.1f} tok/s at {point.depth:,}" for point in tuned.chosen.points)
    curve = ", ".join((f"{first} tokens of context", *rest))
    return f"decodes {curve}; a {tuned.workload.name} job takes {job_s(tuned.chosen, tuned.workload):.1f} s"
