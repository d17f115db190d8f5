"""The loop: what to measure next, measured, until nothing promises more than it costs or the time is up."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import cast

from appliance.command import Command
from appliance.engines.engine import Space
from appliance.errors import EngineArgumentsError, EngineError, EngineLibraryError
from appliance.plan import SMALLEST_WINDOW, Allocated, Plan, with_measured
from appliance.probe.watch import Watch
from appliance.tune.candidates import EMPTY, SHARE_FOR_DEPTH, SHARE_FOR_WORK, candidates, trial_of, within
from appliance.tune.curve import LONGER, Curve, Point
from appliance.tune.guided import Ask, Effort, Search, Trial
from appliance.tune.judge import judge
from appliance.tune.measure import DECODE_TOKENS, FirstLook, Look, Step, measure
from appliance.tune.measurement import Judged, Measurement, curve_of, rated
from appliance.tune.modes import (
    SPEED_KEPT,
    Chosen,
    Mode,
    Rated,
    at_same_depths,
    best_ms,
    choose,
    is_readable,
    looked_at_deepest,
    next_window,
    readable_window,
)
from appliance.tune.terms import Candidate
from appliance.tune.workload import Mix, cost_s, job_s, scaled_mix, without_limits

SAME_FOR_EVERY_PLAN = (EngineArgumentsError, EngineLibraryError)
SHARE_FOR_FIRST = 0.5  # on a machine that slow the first look is at fewer depths, and others have a turn
SHARE_FOR_SEARCH = 0.7  # of the budget; the rest is for comparing the last few, and for windows
FINALISTS = 3
FAILURES_MAX = 3  # of other causes than memory, before anything was measured
NEAR_THE_BEST = 1.1  # of its job's time: who is compared at the end
MODES: tuple[Mode, ...] = ("balanced", "speed", "context")


@dataclass(frozen=True, kw_only=True)
class Goal:
    """What plans are measured for. `native` is the largest window that counts: the model's, or what was asked for."""

    mix: Mix
    mode: Mode
    native: int


@dataclass(frozen=True, kw_only=True)
class Tuned:
    """The winner and everything that was seen on the way. `plans` hold every measured one, and what the other modes
    would serve; `like` names, for one that was not measured itself, the one whose figures are its own, and `judged`
    holds what is concluded of those that only another mode takes, or this one for lack of time."""

    plan: Plan
    chosen: Chosen
    plans: tuple[Plan, ...]
    like: dict[str, str]
    judged: tuple[Judged, ...]
    measurements: tuple[Measurement, ...]
    mix: Mix  # as scaled to the windows that were compared
    seconds: float
    stopped_by: str
    allocated: Allocated | None  # by the winner, or by the one whose figures are its own
    disturbance: str | None

    @property
    def job_s(self) -> float:
        return cost_s(self.chosen.rated.curve, self.mix)


