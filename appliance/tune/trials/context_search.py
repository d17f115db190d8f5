"""Search by bisection for the largest context length that meets a mode's condition on speed."""

from __future__ import annotations

import math
from collections.abc import Callable

from appliance.engines.engine import Space
from appliance.plan import Plan
from appliance.tune.figures.modes import Mode, measured_deepest, slowness_when_full, wanted_context
from appliance.tune.figures.workload import Mix
from appliance.tune.trials.trials import Trials


class ContextSearch:
    """Search for a mode's context length. `best` returns the key of the most promising plan with a context length, or
    None if none is likely to fit."""

    def __init__(
        self,
        space: Space,
        trials: Trials,
        best: Callable[[int], str | None],
        *,
        mode: Mode,
        mix: Mix,
        native: int,
    ) -> None:
        self._space = space
        self._trials = trials
        self._best = best
        self._mode: Mode = mode
        self._mix = mix
        self._native = native
        self._contexts = frozenset(plan.context for plan in trials.plans.values())
        self._failed: list[int] = []

    async def run(self, most: float = math.inf) -> None:
        """Measure at most `most` plans, until the largest context that meets the mode's condition is known or time is
        up."""
        while most > 0 and (context := self._next()) is not None and await self.measure(context):
            most -= 1

    async def measure(self, context: int) -> bool:
        """Measure the most promising plan with this context. False if none is likely to fit, or if time is up."""
        trials, plan = self._trials, self._plan_with(context)
        is_deep = self._mode == "context"  # the condition of this mode is about a full context
        if plan is None or trials.expected_s(plan, is_long=False, is_deep=is_deep) > trials.left_s:
            return False
        if not (await trials.measure(plan, is_long=False, is_deep=is_deep)).points:
            self._failed.append(context)
        return True

    def _next(self) -> int | None:
        scored = self._trials.scored()
        return wanted_context(self._mode, self._contexts, scored, self._mix, native=self._native, failed=self._failed)

    def _plan_with(self, context: int) -> Plan | None:
        """Return the plan to measure with this context, or None if none is likely to fit. For a length that no plan
        has, it is the plan with the next larger context, shortened."""
        plans = self._trials.plans
        if context in self._contexts:
            key = self._best(context)
            return plans[key] if key else None
        larger = [each for each in measured_deepest(self._trials.scored()) if each.context > context]
        return self._space.at_context(plans[min(larger, key=slowness_when_full).key], context)
