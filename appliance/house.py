"""What is alive during a start and after it: an engine, one gateway, what they show of themselves, and what goes on
beside serving: measuring while nobody asks, and whether the profile still holds."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from collections import deque
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict, replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from appliance import __version__
from appliance.command import Command
from appliance.engines.engine import Engine, Inputs, Install, Space
from appliance.errors import (
    ConfigError,
    CpuBackendError,
    CpuUnsupportedError,
    FatalError,
    ModelDoesNotFitError,
    VolumeError,
)
from appliance.idle.serving import Serving
from appliance.model import plain_name
from appliance.plan import Allocated, Kernels, Plan, Verdict, as_document, explain_memory, in_short
from appliance.probe import Hardware, probe
from appliance.probe import as_document as hardware_document
from appliance.profile import Key, Picked, Profile, ProfileStore, pick, speeds_document, speeds_of, wants_more
from appliance.profile.at_start import TRIES, Act, Found, Start, at_start, is_due
from appliance.progress import Phase
from appliance.race import first_of
from appliance.report import Report
from appliance.settings import Settings
from appliance.supervisor import Restart, State, Supervisor
from appliance.values import dataclass
from appliance.volume import read_or_make_key

if TYPE_CHECKING:
    from appliance.drift_monitor import DriftMonitor
    from appliance.gateway.server import Gateway
    from appliance.idle.tuner import IdleTuner
    from appliance.study import Study
    from appliance.tune.measurement import Measurement

GLANCE_S = 1.0  # at the machine, to see whether something else is at work: less than half of it tells nothing
STEPS_DOWN = 3  # to smaller plans, when memory runs out as the engine loads
# Settings that keep a plan from becoming smaller.
SIZED_BY = ("ctx_size", "kv_type", "ubatch", "parallel", "users", "cache_ram_mib", "devices", "gpu_layers", "n_cpu_moe",
            "draft_model")  # fmt: skip
_TUNING = {
    "waiting": "measuring begins when nobody asks",
    "measuring": "the machine is being measured; the plan before serves meanwhile",
    "measured": "the best of what was measured serves",
    "failed": "measuring came to no plan, and is not tried again before the next start; the log says why",
}
UNLOADABLE = "its file cannot be loaded: it is missing or damaged"
LOG_LINES = 5000  # kept until readiness; buffer sizes are among the first few hundred


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """What a start knows before it starts anything."""

    engine: Engine
    install: Install
    inputs: Inputs
    key: Key
    warnings: tuple[str, ...] = ()  # of what this image leaves unused

    def space(self, verdicts: Sequence[Verdict] = ()) -> Space:
        """Raises ModelDoesNotFitError (31) with figures, ConfigError (10) for a setting that the engine cannot take."""
        return self.engine.space(self.inputs, verdicts)

    def with_kernels(self, kernels: Kernels) -> Prepared:
        key = Key(parts={**self.key.parts, "cpu_variant": kernels.variant})
        return replace(self, inputs=self.inputs.with_kernels(kernels), key=key)

    def on(self, hardware: Hardware) -> Prepared:
        """As if the machine were this one."""
        return replace(self, inputs=replace(self.inputs, hardware=hardware))

    def predicted(self, verdicts: Sequence[Verdict] = ()) -> Plan:
        """What is served where nothing was measured. Raises as `space` does."""
        return self.space(verdicts).predicted


def best_of(profile: Profile | None, mode: str, space: Space) -> Plan:
    """The best that was measured and fits, else the prediction. Raises ModelDoesNotFitError (31)."""
    picked = pick(profile, mode, space) if profile else ()
    return picked.plan if isinstance(picked, Picked) else space.predicted


class House:
    """Made inside the running loop. The order of its verbs is `boot`'s business."""

    def __init__(
        self,
        settings: Settings,
        environment: Mapping[str, str],
        found: Prepared,
        store: ProfileStore,
        report: Report,
    ) -> None:
        self._settings = settings
        self._environment = environment
        self._found = found
        self._key = found.key
        self._space = found.space()
        self._store = store
        self._report = report
        # Short: 107 bytes is all that a socket has.
        self._sockets = [settings.runtime_dir / f"appliance-{os.getpid()}{letter}.sock" for letter in ("", "b", "m")]
        self._serving: Serving[Plan] = Serving(
            sockets=(self._sockets[0], self._sockets[1]), command=self._command, supervise=self._supervisor
        )
        self._profile: Profile | None = None
        self._allocated: Allocated | None = None
        self._study: Study | None = None
        self._drift_monitor: DriftMonitor | None = None
        self._logs: dict[Supervisor, deque[str]] = {}
        self._tuner: IdleTuner[Plan] | None = None
        self._was_measured = False  # by this process, to the end
        self._begins_now = False  # measuring, without an idle period before it: somebody waits for it
        self._is_given_up = False  # measuring while nobody asks: it was tried, and did not come to a plan
        self._stop = asyncio.Event()
        self._began_s = int(time.time())
        self._engine = found.engine
        self._install = found.install
        self._guard = found.engine.guard(found.install, found.inputs.image, found.inputs.hardware.cpu, report)
        self.hardware = found.inputs.hardware

    @property
    def _inputs(self) -> Inputs:
        return self._found.inputs

    @property
    def was_stopped(self) -> bool:
        """Whether a signal asked for the end."""
        return self._stop.is_set()

    @property
    def has_engine(self) -> bool:
        return self._serving.plan is not None

    def adopt(self) -> None:
        """Starts the engine at once when there is a profile that is not to be measured again, and its kernels were
        checked before."""
        profile = self._store.load(self._key)
        self._guard.begin(self._inputs, profile.verdicts if profile else ())
        if self._guard.is_checking:
            return
        if profile is not None and (start := self._at_start(profile, may_measure=True)).act is Act.USE:
            self._say(start)
            self.launch(self._use(profile))

    async def prove_kernels(self) -> None:
        """Before they serve for the first time. Variants that fail are ruled out; raises when none is left."""
        while True:
            self._guard.begin(self._inputs)
            if self._guard.is_checking:
                self._report.phase(Phase.STARTING, f"checking the CPU's kernels: {self._inputs.kernels.variant}")
            failed = await self._guard.finish()
            if failed is None:
                return
            self._rule_out(*failed)

    def _rule_out(self, variant: str, seen: str) -> None:
        """The next variant is planned with from here on. Raises CpuUnsupportedError (22) where none is left,
        ConfigError (10) where this one was asked for."""
        inputs, ruled_out = self._inputs, self._guard.rule_out(variant, seen)
        kernels = self._engine.choose_kernels(self._settings, inputs.facts, inputs.hardware.cpu, ruled_out)
        self._found = self._found.with_kernels(kernels)
        self._key = self._found.key
        self._space = self._found.space()
        self._profile = self._store.load(self._key)

    async def _without(self, variant: str | None, error: FatalError) -> Plan:
        """What to serve instead, where the kernels are what the engine died of. Raises the error where they are not."""
        if variant is None or not isinstance(error, CpuUnsupportedError | CpuBackendError):
            raise error
        self._rule_out(variant, UNLOADABLE if isinstance(error, CpuBackendError) else error.message)
        await self.prove_kernels()
        profile = self._profile
        return best_of(profile, self._settings.mode, self._found.space(profile.verdicts if profile else ()))

    def _at_start(self, profile: Profile | None, *, may_measure: bool, busy: str | None = None) -> Start:
        found = None
        if profile is not None:
            id_ = profile.key.id
            due = is_due(profile.created, disturbed_times=profile.disturbed_times, now=datetime.now(UTC))
            found = Found(
                id=id_,
                stale=self._store.why_stale(profile),
                provisional=profile.disturbance if due else None,
                busy=busy,
                is_pinned=self._store.is_pinned(id_),
            )
        return at_start(found, tune=self._settings.tune, may_measure=may_measure)

    async def _at_work(self) -> str:
        """What else uses the machine now, in words; empty where nothing does."""
        from appliance.probe.watch import Watch  # here: a start from a profile that holds never needs it

        async with Watch(self.hardware, self._environment) as watching:
            await asyncio.sleep(GLANCE_S)
        return watching.conditions.disturbance or ""

    def _say(self, start: Start) -> None:
        if start.words:
            (self._report.warning if start.is_warning else self._report.info)(start.event, start.words)

    def _use(self, profile: Profile) -> Plan:
        """The best of what was measured that fits the memory which is free now; the prediction where nothing does."""
        self._profile = profile
        build_id = self._inputs.image.build_id
        if (build := profile.key.parts.get("build")) != build_id:
            words = f"profile {profile.key.id} is pinned: used although build: {build} -> {build_id}"
            self._report.info("profile_pinned", words, profile=profile.key.id)
        self._report.info("profile_used", f"profile {profile.key.id}: {profile.speed}", profile=profile.key.id)
        picked = pick(profile, self._settings.mode, self._space)
        self._say_passed_over(picked.passed_over if isinstance(picked, Picked) else picked)
        if isinstance(picked, Picked):
            if not picked.is_best or self._settings.mode != profile.mode:
                words = f"serving {picked.plan.key}: {picked.why}{self._measured_for(profile)}"
                self._report.info("plan_picked", words, mode=self._settings.mode)
            return picked.plan
        self._report.warning("plan_predicted", "nothing that was measured fits now: serving the prediction")
        return self._found.predicted(profile.verdicts)

    def _measured_for(self, profile: Profile) -> str:
        if self._settings.mode in (profile.mode, *profile.other_modes):
            return ""
        words = f"; chosen among what was measured for mode '{profile.mode}'"
        return words if self._settings.tune == "idle" else f"{words}, and tune '{self._settings.tune}' measures no more"

    def _say_passed_over(self, lacking: Sequence[str]) -> None:
        if not lacking:
            return
        from appliance.probe.holders import who_holds  # here: few starts are short of memory

        for words in lacking:
            self._report.warning("plan_passed_over", f"{words}; {who_holds(self.hardware)}")

    def launch(self, chosen: Plan) -> None:
        """Spawns the engine at once; `serve` waits for it."""
        for choice in chosen.choices:
            if choice.is_refusal:
                self._report.warning("not_as_asked", f"{choice.name} is {choice.value}: {choice.reason}")
        self._report.phase(Phase.LOADING, Path(chosen.model_path).name)
        self._report.info("engine_start", f"starting the engine: {explain_memory(chosen)}", context=chosen.context)
        self._serving.launch(chosen)

    def _command(self, plan: Plan, socket_path: Path) -> Command:
        return self._engine.command(plan, self._install, socket_path)

    def _supervisor(self, plan: Plan) -> Supervisor:
        lines: deque[str] = deque(maxlen=LOG_LINES)
        # Another try with the same kernels would die of the same instruction.
        restart = Restart(not_after=frozenset({signal.SIGILL}) if plan.cpu_variant else frozenset())
        made = Supervisor(restart=restart, on_line=lambda line: self._on_line(made, lines, line))
        self._logs = {each: kept for each, kept in self._logs.items() if each.state is not State.STOPPED}
        self._logs[made] = lines
        return made

    async def decide(self) -> Plan:
        """As `_decide`, with the next CPU variant where one dies while it is measured."""
        while True:
            try:
                return await self._decide()
            except FatalError as error:
                await self._without(self._inputs.kernels.variant, error)

    async def _decide(self) -> Plan:
        """Measures, unless told not to, or while another container does for the same key: nobody waits for it."""
        profile = self._store.load(self._key)
        if profile is None and (changed := self._store.why_unused(self._key, self._inputs.model.path.name)):
            self._report.info("profile_unused", f"no profile for this start; since the last one changed: {changed}")
        if self._inputs.model.is_embedding_model and self._settings.tune != "off":
            self._report.info("tune_off", "the model gives vectors, not text: serving the prediction")
            return self._space.best
        with self._store.tuning(self._key) as is_ours:
            profile = self._store.load(self._key)
            start = self._at_start(profile, may_measure=is_ours)
            if start.act is Act.LOOK:
                start = self._at_start(profile, may_measure=is_ours, busy=await self._at_work())
            self._say(start)
            if start.act is Act.MEASURE:
                self._profile = await self._new_study().run()
                return self._profile.plan
        return self._found.predicted() if profile is None else self._use(profile)

    async def tune_alone(self) -> None:
        """Raises ConfigError for a model that makes no text, for a profile that would stay as it is since it is pinned,
        and while another container measures for the same key: two would spoil each other's."""
        if self._inputs.model.is_embedding_model:
            message = f"nothing can be measured: {self._inputs.model.path.name} gives vectors, not text"
            raise ConfigError(message, hint="serve it: its plan is the prediction")
        self._refuse_pinned()
        with self._store.tuning(self._key) as is_ours:
            if not is_ours:
                message = "another container on this volume is measuring for the same key"
                raise ConfigError(message, hint="wait for it; its profile will serve both")
            await self.prove_kernels()
            await self._study_alone()

    async def _study_alone(self) -> None:
        while True:
            try:
                await self._new_study().run()
            except FatalError as error:
                await self._without(self._inputs.kernels.variant, error)
            else:
                return

    def _refuse_pinned(self) -> None:
        """Before the budget is spent. A pin of another build's profile is none of ours: what is measured is kept."""
        pinned = self._store.pinned(self._key)
        if self._store.stays(self._key):
            message = f"profile is pinned, and what is measured would not be kept: {self._key.id}"
            raise ConfigError(message, hint=f"`appliance profiles unpin {self._key.id}` lets it be measured again")
        if pinned is not None:
            words = (
                f"profile {pinned.key.id} of build {pinned.key.parts.get('build')} is pinned: what is measured is kept "
                "beside it, and used when `appliance profiles unpin` has ended that"
            )
            self._report.warning("profile_pinned", words, profile=pinned.key.id)

    def _new_study(self, *, shows_phase: bool = True, beside: Space | None = None) -> Study:
        from appliance.study import Programs, Study  # here: a start from a profile never needs it

        programs = Programs(engine=self._engine, install=self._install, socket_path=self._sockets[2])
        self._study = Study(
            self._settings,
            self._environment,
            programs,
            draft=self._inputs.draft,
            hardware=self.hardware,
            key=self._key,
            space=self._found.space,
            store=self._store,
            report=self._report,
            shows_phase=shows_phase,
            beside=beside,
        )
        return self._study

    @asynccontextmanager
    async def stoppable(self) -> AsyncIterator[None]:
        """SIGTERM and SIGINT stop whatever is going on; the engine is gone when this ends, however it ends."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._stop.set)
        story = asyncio.current_task()
        watcher = asyncio.create_task(self._cancel_when_stopped(story))
        try:
            yield
        except asyncio.CancelledError:
            if not self._stop.is_set():
                raise
        finally:
            watcher.cancel()
            self._report.phase(Phase.STOPPING)
            self._guard.give_up()
            await self._serving.stop()
            self._report.info("stopped", "the engine is gone")

    async def _cancel_when_stopped(self, story: asyncio.Task[Any] | None) -> None:
        await self._stop.wait()
        self._report.info("stopping", "asked to stop")
        if story is not None:
            story.cancel()

    @asynccontextmanager
    async def open_gateway(self) -> AsyncIterator[Gateway]:
        """Listens at once: clients are told what a start is doing. Drains before the engine is stopped."""
        keys = self._keys()
        # Here: above, uvicorn would delay the engine's start.
        from appliance.gateway.app import create_app
        from appliance.gateway.auth import Keys
        from appliance.gateway.server import Gateway

        app = create_app(
            socket_path=self._sockets[0],
            engine_routes=self._engine.routes,
            dropped_headers=self._engine.dropped_headers,
            keys=Keys(frozenset({keys})) if keys else None,
            progress=lambda: self._report.progress,
            documents={
                "status": self._status,
                "hardware": lambda: hardware_document(self.hardware),
                "plan": lambda: as_document(self._serving.plan) if self._serving.plan else {},
                "profile": self._profile_document,
                "tuning": self._tuning_document,
            },
            actions={"tuning": self._measure_now},
            models=self._models,
            engine_restarts=lambda: self._serving.restarts,
        )
        gateway = await Gateway.open(app, self._settings.host, self._settings.port)
        self._report.info("listening", f"listening on {self._settings.host}:{gateway.port}", port=gateway.port)
        address = self._settings.address_path
        address.write_text(f"{self._settings.host} {gateway.port}\n", encoding="ascii")
        try:
            yield gateway
        finally:
            address.unlink(missing_ok=True)
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.shield(gateway.drain(self._settings.drain_s))

    def _keys(self) -> str | None:
        if not self._settings.auth:
            self._report.warning("auth_off", "authentication is off: whoever reaches the port can use the model")
            return None
        return read_or_make_key(self._settings.key_path)

    async def serve(self, gateway: Gateway) -> None:
        """Waits until the engine answers, then until it is given up. Raises the error of its ending then."""
        await self._until_loaded()
        self._on_ready()
        while True:
            served = self._serving.plan
            variant = served.cpu_variant if served else None
            try:
                await self._until_given_up(gateway)
            except FatalError as error:
                await self._serve_on(variant, error)

    async def _serve_on(self, variant: str | None, error: FatalError) -> None:
        """With the next CPU variant, in place of an engine that died of this one. Raises the error of any other
        ending."""
        while True:
            plan = await self._without(variant, error)
            self._say_instead(plan)
            self._report.phase(Phase.RESTARTING, error.message)
            await self._serving.leave()
            crash = await self._serving.load(plan)
            if crash is None:
                self._on_ready()
                return
            variant, error = plan.cpu_variant, self._engine.as_error(crash)

    async def _until_given_up(self, gateway: Gateway) -> None:
        """Raises the error of the engine's ending."""
        failing, *beside = await first_of(self._serving.wait_failed(), self._follow_state(), self._tend(gateway))
        if not failing.cancelled():
            crash = failing.result()
            served = self._serving.plan
            if crash.signal == signal.SIGILL and served is not None and served.cpu_variant is not None:
                self._report.error("engine_died", f"engine {crash.describe()}", log=list(crash.log[-20:]))
                message = f"the engine {crash.describe()}"
                raise CpuUnsupportedError(message, log=crash.log)
            raise self._engine.as_error(crash, served=True)
        for task in beside:
            if not task.cancelled():
                task.result()  # neither ever ends but by an error, which is the end of serving

    async def _until_loaded(self) -> None:
        """Steps down where memory runs out: it may have been taken since it was looked at, and not every plan was
        measured. Raises the error of the last ending."""
        space: Space | None = None
        steps = 0
        while True:
            supervisor, served = self._serving.supervisor, self._serving.plan
            crash = await supervisor.wait_ready() if supervisor else None
            if crash is None:
                return
            error = self._engine.as_error(crash)
            lines = self._logs.pop(supervisor, ()) if supervisor else ()
            if isinstance(error, CpuUnsupportedError | CpuBackendError):
                plan = await self._without(served.cpu_variant if served else None, error)
                space = None
                self._say_instead(plan)
            elif steps == STEPS_DOWN:
                raise error
            else:
                steps += 1
                space, plan = self._stepped_down(space, error, lines)
            await self._serving.leave()
            self.launch(plan)

    def _say_instead(self, plan: Plan) -> None:
        self._report.info("cpu_variant", f"serving with the CPU variant {plan.cpu_variant}", variant=plan.cpu_variant)

    def _stepped_down(self, space: Space | None, error: FatalError, lines: Iterable[str]) -> tuple[Space, Plan]:
        """What to serve in the memory that there was by the engine's log. Only for the load that comes: what is kept,
        shown or measured later goes by the real machine. `space` is that of the step before. Raises the error where
        nothing smaller may be served."""
        before, shortage = self._serving.plan, self._engine.shortage(error, lines)
        if before is None or shortage is None:
            raise error
        space = space or self._found.space(self._profile.verdicts if self._profile else ())
        less = space.after(before, shortage)
        if less is None:
            raise error
        try:
            plan = best_of(self._profile, self._settings.mode, less.space)
        except ModelDoesNotFitError:  # what the engine lacked says more
            plan = before
        if not less.is_smaller(plan, before):
            error.hint = f"{error.hint}; {self._why_not_smaller()}"
            raise error
        words = (
            f"the engine ran out of memory as it loaded: {less.missing_mib:,.0f} MiB too few on {less.where}; "
            f"serving {plan.key} instead of {before.key}"
        )
        windows = {"context_before": before.context, "context": plan.context}
        self._report.warning("stepped_down", words, where=less.where, missing_mib=round(less.missing_mib), **windows)
        return less.space, plan

    def _why_not_smaller(self) -> str:
        sources = self._settings.sources
        asked = [name for name in SIZED_BY if sources.get(name, "default") != "default"]
        if not asked:
            return "no smaller plan fits either"
        words = ", ".join(f"{name} '{getattr(self._settings, name)}' ({sources[name]})" for name in asked)
        return f"no smaller plan keeps what was asked for: {words}"

    def _on_ready(self) -> None:
        """The engine that serves answers: the first one, one that was restarted, or another that took its place."""
        supervisor = self._serving.supervisor
        lines = self._logs.get(supervisor) if supervisor else None
        self._allocated = self._engine.allocated(lines or ())
        if lines is not None:
            lines.clear()
        self._report.phase(Phase.READY)
        seconds = supervisor.ready_seconds if supervisor else None
        words = f"ready: the engine loaded in {seconds or 0.0:.1f} s and allocated {self._allocated.total:,.0f} MiB"
        self._report.info("ready", words, seconds=round(seconds or 0.0, 3), allocated_mib=asdict(self._allocated))

    async def _follow_state(self) -> None:
        """After a crash clients are told so until the next engine answers. An engine that is away on purpose is the
        idle tuner's business, who says so itself."""
        was_ready, before = True, self._serving.supervisor
        while True:
            supervisor = self._serving.supervisor
            is_ready = supervisor is not None and supervisor.state is State.READY
            crash = supervisor.crash if supervisor else None
            if supervisor is before and was_ready and not is_ready and crash is not None:
                self._report.phase(Phase.RESTARTING, crash.describe())
                self._report.error("engine_died", f"engine {crash.describe()}", log=list(crash.log[-20:]))
            if is_ready and (not was_ready or supervisor is not before):
                self._on_ready()
            was_ready, before = is_ready, supervisor
            await asyncio.sleep(0.05)

    async def _tend(self, gateway: Gateway) -> None:
        """Beside serving: measuring while nobody asks, if that is set and there is something to measure, and whether
        the profile still holds. Never returns. Raises FatalError when an engine does not come back."""
        while True:
            if self._settings.tune == "idle" and (self._wants_measuring() or await self._wants_more(self._profile)):
                await self._tune_idle(gateway)
            await self._watch_drift(gateway)
            if self._settings.tune != "idle" or not self._wants_measuring():
                await asyncio.Event().wait()

    def _wants_measuring(self) -> bool:
        return not (self._inputs.model.is_embedding_model or self._is_given_up) and self._needs_measuring(self._profile)

    def _needs_measuring(self, profile: Profile | None) -> bool:
        """To be measured, or measured anew."""
        if profile is None:
            return True
        if self._store.is_pinned(profile.key.id):
            return False
        # A machine that is always busy must not be measured again and again: once in a process, and at most twice.
        may_try_again = profile.disturbed_times < TRIES and not self._was_measured
        is_provisional = profile.disturbance is not None and may_try_again
        return is_provisional or self._store.why_stale(profile) is not None

    async def _wants_more(self, profile: Profile | None) -> bool:
        """Whether the mode that is set may want a context that no plan has which was measured for another mode."""
        if profile is None or self._settings.mode == profile.mode or self._store.is_pinned(profile.key.id):
            return False
        space = self._found.space(profile.verdicts)
        settings = self._settings
        return await asyncio.to_thread(wants_more, profile, settings.mode, space, budget_s=settings.budget_s)

    async def _tune_idle(self, gateway: Gateway) -> None:
        from appliance.idle.tuner import IdleTuner  # here: a start from a profile that holds never needs it

        self._tuner = tuner = IdleTuner(
            serving=self._serving,
            traffic=gateway.traffic,
            door=gateway.engine,
            report=self._report,
            measure=self._measure_idle,
            why_no_room=self._why_no_room,
            as_error=self._engine.as_error,
            idle_s=self._settings.idle_s,
        )
        if self._begins_now:
            tuner.begin_now()
        before, kernels = self._profile, self._inputs.kernels
        await tuner.run()
        self._tuner, self._begins_now = None, False
        # With other kernels everything is to be measured anew.
        has_same_kernels = self._inputs.kernels is kernels
        self._is_given_up = self._profile is before and has_same_kernels
        self._was_measured = not self._is_given_up and has_same_kernels
        self._drift_monitor = None

    def _measure_now(self) -> tuple[int, dict[str, Any]]:
        """Asked for by somebody who waits for the result. Raises Refusal where nothing will be measured."""
        state = self._tuning_state()
        if state in ("off", "failed"):
            from appliance.gateway.refusal import Refusal  # here: no start needs it

            raise Refusal(409, f"tuning_{state}", self._tuning_words(state))
        if state == "waiting":
            self._begins_now = True
            if self._tuner is not None:
                self._tuner.begin_now()
        return (200 if state == "measured" else 202), {"state": state, "message": self._tuning_words(state)}

    def _tuning_state(self) -> str:
        """off, waiting, measuring, measured or failed."""
        if self._report.progress.phase is Phase.TUNING:
            return "measuring"
        if self._is_given_up:
            return "failed"
        if self._tuner is not None:
            return "measuring" if self._tuner.is_busy else "waiting"
        if self._settings.tune == "idle" and self._wants_measuring():
            return "waiting"
        return "off" if self._profile is None else "measured"

    def _tuning_words(self, state: str) -> str:
        settings = self._settings
        if state != "off":
            return _TUNING[state]
        if self._inputs.model.is_embedding_model:
            return "nothing is measured: the model gives vectors, not text"
        if settings.tune == "off":
            return f"measuring is off: tune 'off' ({settings.sources.get('tune', 'default')})"
        return "another container on this volume measured meanwhile: its profile is used at the next start"

    def _tuning_document(self) -> dict[str, Any]:
        state = self._tuning_state()
        measured = [asdict(m) for m in self._measurements]
        return {"state": state, "message": self._tuning_words(state), "measurements": measured}

    async def _measure_idle(self, is_alone: bool) -> Plan | None:
        """None while another container measures for the same key: its profile is adopted later or by a next start."""
        with self._store.tuning(self._key) as is_ours:
            if not is_ours:
                return None
            found = self._store.load(self._key)
            if found is not None and self._needs_measuring(found):
                found = None  # it is measured anew
            if found is not None and not await self._wants_more(found):
                return self._use(found)
            beside = None if is_alone else await self._space_now()
            study = self._new_study(shows_phase=False, beside=beside)
            try:
                if found is not None:
                    return self._use(await study.widen(found))
                self._profile = await study.run()
            except FatalError as error:
                return await self._without(self._inputs.kernels.variant, error)
            return self._profile.plan

    async def _space_now(self) -> Space:
        """In the memory that is free beside the engine that serves."""
        hardware = await asyncio.to_thread(probe, self._settings.data_dir, self._environment)
        return self._found.on(hardware).space()

    async def _why_no_room(self, plan: Plan | None) -> str:
        """Whether the memory that is free now, beside the engine that serves, holds a second one."""
        wanted = plan or self._serving.plan
        if wanted is None:
            return "no plan serves"
        if plan is None and self._profile is not None and not self._needs_measuring(self._profile):
            return f"mode '{self._settings.mode}' may want a context that fits only in place of the engine that serves"
        try:
            found = (await self._space_now()).now(wanted)
        except FatalError as error:  # a device that is gone: no reason to end serving
            return error.message
        return found if isinstance(found, str) else ""

    async def _watch_drift(self, gateway: Gateway) -> None:
        """Until probes have shown whether the profile holds; it is said, and kept on the volume if not."""
        profile, plan = self._profile, self._serving.plan
        if profile is None or plan is None:
            return
        # Here: a start compares nothing before its engine serves.
        from appliance.drift_monitor import PROBE_AFTER_S, DriftMonitor
        from appliance.probe.watch import Watch

        self._drift_monitor = DriftMonitor(
            profile,
            plan,
            self._engine,
            self._command(plan, gateway.engine.socket_path),
            traffic=gateway.traffic,
            report=self._report,
            watch=partial(Watch, self.hardware, self._environment),
            after_s=min(PROBE_AFTER_S, self._settings.idle_s),
        )
        drift = await self._drift_monitor.run()
        if drift.note:
            self._report.info("profile_faster", f"profile {profile.key.id}: {drift.note}")
        if drift.state == "open":
            return
        if drift.state == "holds" and not (drift.note and profile.disturbance):
            self._report.info("profile_holds", f"profile {profile.key.id} is valid: {drift.words}")
            return
        then = {
            "first": "measured again at the next start on a quiet machine",
            "idle": "measured again while nobody asks",
        }
        # What was measured while something else was at work may be too slow as well: then another plan may be the best.
        why = drift.words if drift.state == "stale" else f"{drift.note}; {profile.disturbance} when it was measured"
        words = f"profile {profile.key.id} is stale: {why}; {then.get(self._settings.tune, 'kept')}"
        self._report.warning("profile_stale", words)
        try:
            await asyncio.to_thread(self._store.mark_stale, profile, why)
        except VolumeError as error:  # serving goes on; the next start finds out again
            self._report.warning("profile_not_marked", error.message)

    def _on_line(self, supervisor: Supervisor, lines: deque[str], line: str) -> None:
        if supervisor.state is State.STARTING:  # also beside another that serves
            lines.append(line)
        if self._engine.is_worth_showing(line):
            self._report.warning("engine", line[:1000])

    @property
    def _measurements(self) -> list[Measurement]:
        return self._study.measurements if self._study else []

    def _status(self) -> dict[str, Any]:
        progress, image, engine, plan = (
            self._report.progress,
            self._inputs.image,
            self._inputs.facts,
            self._serving.plan,
        )
        drift = self._drift_monitor.state if self._drift_monitor else None
        speeds = speeds_of(plan, self._profile)
        return {
            "phase": str(progress.phase),
            "message": progress.sentence(),
            "version": __version__,
            "cell": image.cell,
            "build_id": image.build_id,
            "engine": {"name": image.engine, "version": engine.version, "build": engine.build},
            "model": self._alias,
            "context": plan.context if plan else None,
            "chosen": in_short(plan) if plan else None,
            "mode": self._settings.mode,
            "speeds": speeds_document(plan, self._profile),
            "speed": speeds.in_words() if speeds else None,
            "predicted_speed": plan.speed.in_words() if plan and plan.speed else None,
            "tuning": self._tuning_state(),
            "memory_prediction_error": self._profile.prediction_error if self._profile else None,
            "from_profile": self._profile is not None and self._study is None,
            "profile_holds": str(drift) if drift else None,
            "standing": self._standing(),
            "engine_restarts": self._serving.restarts,
        }

    def _models(self) -> dict[str, Any]:
        """OpenAI's list, until the engine gives its own: the model is known before it is loaded."""
        model = {"id": self._alias, "object": "model", "created": self._began_s, "owned_by": "appliance"}
        return {"object": "list", "data": [{**model, "state": str(self._report.progress.phase)}]}

    @property
    def _alias(self) -> str:
        return self._settings.alias or plain_name(self._inputs.model.path)

    def _standing(self) -> dict[str, Any] | None:
        """As it is on the volume now: it may have been pinned since the start. None where no profile serves."""
        if self._profile is None:
            return None
        try:
            return self._store.status(self._profile).as_document()
        except VolumeError as error:  # serving goes on without its volume, and so does what is told of it
            return {"problem": error.message}

    def _profile_document(self) -> dict[str, Any]:
        if self._profile is None:
            return {}
        error = self._profile.prediction_error
        return {**asdict(self._profile), "key": {"id": self._profile.key.id, "parts": self._profile.key.parts}} | {
            "memory_prediction_error": error,
            "speeds": speeds_document(self._serving.plan, self._profile),
            "standing": self._standing(),
            "allocated_now": asdict(self._allocated) if self._allocated else None,
        }
