"""The loop: what to measure next, measured, until nothing promises more than it costs or the time is up."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Collection, Sequence
from dataclasses import dataclass

from appliance.engines.engine import Space
from appliance.errors import EngineArgumentsError, EngineError, EngineLibraryError
from appliance.plan import SMALLEST_WINDOW, Allocated, Plan, with_measured
from appliance.tune.candidates import EMPTY, SHARE_FOR_DEPTH, SHARE_FOR_WORK, candidates, trial_of, within
from appliance.tune.curve import LONGER
from appliance.tune.guided import Ask, Effort, Search, Trial
from appliance.tune.measure import DECODE_TOKENS, FirstLook, Look, now
from appliance.tune.measurement import MARGIN, Measurement, rated
from appliance.tune.modes import (
    Chosen,
    Mode,
    Rated,
    choose,
    looked_at_deepest,
    slowness_when_full,
    wanted_window,
)
from appliance.tune.terms import Candidate
from appliance.tune.workload import Mix, cost_s, scaled_mix, without_limits

SAME_FOR_EVERY_PLAN = (EngineArgumentsError, EngineLibraryError)
SHARE_FOR_FIRST = 0.5  # on a machine that slow the first look is at fewer depths, and others have a turn
SHARE_FOR_SEARCH = 0.7  # of the budget; the rest is for windows and for a closer look at the winner
CLOSER_LOOKS = 3  # at the end
FAILURES_MAX = 3  # of other causes than memory, before anything was measured


@dataclass(frozen=True, kw_only=True)
class Goal:
    """What plans are measured for. `native` is the largest context that counts: the model's, or what was asked for."""

    mix: Mix
    mode: Mode
    native: int


@dataclass(frozen=True, kw_only=True)
class Tuned:
    """The winner and everything that was seen on the way. `plans` hold every measured one."""

    plan: Plan
    chosen: Chosen
    plans: tuple[Plan, ...]
    measurements: tuple[Measurement, ...]
    mix: Mix  # as scaled to the windows that were compared
    seconds: float
    stopped_by: str
    allocated: Allocated | None  # by the winner
    disturbance: str | None

    @property
    def job_s(self) -> float:
        return cost_s(self.chosen.rated.curve, self.mix)


