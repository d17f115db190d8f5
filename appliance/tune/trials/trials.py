"""Trials of one tuning: what was measured so far, one more measured, and what that may take."""

from __future__ import annotations

import asyncio
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
SHARE_FOR_FIRST = 0.5  # on a machine that slow the first look is at fewer depths, and others have a turn
# The first look has no share of the budget, since without it there is no figure at all. What takes longer than so many
# budgets works on nothing; loading is not counted, which may take an hour.
FIRST_MOST = 10.0
FIRST_MOST_S = 600.0  # at least: a budget of seconds says nothing of how slow a machine may be


class Trials:
    """`take` makes one measurement, or raises what `measure` raises; `on_result` gets each. `kept` are measurements of
    a tuning that was interrupted: they are not done again. Where all of them are failures they do not count: what was
    in the way of every plan may be gone. `depth` is the workload's, `copied_batch` of a plan as in Sampling,
    `compilations` the engine's."""

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
        # What they took is spent: begun anew with every short pause, the search would look on for ever.
        self._began = now() - sum(m.seconds for m in self.seen)

    def begin_anew(self) -> None:
        """What was kept took nothing of this budget."""
        self._began = now()

    @property
    def spent_s(self) -> float:
        return now() - self._began

    @property
    def left_s(self) -> float:
        return self._budget_s - self.spent_s

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
        """Once more where something else disturbed it, if there is time. A plan that the engine fails on becomes a
        Measurement with its words; raises the EngineError of one that no other plan can mend."""
        self.plans[plan.key] = plan
        seen = await self._look(plan, is_long=is_long, is_deep=is_deep)
        is_deep = is_deep or len(seen.points) > 2  # the first of all is
        if seen.disturbance and self.expected_s(plan, is_long=is_long, is_deep=is_deep) <= self.left_s / 2:
            seen = await self._look(plan, is_long=is_long, is_deep=is_deep)
        return seen

    def is_seen_closely(self, plan: Plan) -> bool:
        """Longer and at every depth."""
        own = [m for m in self.seen if m.key == plan.key and m.is_long]
        return any(len(m.points) >= len(self._depths_for(plan, is_deep=True)) for m in own)

    def expected_s(self, plan: Plan, *, is_long: bool, is_deep: bool) -> float:
        """What a look at this plan may take, going by what looks at as many depths took, or at the next more."""
        depths = len(self._depths_for(plan, is_deep=is_deep))
        seen = [m for m in self.seen if m.points]
        enough = [m for m in seen if len(m.points) >= depths]
        fewest = min((len(m.points) for m in enough), default=0)
        alike = [m for m in enough if len(m.points) == fewest] or seen
        own = [m for m in alike if m.key == plan.key]
        longest_s = max((_seconds(m, is_long=is_long) - self._compiled_s(m) for m in own or alike), default=0.0)
        return MARGIN * (longest_s + self._starts(self.seen).compile_s(self._compilations(plan)))

    def _compiled_s(self, look: Measurement) -> float:
        """What its start compiled that a later one finds."""
        before = self.seen[: self.seen.index(look)]
        return min(look.load_s, self._starts(before).compile_s(self._compilations(self.plans[look.key])))

    def _starts(self, looks: Sequence[Measurement]) -> Starts:
        return Starts(
            Start(compilation=self._compilations(self.plans[m.key]), load_s=m.load_s, served=bool(m.points))
            for m in looks
        )

    @property
    def depths(self) -> tuple[int, ...]:
        """Those of the first look, for all: plans are compared at the same. Of one that was broken off, too, should its
        first plan no longer be possible."""
        looks = [m for m in (*self._kept, *self.seen) if m.points]
        first = max(looks, key=lambda look: len(look.points), default=None)
        return tuple(sorted(point.depth for point in first.points)) if first else ()

    async def _look(self, plan: Plan, *, is_long: bool, is_deep: bool) -> Measurement:
        began = now()
        how = self._how(plan, is_long=is_long, is_deep=is_deep)
        # The first look takes longer if it must (`FIRST_MOST`): without a figure there is nothing to choose by.
        limit_s = max(1.0, self.left_s) if self.has_figures else None
        try:
            async with asyncio.timeout(limit_s):
                # A lack says nothing of the plan, which would count as one that fails.
                seen = await outlast(partial(self._take, plan, how), "measuring")
        except SAME_FOR_EVERY_PLAN:
            raise
        except KernelsError as error:
            error.variant = plan.cpu_variant
            raise
        except TimeoutError:
            # Nothing is kept of it: another start, with more time, may well measure it.
            return Measurement(key=plan.key, error="the time was up", seconds=now() - began)
        except EngineError as error:
            self.failures.append(error)
            seen = _failed(plan, error, now() - began)
        self.seen.append(seen)
        self._on_result(seen)
        return seen

    def _how(self, plan: Plan, *, is_long: bool, is_deep: bool) -> Sampling | FirstSampling:
        if not self.depths:
            return FirstSampling(
                wanted=self._depth,
                work_s=self._budget_s * SHARE_FOR_WORK,
                deep_s=self._budget_s * SHARE_FOR_DEPTH,
                copied_batch=self._copied_batch(plan),
                until=self._began + self._budget_s * SHARE_FOR_FIRST,
                end=self._began + self._budget_s,
                most_s=max(FIRST_MOST * self._budget_s, FIRST_MOST_S),
            )
        depths = self._depths_for(plan, is_deep=is_deep)
        return Sampling(depths=depths, is_long=is_long, copied_batch=self._copied_batch(plan))

    def _depths_for(self, plan: Plan, *, is_deep: bool) -> tuple[int, ...]:
        """To fill the deepest context takes longer than all the rest of a look: the search goes without."""
        depths = self.depths if is_deep else self.depths[:2]
        return within(depths, plan.context, DECODE_TOKENS * LONGER) or depths[:1]


def _seconds(look: Measurement, *, is_long: bool) -> float:
    """What it took, or would have taken if it had been longer."""
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
