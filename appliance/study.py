"""One tuning from its beginning to a profile: types of the KV cache, plans, guessing ahead, slots for several users.

Imported when something is to be measured, and not by a start from a profile.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import cast

from appliance.engines.engine import Engine, Extent, Install, Space, TextReader
from appliance.errors import EngineError, ModelDoesNotFitError, VolumeError
from appliance.model import Model
from appliance.plan import TASTES, Choice, Plan, Verdict, with_choice
from appliance.probe import Hardware, gpu_uuids
from appliance.probe.watch import Watch
from appliance.profile import Key, Profile, ProfileStore
from appliance.profile.partial import GuessLook, Partial, SlotsLook
from appliance.progress import Phase
from appliance.report import Report
from appliance.settings import Settings
from appliance.tune import quality
from appliance.tune.concurrency import measure_slots
from appliance.tune.engine import Bench
from appliance.tune.measure import Step, measure
from appliance.tune.measurement import TRIES, Measurement
from appliance.tune.modes import Mode
from appliance.tune.paired import Passage
from appliance.tune.slots import Concurrency, choose, counts, with_slots
from appliance.tune.speculate import Tried, choose_speculation, least_s
from appliance.tune.speeds import speeds_on
from appliance.tune.tuner import Goal, Tuned, Tuner
from appliance.tune.workload import Workload, parse_mix, scaled

# Of the budget, each only where there is something to find out; what one leaves is there for the next.
SHARE_FOR_KV = 0.25
SHARE_FOR_GUESSES = 0.25
SHARE_FOR_SLOTS = 0.15
REFINED = 12  # plans that the engine's own loader is asked about
MORE_PLANS = 2  # at most, that are measured for another mode than the profile's


@dataclass(frozen=True, kw_only=True)
class Programs:
    """What is measured with: the engine's server, on a socket of its own, and the engine's other programs."""

    engine: Engine
    install: Install
    socket_path: Path

    @property
    def starts(self) -> Bench:
        """Killed when they are no longer needed: they have served nobody, and somebody may be waiting."""
        return Bench(
            engine=self.engine,
            start=lambda plan: replace(self.engine.command(plan, self.install, self.socket_path), stop_grace_s=0.0),
        )

    def reader(self, plan: Plan, extent: Extent, text: Path) -> TextReader:
        return self.engine.text_reader(plan, self.install, extent, text)


class Study:
    """`space` makes the space of plans, given what was found out of types of the KV cache. `beside` is the space in the
    memory that an engine which serves meanwhile leaves free.

    What is found out is kept on the volume as it comes: a study that was broken off, by a stop, a request or a kill,
    goes on from there, with a budget of its own. Lost is at most what one start of an engine was for; of a text that it
    reads only the piece at work, but for a kill -9.
    """

    def __init__(
        self,
        settings: Settings,
        environment: Mapping[str, str],
        programs: Programs,
        *,
        draft: Model | None,
        hardware: Hardware,
        key: Key,
        space: Callable[[Sequence[Verdict]], Space],
        store: ProfileStore,
        report: Report,
        shows_phase: bool = True,
        beside: Space | None = None,
    ) -> None:
        self._settings = settings
        self._environment = environment
        self._programs = programs
        self._draft = draft
        self._hardware = hardware
        self._key = key
        self._make_space = space
        self._store = store
        self._report = report
        self._shows_phase = shows_phase
        self._beside = beside
        self._began = time.monotonic()
        self._partial = Partial()
        self.measurements: list[Measurement] = []

    async def run(self) -> Profile:
        """The profile, saved. Raises what the engine ended with when nothing could be measured."""
        self._began = time.monotonic()
        self._phase("starting")
        self._partial = self._store.kept(self._key)
        if words := self._partial.in_words():
            self._report.info("tune_goes_on", f"there are {words} of a tuning that was interrupted")
        verdicts = await self._judge_kinds(self._make_space(()))
        space = self._make_space(verdicts)
        tuned = await self._choose_plan(space)
        plan, notes = await self._guess(space, tuned)
        plan, concurrent = await self._share(plan)
        profile = self._profile(space, tuned, plan, verdicts, (*notes, *concurrent))
        self._save(profile)
        return profile

    async def widen(self, profile: Profile) -> Profile:
        """The profile, saved, with what the mode that is set wants of contexts that no measured plan has."""
        self._began = time.monotonic()
        self._partial = self._store.kept(self._key)
        kept = self._partial.measurements
        self.measurements[:] = (*profile.measurements, *kept)
        space = self._make_space(profile.verdicts)
        possible = await asyncio.to_thread(self._possible, space)
        plans = {plan.key: plan for plan in (*profile.plans, *possible)}
        mode = self._settings.mode
        words = f"profile {profile.key.id} was measured for mode '{profile.mode}': up to {MORE_PLANS} more for '{mode}'"
        self._report.info("tune_more", words, profile=profile.key.id)
        tuner = self._tuner(space, list(plans.values()), self._settings.budget_s)
        await tuner.widen(MORE_PLANS - len({measurement.key for measurement in kept}))
        widened = replace(
            profile,
            plans=tuner.measured,
            measurements=tuple(self.measurements),
            other_modes=(*profile.other_modes, mode),
        )
        self._store.save(widened)
        count = len(widened.plans) - len(profile.plans)
        self._report.info("tuned_more", f"measured {count} more for mode '{mode}'", profile=profile.key.id)
        return widened

    @property
    def _left_s(self) -> float:
        return self._settings.budget_s - (time.monotonic() - self._began)

    async def _judge_kinds(self, space: Space) -> tuple[Verdict, ...]:
        """Where memory carries less than is wanted at q8_0, and a smaller type would carry much more."""
        wanted = space.kinds_to_check()
        if not wanted:
            return ()
        best = space.best
        found = await quality.check(
            best,
            wanted,
            self._programs.reader,
            budget_s=self._settings.budget_s * SHARE_FOR_KV,
            prefill_tokens_per_s=best.speed.prefill_tokens_per_s if best.speed else 1.0,
            tell=self._on_step,
            kept=self._partial.passages,
            done=self._on_read,
        )
        for verdict in found:
            what = "may be used" if verdict.is_accepted else "is not used"
            words = f"a KV cache of {verdict.kv_type} {what}: {verdict.why}"
            self._report.info("kv_checked", words, **asdict(verdict))
        return found

    async def _choose_plan(self, space: Space) -> Tuned:
        settings = self._settings
        plans = await self._refined(await asyncio.to_thread(self._possible, space))
        kept = self._partial.measurements
        self.measurements[:] = kept
        words = f"measuring the most promising of {len(plans):,} plans within {settings.budget_s:g} s"
        if kept:
            words += f"; {len(kept)} measurements are there from a start that was interrupted"
        self._report.info("tune_start", words)
        reserved = SHARE_FOR_GUESSES * _has_guesses(space) + SHARE_FOR_SLOTS * self._has_slots
        budget_s = max(1.0, self._left_s - reserved * settings.budget_s)
        return await self._tuner(space, plans, budget_s).run()

    def _tuner(self, space: Space, plans: Sequence[Plan], budget_s: float) -> Tuner:
        """That goes on from what was measured so far."""
        settings = self._settings
        watch = partial(Watch, self._hardware, self._environment)
        return Tuner(
            space,
            plans,
            partial(measure, bench=self._programs.starts, tell=self._on_step, watch=watch),
            Goal(mix=parse_mix(settings.workload), mode=cast("Mode", settings.mode), native=space.native),
            budget_s=budget_s,
            done=self._on_measured,
            kept=self.measurements,
        )

    def _possible(self, space: Space) -> list[Plan]:
        """Every plan that fits; beside an engine that serves, only what memory holds as well, lest it be killed."""
        plans = space.all()
        if self._beside is None:
            return plans
        return [plan for plan in plans if not isinstance(self._beside.now(plan), str)] or plans[:1]

    @property
    def _has_slots(self) -> bool:
        """Whether their number is to be found out: one that was asked for is not in question."""
        return self._settings.users > 1 and not self._settings.is_set("parallel")

    async def _guess(self, space: Space, tuned: Tuned) -> tuple[Plan, tuple[str, ...]]:
        """With tokens guessed ahead where that was seen to be faster. An engine that fails at it is served without."""
        settings, plan = self._settings, tuned.plan
        if not _has_guesses(space) and self._draft is None:
            return plan, ()
        left_s = min(self._left_s, settings.budget_s * SHARE_FOR_GUESSES)
        kept = [look.tried for look in self._partial.guesses if look.key == plan.key]
        has_base = any(not tried.error for tried in kept)
        # Without guesses and with some: one of them alone says nothing.
        if left_s < least_s(tuned) * (1 if has_base else 2):
            left_s = 0.0
        try:
            found, why, tried = await choose_speculation(
                plan,
                self._programs.starts,
                space,
                asked=settings.speculation,
                left_s=left_s,
                tell=self._on_step,
                kept=kept,
                done=partial(self._on_guessed, plan.key),
            )
            words = Choice(name="speculation", value="off", reason=why, source="measured")
            chosen = with_choice(plan, words)
            if found is not None:
                chosen = space.speculating(plan, found, replace(words, value=found.in_words()))
        except (EngineError, ModelDoesNotFitError) as error:
            if settings.speculation not in TASTES:
                raise
            self._report.warning("speculation_failed", f"speculative decoding is off: {error.message}")
            return plan, (f"speculative decoding failed: {error.message}",)
        value = "off" if found is None else found.in_words()
        self._report.info("speculation", f"speculative decoding: {value}: {why}")
        return chosen, tuple(each.in_words() for each in tried)

    async def _share(self, plan: Plan) -> tuple[Plan, tuple[str, ...]]:
        """With as many slots as several users at once were seen to be served best with."""
        settings = self._settings
        wanted = counts(plan, settings.users)
        if not self._has_slots or len(wanted) == 1:  # one alone has nothing to be compared with
            return plan, ()
        mix = parse_mix(settings.workload)
        workload = scaled(max(mix.parts, key=lambda part: part[1])[0], plan.context)
        key = plan.key + (f", {plan.speculation.in_words()}" if plan.speculation else "")
        seen: list[Concurrency] = []
        why_not = ""
        for count in wanted:
            kept = self._kept_slots(key, count, seen[0].workload if seen else None)
            if kept is not None:
                seen += [kept.found] if kept.found else []
                continue
            left_s = min(self._left_s, settings.budget_s * SHARE_FOR_SLOTS)
            if left_s <= 0 or (seen and left_s < seen[-1].worst_s + seen[-1].load_s):
                why_not = "the time was up"
                break
            each = replace(plan, parallel=count)
            try:
                found = await measure_slots(
                    each,
                    self._programs.starts,
                    users=settings.users,
                    workload=seen[0].workload if seen else workload,
                    left_s=left_s,
                    tell=self._on_step,
                    is_exact=bool(seen),  # only the same job can be compared
                )
            except EngineError as error:
                self._report.warning("slots_failed", f"{count} slots for {settings.users} users: {error.message}")
                self._on_slots(SlotsLook(key=key, slots=count, error=error.message))
                continue
            if isinstance(found, str):
                why_not = found
                break  # fewer slots take longer
            self._on_slots(SlotsLook(key=key, slots=count, found=found))
            seen.append(found)
        unmeasured = f"{count} slots for {settings.users} users were not measured: {why_not}"
        if why_not:
            self._report.warning("slots_not_measured", unmeasured)
        if not seen:
            return plan, (unmeasured,) if why_not else ()
        chosen = choose(seen)
        self._report.info("slots", f"{chosen.slots} slots for {settings.users} users: {chosen.why}")
        notes = (f"{settings.users} users: {chosen.why}", *([unmeasured] if why_not else []))
        return with_slots(plan, chosen), notes

    def _kept_slots(self, key: str, count: int, workload: Workload | None) -> SlotsLook | None:
        """Of a study that was broken off: with this workload, if one was measured with already; a failure only when it
        was one TRIES times."""
        looks = [look for look in self._partial.slots if (look.key, look.slots) == (key, count)]
        good = (look for look in looks if look.found and workload in (None, look.found.workload))
        failed = [look for look in looks if look.error]
        return next(good, failed[-1] if len(failed) >= TRIES else None)

    def _profile(
        self, space: Space, tuned: Tuned, plan: Plan, verdicts: Sequence[Verdict], notes: tuple[str, ...]
    ) -> Profile:
        return Profile(
            key=self._key,
            plan=plan,
            plans=tuned.plans,
            measurements=tuned.measurements,
            verdicts=tuple(verdicts),
            notes=notes,
            mode=self._settings.mode,
            workload=self._settings.workload,
            native=space.native,
            job_s=tuned.job_s,
            speed=speeds_on(tuned.chosen.rated.curve, plan, parse_mix(self._settings.workload)).in_words(),
            seconds=time.monotonic() - self._began,
            stopped_by=tuned.stopped_by,
            created=datetime.now(UTC).isoformat(timespec="seconds"),
            allocated=tuned.allocated,
            disturbance=tuned.disturbance,
            disturbed_times=self._disturbed_times() if tuned.disturbance else 0,
            gpu_uuids=gpu_uuids(self._hardware),
        )

    def _disturbed_times(self) -> int:
        """This one, and those before it."""
        before = self._store.peek(self._key)
        return 1 + (before.disturbed_times if before is not None and before.key == self._key else 0)

    def _save(self, profile: Profile) -> None:
        is_kept = self._store.save(profile)
        pinned = self._store.pinned(self._key)
        if pinned is not None:
            words = f"profile {pinned.key.id} is pinned and stays the one used; `appliance profiles unpin` ends that"
            self._report.warning("profile_pinned", words, profile=pinned.key.id)
        if profile.disturbance:
            stays = "" if is_kept else ", and the profile that is there stays"
            words = f"something else was at work while this was measured: {profile.disturbance}; provisional{stays}"
            self._report.warning("provisional", words)
        words = f"chose {profile.plan.key} in {profile.seconds:.0f} s: {profile.speed}; stopped: {profile.stopped_by}"
        self._report.info("tuned", words, profile=profile.key.id, stopped_by=profile.stopped_by)

    async def _refined(self, plans: Sequence[Plan]) -> Sequence[Plan]:
        """The most promising ones as the engine's own loader reckons them, where they use GPUs: on a CPU its log tells
        the same."""
        if not plans[0].placement.shares:
            return plans
        first = sorted(plans, key=lambda plan: plan.speed.job_s if plan.speed else 0.0)[:REFINED]
        given_up = threading.Event()
        try:
            refined = await asyncio.to_thread(
                self._programs.engine.refine,
                first,
                self._programs.install,
                budget_s=self._settings.budget_s / 10,
                is_wanted=lambda: not given_up.is_set(),
            )
        finally:
            given_up.set()  # a thread is not cancelled, and its children would go on beside whoever asks
        fitting = {plan.key: plan for plan in refined}
        words = f"the engine's loader was asked about {len(first)} plans: {len(fitting)} fit by its figures"
        self._report.info("plans_refined", words)
        dropped = {plan.key for plan in first} - set(fitting)
        return [fitting.get(plan.key, plan) for plan in plans if plan.key not in dropped] or plans

    def _phase(self, words: str) -> None:
        """While something else serves, clients are not told that it is being measured."""
        if self._shows_phase:
            self._report.phase(Phase.TUNING, words)

    def _on_step(self, step: Step) -> None:
        words = f"{step.plan.key}: {step.what}"
        self._phase(words)
        self._report.info("tune_step", words)

    def _on_measured(self, measurement: Measurement) -> None:
        self.measurements.append(measurement)
        self._keep(replace(self._partial, measurements=(*self._partial.measurements, measurement)))
        if measurement.error:
            self._report.warning("tune_failed", measurement.in_words())
            return
        self._report.info("tune_measured", measurement.in_words(), points=[asdict(p) for p in measurement.points])

    def _on_read(self, passage: Passage) -> None:
        try:
            self._keep(replace(self._partial, passages=(*self._partial.passages, passage)))
        except VolumeError as error:  # it may be told while everything is being stopped, and that is to go on
            self._report.warning("not_kept", error.message)

    def _on_guessed(self, key: str, tried: Tried) -> None:
        self._keep(replace(self._partial, guesses=(*self._partial.guesses, GuessLook(key=key, tried=tried))))

    def _on_slots(self, look: SlotsLook) -> None:
        self._keep(replace(self._partial, slots=(*self._partial.slots, look)))

    def _keep(self, partial: Partial) -> None:
        self._partial = partial
        self._store.keep(self._key, partial)


def _has_guesses(space: Space) -> bool:
    return any(offer.is_tried for offer in space.offers())
