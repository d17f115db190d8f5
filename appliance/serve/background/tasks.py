"""Work beside serving: measuring in idle time, and probes that tell whether the profile still holds."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from typing import TYPE_CHECKING, Any

from appliance.engines.engine import Space
from appliance.errors import FatalError, VolumeError
from appliance.plan import Plan
from appliance.probe import probe
from appliance.profile import Profile, context_to_measure, wants_more
from appliance.race import all_of, first_of
from appliance.serve.background.mode_switch import ModeSwitch, keep_modes
from appliance.serve.model.needs import goes_on_after_s, is_due, needs_measuring, until_tomorrow_s
from appliance.serve.model.served_model import ServedModel
from appliance.serve.model.tuning_state import TuningState
from appliance.start.inputs import StartInputs
from appliance.system.detached import detached

if TYPE_CHECKING:
    from appliance.gateway.engine.backend import Backend
    from appliance.profile.drift import Drift, DriftState
    from appliance.serve.background.bandwidths import Bandwidths
    from appliance.serve.background.checks.comparison import Comparison
    from appliance.serve.background.idle_tuner import IdleTuner
    from appliance.tune.session import TuningSession


class BackgroundTasks:
    """The work beside serving of one model. What is found is written to the ServedModel and its `tuning`."""

    def __init__(self, served: ServedModel) -> None:
        self._served = served
        self._session_before: TuningSession | None = None  # when this sitting began
        self._needs_bandwidths = served.settings.tune != "off" and served.hardware.speeds is None
        self._bandwidths: Bandwidths | None = None
        self._alone = asyncio.Lock()  # held by a probe, and while bandwidths are measured: they would slow each other
        # a profile and a mode, and True if the mode wants more than the profile has
        self._more: tuple[Profile, str, bool] | None = None
        self._shorter: set[int | None] = set()  # contexts tried since needles were lost: each once in a start
        self._comparisons: list[Comparison] = []  # of this start
        self._allowed: set[str] = set()  # keys of plans that came in the place of refused ones in this start

    async def run(self, backend: Backend) -> None:
        """Work beside serving. Never returns. Raises FatalError if an engine does not come back."""
        served = self._served
        for ended in await first_of(self._run(backend), served.unkept.write(), keep_modes(served, backend)):
            if not ended.cancelled():
                ended.result()  # neither ends but by an error

    async def _run(self, backend: Backend) -> None:
        from appliance.serve.background.checks.ability_check import (  # here, all: no start needs them
            AbilityCheck,
            is_wanted,
        )
        from appliance.serve.background.checks.cache_check import CacheSubject
        from appliance.serve.background.checks.comparison import Comparison
        from appliance.serve.background.checks.context_check import ContextCheck
        from appliance.serve.background.checks.speculation_check import SpeculationSubject

        served = self._served
        abilities = AbilityCheck(served, alone=self._alone)
        context = ContextCheck(served, alone=self._alone)
        # The cache first: speculative decoding is compared on the plan that is left.
        self._comparisons = [Comparison(served, each) for each in (CacheSubject(served), SpeculationSubject(served))]
        if is_wanted(served):
            await abilities.load()
        await self._unless_hurried(self._know_machine(backend))
        while True:
            if served.modes.wanted is not None:
                await ModeSwitch(served, backend.upstream, served.modes.wanted, self._why_not_beside).run()
            # Before measuring: figures of the original are of no use to the file that the next load takes.
            await self._unless_hurried(self._quantize(backend))
            await served.renew_standing(served.profile)
            may_measure = served.settings.tune == "idle" and not served.sharing.is_shared.is_set()
            if may_measure and (needs_measuring(served) or await self._wants_more(served.profile)):
                await self._tune(backend)
            if served.sharing.is_shared.is_set():
                await first_of(served.sharing.is_alone.wait(), served.modes.is_wanted.wait())
                continue
            await self._unless_switched(self._know_machine(backend))
            await self._unless_hurried(abilities.run(backend.traffic))
            await self._unless_hurried(self._measure_expert_loss(backend))
            await self._unless_hurried(context.find_needles(backend.traffic))
            if may_measure and served.profile is not None and self._shorter_context(served.profile):
                continue
            due = await self._due_comparison()
            if due is not None and not served.sharing.is_shared.is_set():
                if not await self._serve_checked(backend, due):
                    self._leave_to_next_start(due)
                continue
            # Together: on a busy machine the drift stays unknown for hours.
            await self._unless_hurried(all_of(self._look_at_machine(backend), context.soak(backend.traffic)))
            await served.renew_standing(served.profile)
            if await self._due_comparison() is not None:
                continue  # its loads were used up, and another day has begun meanwhile
            if served.settings.tune != "idle" or not needs_measuring(served):
                served.tuning.wanted_now.clear()
                await self._unless_hurried(self._know_machine_at_last(backend))

    async def _unless_hurried(self, work: Coroutine[Any, Any, None]) -> None:
        """Do the work, and end it as soon as a client waits for measuring, or for another mode."""
        working, *_ = await first_of(self._unless_switched(work), self._served.tuning.wanted_now.wait())
        if not working.cancelled():
            working.result()

    async def _unless_switched(self, work: Coroutine[Any, Any, None]) -> None:
        """Do the work, and end it as soon as a client asks for another mode, or an unfinished profile is due."""
        working, *_ = await first_of(work, self._served.modes.is_wanted.wait(), self._until_it_goes_on())
        if not working.cancelled():
            working.result()

    async def _until_it_goes_on(self) -> None:
        """Return when an unfinished profile may be measured or compared further, which is on another day; never for any
        other."""
        after_s = goes_on_after_s(self._served.profile) if self._served.settings.tune == "idle" else None
        if not after_s and any(each.lacks_loads for each in self._comparisons):
            after_s = until_tomorrow_s()
        if not after_s:
            await asyncio.Event().wait()
        await asyncio.sleep(after_s or 0.0)

    async def _quantize(self, backend: Backend) -> None:
        """Quantize an unquantized model and measure the loss, for the next load."""
        if self._served.start.quantization is None or self._served.quantizing.is_over:
            return
        from appliance.serve.background.quantize_idle import QuantizeIdle  # here: few models need it

        await QuantizeIdle(self._served, backend.traffic).run()

    async def _measure_expert_loss(self, backend: Backend) -> None:
        served = self._served
        if served.settings.experts_used is None or served.settings.tune == "off" or served.is_loss_measured:
            return
        from appliance.serve.background.experts_idle import measure_expert_loss  # here: few starts need it

        await measure_expert_loss(served, backend.traffic)
        served.is_loss_measured = True

    async def _know_machine(self, backend: Backend, *, waits: bool = False) -> None:
        """Measure the machine's bandwidths once, for the next start; tuning that a client waits for goes first.

        On a busy machine they stay unknown, unless `waits`.
        """
        if not self._needs_bandwidths:
            return
        from appliance.serve.background.bandwidths import Bandwidths  # here: needed once on a machine, by no start

        self._bandwidths = found = self._bandwidths or Bandwidths(self._served, alone=self._alone)
        await (found.until_known if waits else found.measure)(backend.traffic)

    async def _look_at_machine(self, backend: Backend) -> None:
        """Find out whether the profile holds, which may take hours on a busy machine; and the bandwidths."""
        for ended in await first_of(self._watch_drift(backend), self._know_machine_at_last(backend)):
            if not ended.cancelled():
                ended.result()

    async def _know_machine_at_last(self, backend: Backend) -> None:
        await self._know_machine(backend, waits=True)
        await asyncio.Event().wait()

    async def _wants_more(self, profile: Profile | None) -> bool:
        """True if a context length is needed that no measured plan has: by this mode, or since needles were lost."""
        served = self._served
        mode, budget_s = served.settings.mode, served.settings.budget_s
        if profile is not None and self._shorter_context(profile):
            return True
        if profile is None or mode == profile.mode or served.standing_for_use(profile).is_pinned:
            return False
        # Kept: the question makes every plan there is, and is asked again for the same profile.
        if self._more is None or self._more[:2] != (profile, mode):
            space = served.start.space(profile.kv_checks)
            found = await detached(wants_more, profile, mode, space, budget_s=budget_s)
            self._more = profile, mode, found
        return self._more[2]

    def _shorter_context(self, profile: Profile) -> int | None:
        """Return the context to measure since needles were lost in every measured one; None once it was tried, and for
        a context that the user gave or a pinned profile."""
        served = self._served
        if served.settings.ctx_size or served.standing_for_use(profile).is_pinned:
            return None
        found = context_to_measure(profile)
        return None if found in self._shorter else found

    async def _tune(self, backend: Backend) -> None:
        served = self._served
        tuning = served.tuning
        in_service = self._measure_serving if served.start.engine.measures_in_service else None
        tuner = self._tuner(backend, tuning, self._measure, self._why_no_room, self._gained, in_service)
        before, variants = served.profile, served.inputs.kernels.variants
        tuning.is_busy = False
        try:
            is_over = await tuner.run()
        finally:
            tuning.is_busy = None  # after a lack as well, which begins all of this anew
        if not is_over:
            return
        # Given up before it was tried: not again in this start. A profile that was measured anew has its own.
        if before is not None and served.profile is before and (shorter := self._shorter_context(before)):
            self._shorter.add(shorter)
        tuning.why_not_best = tuner.why_given_up
        tuning.wanted_now.clear()
        # Other kernels have to be measured anew.
        has_same_kernels = served.inputs.kernels.variants == variants
        tuning.is_given_up = served.profile is before and has_same_kernels
        tuning.failure = tuner.failure
        tuning.was_measured = not tuning.is_given_up and has_same_kernels
        tuning.drift = None

    def _tuner(
        self,
        backend: Backend,
        tuning: TuningState,
        measure: Callable[[bool], Awaitable[Plan | None]],
        why_no_room: Callable[[Plan | None], Awaitable[str]],
        gained: Callable[[], int],
        measure_serving: Callable[[], Awaitable[None]] | None = None,
    ) -> IdleTuner[Plan]:
        from appliance.serve.background.idle_tuner import IdleTuner  # here: a start from a profile may never need it

        served = self._served
        return IdleTuner(
            host=served.host,
            traffic=backend.traffic,
            upstream=backend.upstream,
            report=served.report,
            tuning=tuning,
            measure=measure,
            measure_serving=measure_serving,
            why_no_room=why_no_room,
            as_error=served.start.engine.as_error,
            idle_s=served.settings.idle_s,
            need_s=self._need_s,
            gained=gained,
            what_else_works=served.what_crowds,
            until_crowded=served.until_crowded,
            gives_way=served.modes.is_wanted,
            is_shared=served.sharing.is_shared,
        )

    async def _due_comparison(self) -> Comparison | None:
        for each in self._comparisons:
            if await each.is_due():
                return each
        return None

    async def _serve_checked(self, backend: Backend, comparison: Comparison) -> bool:
        """Compare, and load another plan if the checks do not allow the one that serves. Returns False if that brought
        neither a verdict nor another plan: the next start tries again."""
        served, before = self._served, comparison.gained
        state = TuningState()  # of its own: measuring has ended, which documents go on to say
        state.wanted_now = served.tuning.wanted_now

        async def why_no_room(plan: Plan | None) -> str:
            wanted = (plan,) if plan else comparison.loads()
            return await self._why_not_beside(served.start, *wanted) if wanted else "no plan serves"

        tuner = self._tuner(backend, state, comparison.measure, why_no_room, lambda: comparison.gained - before)
        plan = served.host.plan
        if await tuner.run() and await comparison.is_due():
            now = served.host.plan
            if now is None or plan is None or now.key == plan.key or now.key in self._allowed:
                return False
            self._allowed.add(now.key)  # in place of a refused one, and it has to be compared too
        return True

    def _leave_to_next_start(self, comparison: Comparison) -> None:
        """Compare no more in this start: this one, or all if the allowed plan did not load, with which each ends."""
        from appliance.serve.background.checks.comparison import allowed  # here: no start needs it

        host = self._served.host
        if host.plan is not None and host.is_another(allowed(self._served, host.plan)):
            self._comparisons.clear()
        else:
            self._comparisons.remove(comparison)

    def _need_s(self) -> float:
        """Predict the time for a load and one measurement at the workload's depth, from the plan that serves."""
        from appliance.tune.figures.workload import parse_mix
        from appliance.tune.trials.run_trial import DECODE_TOKENS  # here, both: a start from a profile never needs them

        host, settings = self._served.host, self._served.settings
        speed = host.plan.speed if host.plan else None
        if host.plan is None or speed is None:
            return host.load_s
        depth = min(parse_mix(settings.workload).depth, host.plan.context)
        return host.load_s + depth / speed.prefill_tokens_per_s + DECODE_TOKENS / speed.decode_tokens_per_s

    def _gained(self) -> int:
        """How much this sitting has kept."""
        session = self._served.session
        return session.gained if session is not None and session is not self._session_before else 0

    async def _measure_serving(self) -> None:
        """Measure the plan that serves on its own engine, unless another container measures or a profile holds."""
        # here: a start from a profile that holds never needs it
        from appliance.serve.engine.measure import measure_serving

        served = self._served
        async with served.measuring() as is_ours:
            found = await served.find_profile() if is_ours else None
            await served.renew_standing(found)
            if is_ours and (found is None or is_due(served, found)):
                await measure_serving(served)

    async def _measure(self, is_alone: bool) -> Plan | None:
        """Measure and return the best plan; None while another container measures for the same key.

        Its profile is used later, or by the next start.
        """
        # here: a start from a profile that holds never needs it
        from appliance.serve.engine.choose_plan import use_profile
        from appliance.serve.engine.kernels import check_runner_up, plan_without
        from appliance.serve.engine.measure import measure

        served = self._served
        self._session_before = served.session
        async with served.measuring() as is_ours:
            if not is_ours:
                return None
            found = await served.find_profile()
            await served.renew_standing(found)
            if found is not None and is_due(served, found):
                found = None  # it is measured anew
            if found is not None and not await self._wants_more(found):
                return use_profile(served, found)
            await check_runner_up(served)
            beside = None if is_alone else await self._space_now()
            try:
                if found is not None:
                    return use_profile(served, await self._measure_more(found, beside))
                served.profile = await measure(served, shows_phase=False, beside=beside)
            except FatalError as error:
                return await plan_without(served, served.inputs.kernels.variant, error)
            return served.profile.plan

    async def _measure_more(self, profile: Profile, beside: Space | None) -> Profile:
        """Measure a shorter context if needles were lost, else what the mode needs. A context counts as tried unless a
        request interrupts it."""
        from appliance.serve.engine.measure import measure_more  # here: a start from a profile that holds needs it not

        context = self._shorter_context(profile)
        try:
            more = await measure_more(self._served, profile, context=context, beside=beside)
        except FatalError:
            self._shorter.add(context)
            raise
        self._shorter.add(context)
        return more

    async def _space_now(self, start: StartInputs | None = None) -> Space:
        """Return the plans for the memory that is free beside the engine that serves."""
        served = self._served
        hardware = await detached(lambda: served.beside(probe(served.settings.data_dir, served.environment)))
        return (start or served.start).on(hardware).space()

    async def _why_no_room(self, plan: Plan | None) -> str:
        """Say why free memory holds no second engine beside the one that serves; "" if it does."""
        served = self._served
        wanted = plan or served.host.plan
        if wanted is None:
            return "no plan serves"
        profile = None if plan else served.profile
        if profile is not None and not is_due(served, profile) and not self._shorter_context(profile):
            mode = served.settings.mode
            return f"mode '{mode}' may want a context that fits only in place of the engine that serves"
        return await self._why_not_beside(served.start, wanted)

    async def _why_not_beside(self, start: StartInputs, *plans: Plan) -> str:
        """Say why free memory holds no second engine with each of these plans; "" if it does."""
        try:
            space = await self._space_now(start)
            found = [space.now(plan) for plan in plans]
        except FatalError as error:  # a device that is gone: no reason to end serving
            return error.message
        return next((each for each in found if isinstance(each, str)), "")

    async def _watch_drift(self, backend: Backend) -> None:
        """Probe until it is known whether the profile holds. The result is logged; a stale profile is marked."""
        served = self._served
        profile, plan = served.profile, served.host.plan
        if profile is None or plan is None:
            return
        # here: a start compares nothing before its engine serves
        from appliance.serve.background.drift_monitor import PROBE_AFTER_S, DriftMonitor

        def tell(state: DriftState | None) -> None:
            served.tuning.drift = state

        monitor = DriftMonitor(
            profile,
            plan,
            served.start.engine,
            served.command(plan, backend.upstream.socket_path),
            traffic=backend.traffic,
            report=served.report,
            watch=served.watch,
            alone=self._alone,
            on_state=tell,
            after_s=min(PROBE_AFTER_S, served.settings.idle_s),
        )
        await self._keep_drift(profile, await monitor.run())

    async def _keep_drift(self, profile: Profile, drift: Drift) -> None:
        from appliance.profile.drift import DriftState  # here: a start compares nothing before its engine serves

        report, tune, id_ = self._served.report, self._served.settings.tune, profile.key.id
        if drift.note:
            report.info("profile_faster", f"profile {id_}: {drift.note}")
        if drift.state is DriftState.UNDECIDED:
            return
        if drift.state is DriftState.VALID and not (drift.note and profile.disturbance):
            report.info("profile_holds", f"profile {id_} is valid: {drift.words}")
            return
        then = {
            "first": "measured again at the next start on a quiet machine",
            "idle": "measured again in idle time",
        }
        # Figures that other programs disturbed may be too slow: without them another plan may be the best.
        is_stale = drift.state is DriftState.STALE
        why = drift.words if is_stale else f"{drift.note}; {profile.disturbance} when it was measured"
        report.warning("profile_stale", f"profile {id_} is stale: {why}; {then.get(tune, 'kept')}")
        try:
            await detached(self._served.store.mark_stale, profile, why)
        except VolumeError as error:  # serving goes on; the next start finds out again
            report.warning("profile_not_marked", error.message)