class Tuner:
    """One tuning. `kept` are measurements of one that was interrupted: they are not done again. Where all of them are
    failures they do not count: what was in the way of every plan may be gone."""

    def __init__(
        self,
        space: Space,
        plans: Sequence[Plan],
        start: Callable[[Plan], Command],
        goal: Goal,
        *,
        budget_s: float,
        tell: Callable[[Step], None],
        done: Callable[[Measurement], None],
        watch: Callable[[], Watch],
        kept: Sequence[Measurement] = (),
    ) -> None:
        self._space = space
        self._plans = {plan.key: plan for plan in plans}
        self._start = start
        self._goal = goal
        self._budget_s = budget_s
        self._tell = tell
        self._done = done
        self._watch = watch
        self._kept = tuple(kept)
        known = [m for m in kept if m.key in self._plans]
        self._seen = known if any(m.points for m in known) else []
        self._failures: list[EngineError] = []
        windows = [plan.context for plan in plans]
        self._mix = scaled_mix(goal.mix, min(max(windows), max(min(windows), SMALLEST_WINDOW)))
        self._candidates = candidates(space, plans)
        # What they took is spent: begun anew with every short pause, the search would look on for ever.
        self._began = time.monotonic() - sum(m.seconds for m in self._seen)
        self._stopped_by = ""
        self._like: dict[str, str] = {}

    @property
    def left_s(self) -> float:
        return self._budget_s - (time.monotonic() - self._began)

    @property
    def _left_for_search_s(self) -> float:
        """A share of what is left would leave the comparing at the end one look's time."""
        return self.left_s - self._budget_s * (1 - SHARE_FOR_SEARCH)

    async def run(self) -> Tuned:
        """A plan that the engine fails on becomes a Measurement with its words. Raises the EngineError of the first
        that failed when none could be measured, and at once when it is one that no other plan can mend."""
        search = await self._search()
        await self._compare(search)
        await self._widen(search)
        await self._confirm()
        return await asyncio.to_thread(self._tuned)  # while something else may serve

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
        return Search(self._candidates, without_limits(self._mix), self._effort())

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

    async def _compare(self, search: Search) -> None:
        """The last two or three against each other: longer, at every depth."""
        ranked = [estimate for estimate in search.rank(self._trials) if estimate.is_measured]
        for estimate in ranked[:FINALISTS]:
            if estimate.ms <= ranked[0].ms * NEAR_THE_BEST:
                await self._look_closely(self._plans[estimate.candidate.key])

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
        for _ in range(FINALISTS):
            key = choose(self._goal.mode, self._rated(), self._mix, native=self._goal.native).rated.key
            if not await self._look_closely(self._plans[self._like.get(key, key)]):
                return

    async def _widen(self, search: Search) -> None:
        """Where a larger window is paid for with speed: which still meets the mode's condition, found by halving."""
        if self._goal.mode == "speed":
            return
        windows = sorted({plan.context for plan in self._plans.values()})
        held = self._held(self._goal.mode)
        while (window := next_window(windows, held)) is not None:
            curve = self._as_measured(search, window) or await self._measured_at(search, window)
            if curve is None:
                return
            held.append((window, self._meets(self._goal.mode, curve, window)))

    def _held(self, mode: Mode) -> list[tuple[int, bool]]:
        """Windows of measured plans, and whether they meet the mode's condition."""
        seen = looked_at_deepest(self._rated()) if mode == "context" else self._rated()
        return [(each.window, self._meets(mode, each.curve, each.window)) for each in seen]

    def _as_measured(self, search: Search, window: int) -> Curve | None:
        """Of a plan with this window that no prediction can tell from a measured one: its figures are that one's."""
        measured = {search.twins(m.key): m.key for m in self._seen if m.points}
        for candidate in self._candidates:
            key = measured.get(search.twins(candidate.key))
            if candidate.window == window and key is not None:
                self._like[candidate.key] = key
                return curve_of([m for m in self._seen if m.key == key])
        return None

    async def _measured_at(self, search: Search, window: int) -> Curve | None:
        """None where nothing with this window is likely to fit, or there is no time; an engine that failed counts as
        infinitely slow."""
        best = search.best(self._trials, window)
        is_deep = self._goal.mode == "context"  # whose condition is of a full window
        plan = self._plans[best.candidate.key] if best else None
        if plan is None or self._expected_s(plan, is_long=False, is_deep=is_deep) > self.left_s:
            return None
        seen = await self._measure(plan, is_long=False, is_deep=is_deep)
        never = Point(depth=1, decode_ms=float("inf"), prefill_ms=float("inf"), prefill_tokens=1)
        return curve_of([seen]) if seen.points else Curve(points=(never,))

    def _meets(self, mode: Mode, curve: Curve, window: int) -> bool:
        if mode == "context":
            return is_readable(curve, window)
        here, *others = at_same_depths([Rated(key="", window=window, curve=curve), *self._rated()])
        return best_ms(others, self._mix.depth) / here.curve.decode_ms(self._mix.depth) >= SPEED_KEPT

    def _rated(self, more: Sequence[Plan] = ()) -> list[Rated]:
        return rated([*self._plans.values(), *more], self._seen, like=self._like)

    async def _measure(self, plan: Plan, *, is_long: bool, is_deep: bool = False) -> Measurement:
        """Once more where something else disturbed it, if there is time."""
        seen = await self._look(plan, is_long=is_long, is_deep=is_deep)
        is_deep = is_deep or len(seen.points) > 2  # the first of all is
        if seen.disturbance and self._expected_s(plan, is_long=is_long, is_deep=is_deep) <= self.left_s / 2:
            seen = await self._look(plan, is_long=is_long, is_deep=is_deep)
        return seen

    async def _look(self, plan: Plan, *, is_long: bool, is_deep: bool) -> Measurement:
        began = time.monotonic()
        how = self._how(plan, is_long=is_long, is_deep=is_deep)
        # The first look takes what it takes: without a figure there is nothing to choose by.
        limit_s = max(1.0, self.left_s) if any(m.points for m in self._seen) else None
        try:
            async with asyncio.timeout(limit_s):
                seen = await measure(plan, self._start, how, tell=self._tell, watch=self._watch)
        except SAME_FOR_EVERY_PLAN:
            raise
        except TimeoutError:
            # Nothing is kept of it: another start, with more time, may well measure it.
            return Measurement(key=plan.key, error="the time was up", seconds=time.monotonic() - began)
        except EngineError as error:
            self._failures.append(error)
            seen = _failed(plan, error, time.monotonic() - began)
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
        return 1.5 * max((_seconds(m, is_long=is_long) for m in own or alike), default=0.0)

    def _tuned(self) -> Tuned:
        more = self._smaller_windows()
        found = self._rated(more)
        further, judged = self._unmeasured()
        plans = {plan.key: plan for plan in (*self._plans.values(), *more, *further)}
        chosen = {
            mode: choose(
                mode,
                [*found, *(each.rated(plans[each.key]) for each in judged if each.mode == mode)],
                self._mix,
                native=self._goal.native,
            )
            for mode in MODES
        }
        winner = chosen[self._goal.mode]
        measured = {m.key for m in self._seen if m.points}
        kept = measured | {each.rated.key for each in chosen.values()}
        is_judged = bool(winner.rated.judged_by)
        plan = with_measured(plans[winner.rated.key], _why(winner, found, self._mix), is_judged=is_judged)
        source = self._like.get(plan.key, plan.key)
        return Tuned(
            plan=plan,
            chosen=winner,
            plans=tuple(each for key, each in plans.items() if key in kept),
            like={key: of for key, of in self._like.items() if key in kept},
            judged=tuple(each for each in judged if each.key == chosen[cast("Mode", each.mode)].rated.key),
            measurements=tuple(self._seen),
            mix=self._mix,
            seconds=time.monotonic() - self._began,
            stopped_by=self._stopped_by,
            allocated=next((m.allocated for m in self._seen if m.key == source and m.allocated), None),
            disturbance=_disturbance([m for m in self._seen if m.key in (source, winner.rated.judged_by)]),
        )

    def _smaller_windows(self) -> list[Plan]:
        """Measured plans with smaller windows: a window that is not filled costs memory and no time. Only `context`
        ever wants one, where the largest cannot be read along with when it is full."""
        more: list[Plan] = []
        measured = {m.key for m in self._seen if m.points}
        for each in self._rated():
            smaller = self._smaller(self._plans[each.key], each.curve)
            if smaller is not None and smaller.key not in measured:
                more.append(smaller)
                self._like[smaller.key] = self._like.get(each.key, each.key)
        return more

    def _smaller(self, plan: Plan, curve: Curve) -> Plan | None:
        """The same with as much of its window as can be read along with; None where all of it can, or not the least."""
        if is_readable(curve, plan.context):
            return None
        size = readable_window(curve, plan.context, least=min(self._goal.native, SMALLEST_WINDOW))
        return None if size is None else self._space.at_window(plan, size)

    def _unmeasured(self) -> tuple[list[Plan], list[Judged]]:
        """What another mode may take of the windows that nobody measured, and `context` where there was no time for
        them. For the others a plan that was measured goes before one that was not."""
        further = self._space.only_for_context()
        plans = {plan.key: plan for plan in (*self._plans.values(), *further)}
        narrow = self._new_search()
        judged: list[Judged] = []
        if self._goal.mode != "balanced":
            judged += self._judged(narrow, plans, "balanced")
        wide = narrow
        if further:
            wide = Search([*self._candidates, *candidates(self._space, further)], narrow.mix, narrow.effort)
        for each in self._judged(wide, plans, "context"):
            judged.append(each)
            smaller = self._smaller(plans[each.key], Curve(points=each.points))
            if smaller is not None and not any(m.key == smaller.key and m.points for m in self._seen):
                plans[smaller.key] = smaller
                judged.append(replace(each, key=smaller.key))
        return list(plans.values()), judged

    def _judged(self, search: Search, plans: Mapping[str, Plan], mode: Mode) -> list[Judged]:
        """By the same halving as those that are measured; and the largest that fits, should none be readable."""
        curves = {m.key: curve_of([o for o in self._seen if o.key == m.key]) for m in self._seen if m.points}
        deepest = max(curve.deepest for curve in curves.values())
        curves = {key: curve for key, curve in curves.items() if curve.deepest == deepest}
        windows = sorted({candidate.window for candidate in search.candidates})
        held = self._held(mode)
        found: list[Judged] = []

        def judged(window: int) -> bool:
            each = judge(search, self._trials, curves, window, mode)
            if each is not None:
                found.append(each)
            return each is not None

        while (window := next_window(windows, held)) is not None:
            is_met = judged(window) and self._meets(mode, Curve(points=found[-1].points), window)
            held.append((window, is_met))
        if mode == "context" and not any(is_met for _, is_met in held):
            known = {each.window for each in self._rated()} | {plans[each.key].context for each in found}
            for window in reversed(windows):
                if window in known or judged(window):
                    break
        return found


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


def speed_in_words(tuned: Tuned) -> str:
    """As in "decodes 116.0 tok/s at 32 tokens of context, 42.1 at 2,048; a chat job takes 3.1 s"."""
    curve = tuned.chosen.rated.curve
    first, *rest = (f"{point.speed} at {point.depth:,}" for point in curve.ordered)
    speeds = ", ".join((f"{first} tokens of context", *rest))
    jobs = ", ".join(f"a {each.name} job takes {job_s(curve, each):.1f} s" for each, _ in tuned.mix.parts)
    words = f"decodes {speeds}; {jobs}" + ("" if _is_covered(tuned) else " (extrapolated)")
    is_judged = any(each.key == tuned.plan.key for each in tuned.judged)
    return f"not measured itself, judged by {tuned.chosen.rated.judged_by}: {words}" if is_judged else words


def _is_covered(tuned: Tuned) -> bool:
    return tuned.chosen.rated.curve.spread == 1 and all(
        each.tokens_in + each.tokens_out <= tuned.chosen.rated.curve.deepest * 1.2 for each, _ in tuned.mix.parts
    )