class Tuner:
    """One tuning. `take` makes one measurement, or raises what `measure` raises. `kept` are measurements of one that
    was interrupted: they are not done again. Where all of them are failures they do not count: what was in the way of
    every plan may be gone."""

    def __init__(
        self,
        space: Space,
        plans: Sequence[Plan],
        take: Callable[[Plan, Look | FirstLook], Awaitable[Measurement]],
        goal: Goal,
        *,
        budget_s: float,
        done: Callable[[Measurement], None],
        kept: Sequence[Measurement] = (),
    ) -> None:
        self._space = space
        self._plans = {plan.key: plan for plan in plans}
        self._take = take
        self._goal = goal
        self._budget_s = budget_s
        self._done = done
        self._kept = tuple(kept)
        known = [m for m in kept if m.key in self._plans]
        self._seen = known if any(m.points for m in known) else []
        self._failures: list[EngineError] = []
        windows = [plan.context for plan in plans]
        self._mix = scaled_mix(goal.mix, min(max(windows), max(min(windows), SMALLEST_WINDOW)))
        self._candidates = candidates(space, plans)
        # What they took is spent: begun anew with every short pause, the search would look on for ever.
        self._began = now() - sum(m.seconds for m in self._seen)
        self._stopped_by = ""

    @property
    def left_s(self) -> float:
        return self._budget_s - (now() - self._began)

    @property
    def _left_for_search_s(self) -> float:
        """A share of what is left would leave the windows one look's time. The mode `speed` looks for none."""
        share = 1.0 if self._goal.mode == "speed" else SHARE_FOR_SEARCH
        return self.left_s - self._budget_s * (1 - share)

    async def run(self) -> Tuned:
        """A plan that the engine fails on becomes a Measurement with its words. Raises the EngineError of the first
        that failed when none could be measured, and at once when it is one that no other plan can mend."""
        search = await self._search()
        await self._widen(search)
        await self._confirm()
        seconds = now() - self._began
        return await asyncio.to_thread(self._tuned, seconds)  # while something else may serve

    async def widen(self, most: int) -> None:
        """At most so many more plans, where this mode is another than the one that was measured for. Of what is kept at
        least one was measured; what it took is not counted."""
        self._began = now()
        await self._widen(self._new_search(), most)

    @property
    def measured(self) -> tuple[Plan, ...]:
        keys = {m.key for m in self._seen if m.points}
        return tuple(plan for plan in self._plans.values() if plan.key in keys)

    async def _search(self) -> Search:
        search = self._new_search()
        while isinstance(ask := search.ask(self._trials, left_s=self._left_for_search_s), Ask):
            plan = self._unlike_the_failed() or self._plans[ask.candidate.key]
            await self._measure(plan, is_long=ask.is_long)
            self._end_if_hopeless()
            if search.effort != self._effort():  # the first look has shown how deep all are looked at
                search = self._new_search()
        if not any(m.points for m in self._seen):
            raise self._failures[0]
        self._stopped_by = ask.why
        return search

    def _new_search(self) -> Search:
        effects = self._space.knob_effects
        return Search(self._candidates, without_limits(self._mix), self._effort(), knob_effects=effects)

    def _end_if_hopeless(self) -> None:
        """An engine that fails with every plan, and not of memory, fails with the next as well."""
        others = [error for error in self._failures if not error.was_memory]
        if len(others) >= FAILURES_MAX and not any(m.points for m in self._seen):
            raise others[0]

    def _unlike_the_failed(self) -> Plan | None:
        """While every plan has failed, and not of memory: the one that has the least in common with them. Its like
        would fail in the same way, whatever is predicted of them."""
        if any(m.points for m in self._seen) or not any(not error.was_memory for error in self._failures):
            return None
        failed = {m.key for m in self._seen}
        knobs = [candidate.by_knob for candidate in self._candidates if candidate.key in failed]

        def unlike(candidate: Candidate) -> int:
            return min(sum(of[name] != value for name, value in candidate.knobs) for of in knobs)

        left = [candidate for candidate in self._candidates if candidate.key not in failed]
        return self._plans[max(left, key=unlike).key] if left and knobs else None

    def _keep(self, seen: Measurement) -> None:
        self._seen.append(seen)
        self._done(seen)

    async def _look_closely(self, plan: Plan) -> bool:
        """Longer and at every depth; False where that is done already, there is no time, or the engine failed."""
        own = [m for m in self._seen if m.key == plan.key and m.is_long]
        is_done = any(len(m.points) >= len(self._looked_at(plan, is_deep=True)) for m in own)
        if is_done or self._expected_s(plan, is_long=True, is_deep=True) > self.left_s:
            return False
        return bool((await self._measure(plan, is_long=True, is_deep=True)).points)

    async def _confirm(self) -> None:
        """The winner need not be one of the last few: of plans as fast it is the one with the larger window. A closer
        look may make another the winner, so a few times."""
        for _ in range(CLOSER_LOOKS):
            key = choose(self._goal.mode, self._rated(), self._mix, native=self._goal.native).rated.key
            if not await self._look_closely(self._plans[key]):
                return

    async def _widen(self, search: Search, most: float = math.inf) -> None:
        """Where a larger window is paid for with speed: which still meets the mode's condition, found by halving, with
        at most so many more plans."""
        windows = {plan.context for plan in self._plans.values()}
        failed: list[int] = []
        while most > 0 and (window := self._wanted_window(windows, failed)) is not None:
            plan = self._plan_at(search, windows, window)
            is_deep = self._goal.mode == "context"  # whose condition is of a full window
            if plan is None or self._expected_s(plan, is_long=False, is_deep=is_deep) > self.left_s:
                return
            self._plans[plan.key] = plan
            if not (await self._measure(plan, is_long=False, is_deep=is_deep)).points:
                failed.append(window)
            most -= 1

    def _wanted_window(self, windows: Collection[int], failed: Collection[int]) -> int | None:
        goal = self._goal
        return wanted_window(goal.mode, windows, self._rated(), self._mix, native=goal.native, failed=failed)

    def _plan_at(self, search: Search, windows: Collection[int], window: int) -> Plan | None:
        """None where nothing with this window is likely to fit. Part of a window is of the plan that has all of it."""
        if window in windows:
            best = search.best(self._trials, window)
            return self._plans[best.key] if best else None
        larger = [each for each in looked_at_deepest(self._rated()) if each.window > window]
        return self._space.at_window(self._plans[min(larger, key=slowness_when_full).key], window)

    def _rated(self) -> list[Rated]:
        return rated(self._plans.values(), self._seen)

    async def _measure(self, plan: Plan, *, is_long: bool, is_deep: bool = False) -> Measurement:
        """Once more where something else disturbed it, if there is time."""
        seen = await self._look(plan, is_long=is_long, is_deep=is_deep)
        is_deep = is_deep or len(seen.points) > 2  # the first of all is
        if seen.disturbance and self._expected_s(plan, is_long=is_long, is_deep=is_deep) <= self.left_s / 2:
            seen = await self._look(plan, is_long=is_long, is_deep=is_deep)
        return seen

    async def _look(self, plan: Plan, *, is_long: bool, is_deep: bool) -> Measurement:
        began = now()
        how = self._how(plan, is_long=is_long, is_deep=is_deep)
        # The first look takes what it takes: without a figure there is nothing to choose by.
        limit_s = max(1.0, self.left_s) if any(m.points for m in self._seen) else None
        try:
            async with asyncio.timeout(limit_s):
                seen = await self._take(plan, how)
        except SAME_FOR_EVERY_PLAN:
            raise
        except TimeoutError:
            # Nothing is kept of it: another start, with more time, may well measure it.
            return Measurement(key=plan.key, error="the time was up", seconds=now() - began)
        except EngineError as error:
            self._failures.append(error)
            seen = _failed(plan, error, now() - began)
        self._keep(seen)
        return seen

    def _how(self, plan: Plan, *, is_long: bool, is_deep: bool) -> Look | FirstLook:
        if not self._depths:
            return FirstLook(
                wanted=self._mix.depth,
                work_s=self._budget_s * SHARE_FOR_WORK,
                deep_s=self._budget_s * SHARE_FOR_DEPTH,
                until=self._began + self._budget_s * SHARE_FOR_FIRST,
                end=self._began + self._budget_s,
            )
        return Look(depths=self._looked_at(plan, is_deep=is_deep), is_long=is_long)

    @property
    def _depths(self) -> tuple[int, ...]:
        """Those of the first look, for all: plans are compared at the same. Of one that was broken off, too, should its
        first plan no longer be possible."""
        looks = [m for m in (*self._kept, *self._seen) if m.points]
        first = max(looks, key=lambda look: len(look.points), default=None)
        return tuple(sorted(point.depth for point in first.points)) if first else ()

    def _looked_at(self, plan: Plan, *, is_deep: bool) -> tuple[int, ...]:
        """To fill the deepest context takes longer than all the rest of a look: the search goes without."""
        depths = self._depths if is_deep else self._depths[:2]
        return within(depths, plan.context, DECODE_TOKENS * LONGER) or depths[:1]

    @property
    def _trials(self) -> list[Trial]:
        return [trial_of(m) for m in self._seen]

    def _effort(self) -> Effort:
        depths = self._depths[:2] or (EMPTY, self._mix.depth)
        return Effort(depths=depths, tokens_each=DECODE_TOKENS)

    def _expected_s(self, plan: Plan, *, is_long: bool, is_deep: bool) -> float:
        """What a look at this plan may take, going by what looks at as many depths took, or at the next more."""
        depths = len(self._looked_at(plan, is_deep=is_deep))
        seen = [m for m in self._seen if m.points]
        enough = [m for m in seen if len(m.points) >= depths]
        fewest = min((len(m.points) for m in enough), default=0)
        alike = [m for m in enough if len(m.points) == fewest] or seen
        own = [m for m in alike if m.key == plan.key]
        return MARGIN * max((_seconds(m, is_long=is_long) for m in own or alike), default=0.0)

    def _tuned(self, seconds: float) -> Tuned:
        found = self._rated()
        winner = choose(self._goal.mode, found, self._mix, native=self._goal.native)
        looks = [m for m in self._seen if m.key == winner.rated.key]
        return Tuned(
            plan=with_measured(self._plans[winner.rated.key], _why(winner, found, self._mix)),
            chosen=winner,
            plans=self.measured,
            measurements=tuple(self._seen),
            mix=self._mix,
            seconds=seconds,
            stopped_by=self._stopped_by,
            allocated=next((look.allocated for look in looks if look.allocated), None),
            disturbance=_disturbance(looks),
        )


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


def _disturbance(looks: Sequence[Measurement]) -> str | None:
    """What the winner's figures suffer from: nothing where one look was left alone."""
    seen = [m for m in looks if m.points]
    return None if any(m.disturbance is None for m in seen) else seen[-1].disturbance


def _why(winner: Chosen, found: Sequence[Rated], mix: Mix) -> str:
    took = f"{cost_s(winner.rated.curve, mix):.1f} s for a {mix.name} job"
    others = [cost_s(each.curve, mix) for each in found if each.key != winner.rated.key]
    if not others:
        return f"the only one measured: {took}"
    return f"{winner.why}; {len(others) + 1} compared: {took}, the next {min(others):.1f} s"
