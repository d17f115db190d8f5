"""Trials of one tuning: measurements so far, one more measurement, and its expected time."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Sequence
from functools import partial

from appliance.errors import EngineArgumentsError, EngineError, EngineLibraryError, KernelsError
from appliance.plan import Plan
from appliance.system.lack import outlast
from appliance.tune.figures.curve import LONGER
from appliance.tune.figures.load_times import Compilations, Start, Starts, compiles_nothing
from appliance.tune.figures.measurement import MARGIN, Measurement, scored
from appliance.tune.figures.modes import Scored
from appliance.tune.search.candidates import SHARE_FOR_DEPTH, SHARE_FOR_WORK, within
from appliance.tune.trials.run_trial import DECODE_TOKENS, FirstSampling, Sampling, now

SAME_FOR_EVERY_PLAN = (EngineArgumentsError, EngineLibraryError)
SHARE_FOR_FIRST = 0.5  # share of the budget after which the first measurement begins no deeper point
# The first measurement may exceed the budget, since without it there is no figure at all. If it takes longer than
# FIRST_MOST budgets, the engine counts as hanging. Loading is not included, since it may take an hour.
FIRST_MOST = 10.0
FIRST_MOST_S = 600.0  # lower bound of that limit: a small budget does not mean that the machine is fast


class Trials:
    """Measurements of one tuning. `take` makes one, with the errors of `run_trial.measure`; `on_result` gets each.

    `kept` are measurements of an interrupted tuning, which are not repeated. If all of them failed they do not count,
    since the cause may be gone. `depth` is the workload's. `copied_batch` is as in Sampling. `compilations` is the
    engine's. `left_of` turns the time that is left into the seconds that a measurement may take.
    """

    def __init__(
        self,
        plans: Sequence[Plan],
        take: Callable[[Plan, Sampling | FirstSampling], Awaitable[Measurement]],
        *,
        depth: int,
        copied_batch: Callable[[Plan], int],
        budget_s: float,
        on_result: Callable[[Measurement], None],
        kept: Sequence[Measurement],
        compilations: Compilations = compiles_nothing,
        left_of: Callable[[float], float] = lambda seconds: seconds,
    ) -> None:
        self.plans = {plan.key: plan for plan in plans}
        self.failures: list[EngineError] = []
        known = [m for m in kept if m.key in self.plans]
        self.seen = known if any(m.points for m in known) else []
        self._kept = tuple(kept)
        self._take = take
        self._depth = depth
        self._copied_batch = copied_batch
        self._budget_s = budget_s
        self._on_result = on_result
        self._compilations = compilations
        self._left_of = left_of
        # The time of kept measurements counts as spent: otherwise a search that is interrupted often would never end.
        self._began = now() - sum(m.spent_s for m in self.seen)

    def begin_anew(self) -> None:
        """Restart the budget's clock, so that the time of kept measurements does not count."""
        self._began = now()

    @property
    def spent_s(self) -> float:
        return now() - self._began

    @property
    def left_s(self) -> float:
        return self._left_of(self._budget_s - self.spent_s)

    @property
    def has_figures(self) -> bool:
        return any(m.points for m in self.seen)

    @property
    def measured(self) -> tuple[Plan, ...]:
        keys = {m.key for m in self.seen if m.points}
        return tuple(plan for plan in self.plans.values() if plan.key in keys)

    def scored(self) -> list[Scored]:
        return scored(self.plans.values(), self.seen)

    async def measure(self, plan: Plan, *, is_long: bool, is_deep: bool = False) -> Measurement:
        """Measure a plan, and once more if other load disturbed it and there is time for it. If the engine fails, the
        result is a Measurement with `error`; errors that every plan would have are raised."""
        self.plans[plan.key] = plan
        seen = await self._look(plan, is_long=is_long, is_deep=is_deep)
        is_deep = is_deep or len(seen.points) > 2  # the very first measurement is deep
        # Without a time limit loads are what is short: the search repeats this one if it is worth a load.
        is_cheap = self.left_s < math.inf or seen.cost_s is not None
        if seen.disturbance and is_cheap and self.expected_s(plan, is_long=is_long, is_deep=is_deep) <= self.left_s / 2:
            seen = await self._look(plan, is_long=is_long, is_deep=is_deep)
        return seen

    def is_seen_closely(self, plan: Plan) -> bool:
        """True if the plan has a long measurement at every depth."""
        own = [m for m in self.seen if m.key == plan.key and m.is_long]
        return any(len(m.points) >= len(self._depths_for(plan, is_deep=True)) for m in own)

    def expected_s(self, plan: Plan, *, is_long: bool, is_deep: bool) -> float:
        """Return the seconds that a measurement of this plan may take, from measurements at the same number of depths,
        or the next larger number."""
        depths = len(self._depths_for(plan, is_deep=is_deep))
        seen = [m for m in self.seen if m.points]
        enough = [m for m in seen if len(m.points) >= depths]
        fewest = min((len(m.points) for m in enough), default=0)
        alike = [m for m in enough if len(m.points) == fewest] or seen
        own = [m for m in alike if m.key == plan.key]
        longest_s = max((_seconds(m, is_long=is_long) - self._compiled_s(m) for m in own or alike), default=0.0)
        return MARGIN * (longest_s + self._starts(self.seen).compile_s(self._compilations(plan)))

    def _compiled_s(self, look: Measurement) -> float:
        """Return the seconds that this measurement's start spent on compiling, which a later start does not need."""
        before = self.seen[: self.seen.index(look)]
        return min(look.load_s, self._starts(before).compile_s(self._compilations(self.plans[look.key])))

    def _starts(self, looks: Sequence[Measurement]) -> Starts:
        return Starts(
            Start(compilation=self._compilations(self.plans[m.key]), load_s=m.load_s, served=bool(m.points))
            for m in looks
        )

    @property
    def depths(self) -> tuple[int, ...]:
        """Context depths at which every plan is measured: those of the first measurement. It may be a kept one of an
        interrupted tuning, even if its plan is no longer possible. Empty before the first."""
        looks = [m for m in (*self._kept, *self.seen) if m.points]
        first = max(looks, key=lambda look: len(look.points), default=None)
        return tuple(sorted(point.depth for point in first.points)) if first else ()

    async def _look(self, plan: Plan, *, is_long: bool, is_deep: bool) -> Measurement:
        began = now()
        how = self._how(plan, is_long=is_long, is_deep=is_deep)
        # The first measurement has no time limit here (see FIRST_MOST): without it there is nothing to choose from.
        # Without a time limit, an engine that never ends fails its plan (`most_s`).
        limit_s = max(1.0, self.left_s) if self.has_figures and self.left_s < math.inf else None
        try:
            async with asyncio.timeout(limit_s):
                # A lack of resources in this process is waited out, since it would count as a failure of the plan.
                seen = await outlast(partial(self._take, plan, how), "measuring")
        except SAME_FOR_EVERY_PLAN:
            raise
        except KernelsError as error:
            error.variant = plan.cpu_variant
            raise
        except TimeoutError:
            # Not kept: a later tuning with more time may measure this plan.
            return Measurement(key=plan.key, error="the time was up", seconds=now() - began)
        except EngineError as error:
            self.failures.append(error)
            seen = _failed(plan, error, now() - began)
        self.seen.append(seen)
        self._on_result(seen)
        return seen

    def _how(self, plan: Plan, *, is_long: bool, is_deep: bool) -> Sampling | FirstSampling:
        most_s = max(FIRST_MOST * self._budget_s, FIRST_MOST_S)
        if not self.depths:
            return FirstSampling(
                wanted=self._depth,
                work_s=self._budget_s * SHARE_FOR_WORK,
                deep_s=self._budget_s * SHARE_FOR_DEPTH,
                copied_batch=self._copied_batch(plan),
                until=self._began + self._budget_s * SHARE_FOR_FIRST,
                end=self._began + self._budget_s,
                most_s=most_s,
            )
        depths = self._depths_for(plan, is_deep=is_deep)
        return Sampling(depths=depths, is_long=is_long, copied_batch=self._copied_batch(plan), most_s=most_s)

    def _depths_for(self, plan: Plan, *, is_deep: bool) -> tuple[int, ...]:
        """Return the depths for a measurement of this plan. The search leaves out the deepest one, since filling it
        takes longer than the rest of a measurement."""
        depths = self.depths if is_deep else self.depths[:2]
        return within(depths, plan.context, DECODE_TOKENS * LONGER) or depths[:1]


def _seconds(look: Measurement, *, is_long: bool) -> float:
    """Return the seconds of a measurement, extrapolated if it was short and `is_long` is True."""
    more = LONGER - 1 if is_long and not look.is_long else 0
    return look.seconds + more * DECODE_TOKENS * sum(point.decode_ms for point in look.points) / 1000


def _failed(plan: Plan, error: EngineError, seconds: float) -> Measurement:
    return Measurement(
        key=plan.key,
        error=error.message,
        seconds=seconds,
        lacking_device=error.device,
        lacking_mib=error.needed_mib,
    )
