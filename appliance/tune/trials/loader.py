"""What the engine's own loader says of plans, before any of them is measured."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence

from appliance.console.report import Report
from appliance.plan import Plan
from appliance.tune.trials.engine import Bench

REFINED = 12  # plans that it is asked about


async def refined(plans: Sequence[Plan], bench: Bench, *, budget_s: float, report: Report) -> Sequence[Plan]:
    """The most promising ones as the loader estimates them, where they use GPUs: on a CPU its log tells the same. Those
    that do not fit by its figures are left out, unless none is left then."""
    if not plans[0].placement.shares:
        return plans
    first = sorted(plans, key=lambda plan: plan.speed.job_s if plan.speed else 0.0)[:REFINED]
    given_up = threading.Event()
    try:
        found = await asyncio.to_thread(
            bench.engine.refine,
            first,
            bench.install,
            budget_s=budget_s,
            is_wanted=lambda: not given_up.is_set(),
        )
    finally:
        given_up.set()  # a thread is not cancelled, and its children would go on beside whoever asks
    fitting = {plan.key: plan for plan in found}
    words = f"the engine's loader was asked about {len(first)} plans: {len(fitting)} fit by its figures"
    report.info("plans_refined", words)
    dropped = {plan.key for plan in first} - set(fitting)
    return [fitting.get(plan.key, plan) for plan in plans if plan.key not in dropped] or plans
