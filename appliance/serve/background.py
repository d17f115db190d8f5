"""What goes on beside serving: measuring while nobody asks, and whether the profile still holds."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import TYPE_CHECKING, Any

from appliance.engines.engine import Space
from appliance.errors import FatalError, VolumeError
from appliance.plan import Plan
from appliance.probe import probe
from appliance.profile import Profile, wants_more
from appliance.profile.at_start import TRIES
from appliance.race import first_of

if TYPE_CHECKING:
    from appliance.gateway.engine.backend import Backend
    from appliance.profile.drift import Drift, DriftState
    from appliance.serve.bandwidths import Bandwidths
    from appliance.serve.drift_monitor import DriftMonitor
    from appliance.serve.idle_tuner import IdleTuner
    from appliance.serve.served_model import ServedModel
    from appliance.tune.session import TuningSession


class BackgroundTasks:
    """Of one served model."""

    def __init__(self, served: ServedModel) -> None:
        self._served = served
        self._tuner: IdleTuner[Plan] | None = None
        self._drift_monitor: DriftMonitor | None = None
        self._was_measured = False  # by this process, to the end
        self._session_before: TuningSession | None = None  # when this sitting began
        self._begins_now = asyncio.Event()  # measuring, without an idle period before it: somebody waits for it
        self._needs_bandwidths = served.settings.tune != "off" and served.hardware.speeds is None
        self._bandwidths: Bandwidths | None = None
        self._alone = asyncio.Lock()  # a probe and the measuring of bandwidths would slow each other
        self._more: tuple[Profile, bool] | None = None  # whether the mode wants more than this profile has
        self.is_given_up = False  # measuring: it was tried, and did not come to a plan
        self.why_not_best = ""  # why the best of what was measured does not serve; empty: it does
        self._failure: FatalError | None = None  # of the last tuning

    @property
    def is_tuning(self) -> bool | None:
        """Whether it measures or loads what it measured; None where it does not even wait for a moment to."""
        return self._tuner.is_busy if self._tuner is not None else None

    @property
    def drift(self) -> DriftState | None:
        return self._drift_monitor.state if self._drift_monitor else None

    def begin_again(self) -> bool:
        """True if measuring failed only for lack of the volume, which can be written again: then it begins anew."""
        served = self._served
        if not self.is_given_up or not isinstance(self._failure, VolumeError):
            return False
        try:
            with served.store.tuning(served.key):
                self.is_given_up = False
        except VolumeError:
            return False
        self.begin_now()
        return True

    def begin_now(self) -> None:
        """Somebody waits for what is measured: no idle period before it."""
        self._begins_now.set()
        if self._tuner is not None:
            self._tuner.begin_now()

    async def run(self, backend: Backend) -> None:
        """Never returns. Raises FatalError when an engine does not come back."""
        for ended in await first_of(self._run(backend), self._served.unkept.write()):
            if not ended.cancelled():
                ended.result()  # neither ends but by an error

    async def _run(self, backend: Backend) -> None:
        served = self._served
        await first_of(self._know_machine(backend), self._begins_now.wait())
        while True:
            if served.settings.tune == "idle" and (self.wants_measuring or await self._wants_more(served.profile)):
                await self._tune(backend)
            await self._know_machine(backend)
            await self._unless_hurried(self._look_at_machine(backend))
            if served.settings.tune != "idle" or not self.wants_measuring:
                self._begins_now.clear()
                await self._unless_hurried(self._know_machine_at_last(backend))

    async def _unless_hurried(self, work: Coroutine[Any, Any, None]) -> None:
        """Ends as soon as somebody waits for what is measured."""
        working, _ = await first_of(work, self._begins_now.wait())
        if not working.cancelled():
            working.result()

    async def _know_machine(self, backend: Backend, *, waits: bool = False) -> None:
        """Its bandwidths, once; for the next start, so that plans which somebody waits for go first. On a machine that
        is busy they stay unknown, unless this waits."""
        if not self._needs_bandwidths:
            return
        from appliance.serve.bandwidths import Bandwidths  # here: once a machine, no start

        self._bandwidths = found = self._bandwidths or Bandwidths(self._served, alone=self._alone)
        await (found.until_known if waits else found.measure)(backend.traffic)

    async def _look_at_machine(self, backend: Backend) -> None:
        """Until it is known whether the profile holds, which on a busy machine may take hours; and its bandwidths."""
        for ended in await first_of(self._watch_drift(backend), self._know_machine_at_last(backend)):
            if not ended.cancelled():
                ended.result()

    async def _know_machine_at_last(self, backend: Backend) -> None:
        await self._know_machine(backend, waits=True)
        await asyncio.Event().wait()

    @property
    def wants_measuring(self) -> bool:
        served = self._served
        is_possible = not (served.inputs.model.is_embedding_model or self.is_given_up)
        return is_possible and self._needs_measuring(served.profile)

    def _needs_measuring(self, profile: Profile | None) -> bool:
        """To be measured, or measured anew."""
        store = self._served.store
        if profile is None:
            return True
        if store.is_pinned(profile.key.id):
            return False
        # A machine that is always busy must not be measured again and again: once in a process, and at most twice.
        may_try_again = profile.disturbed_times < TRIES and not self._was_measured
        is_provisional = profile.disturbance is not None and may_try_again
        return is_provisional or store.why_stale(profile) is not None

    async def _wants_more(self, profile: Profile | None) -> bool:
        """Whether the mode that is set may want a context that no plan has which was measured for another mode."""
        served = self._served
        mode, budget_s = served.settings.mode, served.settings.budget_s
        if profile is None or mode == profile.mode or served.store.is_pinned(profile.key.id):
            return False
        # Kept, since it is asked again for the same profile as measuring begins, and makes every plan there is.
        if self._more is None or self._more[0] != profile:
            space = served.start.space(profile.kv_checks)
            found = await asyncio.to_thread(wants_more, profile, mode, space, budget_s=budget_s)
            self._more = profile, found
        return self._more[1]

    async def _tune(self, backend: Backend) -> None:
        from appliance.serve.idle_tuner import IdleTuner  # here: a start from a profile that holds never needs it

        served = self._served
        self._tuner = tuner = IdleTuner(
            host=served.host,
            traffic=backend.traffic,
            upstream=backend.upstream,
            report=served.report,
            measure=self._measure,
            why_no_room=self._why_no_room,
            as_error=served.start.engine.as_error,
            idle_s=served.settings.idle_s,
            need_s=self._need_s,
            gained=self._gained,
            what_else_works=served.what_crowds,
            until_crowded=served.until_crowded,
        )
        if self._begins_now.is_set():
            tuner.begin_now()
        before, variants = served.profile, served.inputs.kernels.variants
        try:
            await tuner.run()
        finally:
            self._tuner = None  # also after a lack, which begins all of this anew
        self.why_not_best = tuner.why_given_up
        self._begins_now.clear()
        # With other kernels everything is to be measured anew.
        has_same_kernels = served.inputs.kernels.variants == variants
        self.is_given_up = served.profile is before and has_same_kernels
        self._failure = tuner.failure
        self._was_measured = not self.is_given_up and has_same_kernels
        self._drift_monitor = None

    def _need_s(self) -> float:
        """For a load and one measurement at the workload's depth, by the prediction of the plan that serves."""
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

    async def _measure(self, is_alone: bool) -> Plan | None:
        """None while another container measures for the same key: its profile is adopted later or by a next start."""
        # Here: a start from a profile that holds never needs it.
        from appliance.serve.choose import use_profile
        from appliance.serve.kernels import plan_without, prove_runner_up
        from appliance.serve.measure import measure, measure_more

        served = self._served
        self._session_before = served.session
        with served.store.tuning(served.key) as is_ours:
            if not is_ours:
                return None
            found = served.store.load(served.key)
            if found is not None and self._needs_measuring(found):
                found = None  # it is measured anew
            if found is not None and not await self._wants_more(found):
                return use_profile(served, found)
            await prove_runner_up(served)
            beside = None if is_alone else await self._space_now()
            try:
                if found is not None:
                    return use_profile(served, await measure_more(served, found, beside=beside))
                served.profile = await measure(served, shows_phase=False, beside=beside)
            except FatalError as error:
                return await plan_without(served, served.inputs.kernels.variant, error)
            return served.profile.plan

    async def _space_now(self) -> Space:
        """In the memory that is free beside the engine that serves."""
        served = self._served
        hardware = await asyncio.to_thread(probe, served.settings.data_dir, served.environment)
        return served.start.on(hardware).space()

    async def _why_no_room(self, plan: Plan | None) -> str:
        """Whether the memory that is free now, beside the engine that serves, holds a second one."""
        served = self._served
        wanted = plan or served.host.plan
        if wanted is None:
            return "no plan serves"
        if plan is None and served.profile is not None and not self._needs_measuring(served.profile):
            mode = served.settings.mode
            return f"mode '{mode}' may want a context that fits only in place of the engine that serves"
        try:
            found = (await self._space_now()).now(wanted)
        except FatalError as error:  # a device that is gone: no reason to end serving
            return error.message
        return found if isinstance(found, str) else ""

    async def _watch_drift(self, backend: Backend) -> None:
        """Until probes have shown whether the profile holds; it is said, and kept on the volume if not."""
        served = self._served
        profile, plan = served.profile, served.host.plan
        if profile is None or plan is None:
            return
        # Here: a start compares nothing before its engine serves.
        from appliance.serve.drift_monitor import PROBE_AFTER_S, DriftMonitor

        self._drift_monitor = DriftMonitor(
            profile,
            plan,
            served.start.engine,
            served.command(plan, backend.upstream.socket_path),
            traffic=backend.traffic,
            report=served.report,
            watch=served.watch,
            alone=self._alone,
            after_s=min(PROBE_AFTER_S, served.settings.idle_s),
        )
        await self._keep_drift(profile, await self._drift_monitor.run())

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
            "idle": "measured again while nobody asks",
        }
        # What was measured while something else was at work may be too slow as well: then another plan may be the best.
        is_stale = drift.state is DriftState.STALE
        why = drift.words if is_stale else f"{drift.note}; {profile.disturbance} when it was measured"
        report.warning("profile_stale", f"profile {id_} is stale: {why}; {then.get(tune, 'kept')}")
        try:
            await asyncio.to_thread(self._served.store.mark_stale, profile, why)
        except VolumeError as error:  # serving goes on; the next start finds out again
            report.warning("profile_not_marked", error.message)
