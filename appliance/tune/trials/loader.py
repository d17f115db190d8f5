"""Correction of plans by the engine's own loader, before any of them is measured."""

from __future__ import annotations

import threading
from collections.abc import Sequence

from appliance.console.report import Report
from appliance.plan import Plan
from appliance.system.detached import detached
from appliance.tune.trials.engine import Bench

REFINED = 12  # number of plans that the loader is asked about


async def refined(plans: Sequence[Plan], bench: Bench, *, budget_s: float, report: Report) -> Sequence[Plan]:
    """Return the plans, the most promising ones with the loader's memory figures. Plans that do not fit by these
    figures are left out, unless none is left.

    On the CPU the plans are returned unchanged, since there the engine's log has the same figures.
    """
    if not plans[0].placement.shares:
        return plans
    first = sorted(plans, key=lambda plan: plan.speed.job_s if plan.speed else 0.0)[:REFINED]
    given_up = threading.Event()
    try:
        found = await detached(
            bench.engine.refine,
            first,
            bench.install,
            budget_s=budget_s,
            is_wanted=lambda: not given_up.is_set(),
        )
    finally:
        given_up.set()  # a thread cannot be cancelled, and its child processes would run on beside the next measurement
    fitting = {plan.key: plan for plan in found}
    words = f"the engine's loader was asked about {len(first)} plans: {len(fitting)} fit by its figures"
    report.info("plans_refined", words)
    dropped = {plan.key for plan in first} - set(fitting)
    return [fitting.get(plan.key, plan) for plan in plans if plan.key not in dropped] or plans
