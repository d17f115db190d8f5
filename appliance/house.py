"""What is alive during a start and after it: one engine, one gateway, and what they show of themselves."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections import deque
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from appliance import __version__
from appliance.command import Command
from appliance.engines.endings import as_error
from appliance.engines.llama_server import Allocated, command, is_worth_showing, parse_allocated
from appliance.errors import ConfigError
from appliance.gateway.progress import Phase
from appliance.image_facts import EngineFacts, ImageFacts
from appliance.model import Model
from appliance.plan import Plan, Space, as_document, explain_memory, in_short, refine
from appliance.probe import Hardware, count_oom_kills, gpu_uuids
from appliance.probe import as_document as hardware_document
from appliance.probe.holders import who_holds
from appliance.profile import Key, Picked, Profile, ProfileStore, pick
from appliance.profile.at_start import Act, Found, Start, at_start
from appliance.report import Report
from appliance.settings import Settings
from appliance.supervisor import Restart, State, Supervisor
from appliance.volume import read_or_make_key

if TYPE_CHECKING:
    from appliance.tune.measure import Step
    from appliance.tune.measurement import Measurement
    from appliance.tune.modes import Mode

REFINED = 12  # plans that the engine's own loader is asked about
LOG_LINES = 5000  # kept until readiness; buffer sizes are among the first few hundred


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """What a start knows before it starts anything."""

    image: ImageFacts
    engine: EngineFacts
    hardware: Hardware
    model: Model
    key: Key

    def space(self, settings: Settings) -> Space:
        """Raises ModelDoesNotFitError (31) with figures, ConfigError (10) for a setting that the engine cannot take."""
        return Space(settings, self.image, self.engine, self.hardware, self.model)


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
        self._image = found.image
        self._engine = found.engine
        self._key = found.key
        self._model = found.model
        self._space = found.space(settings)
        self._store = store
        self._report = report
        self._socket = settings.runtime_dir / f"appliance-{os.getpid()}.sock"  # short: 107 bytes is all a socket has
        self._lines: deque[str] = deque(maxlen=LOG_LINES)
        self._supervisor = Supervisor(restart=Restart(), on_line=self._on_line)
        self._plan: Plan | None = None
        self._profile: Profile | None = None
        self._allocated: Allocated | None = None
        self._measurements: list[Measurement] = []
        self._stop = asyncio.Event()
        self.hardware = found.hardware

    @property
    def was_stopped(self) -> bool:
        """Whether a signal asked for the end."""
        return self._stop.is_set()

    @property
    def has_engine(self) -> bool:
        return self._plan is not None

    def adopt(self) -> None:
        """Starts the engine at once when there is a profile that is not to be measured again."""
        profile = self._store.load(self._key)
        if profile is not None and (start := self._at_start(profile, may_measure=True)).act is Act.USE:
            self._say(start)
            self.launch(self._use(profile))

    def _at_start(self, profile: Profile | None, *, may_measure: bool) -> Start:
        found = None
        if profile is not None:
            id_ = profile.key.id
            found = Found(id=id_, stale=self._store.why_stale(profile), is_pinned=self._store.is_pinned(id_))
        return at_start(found, tune=self._settings.tune, may_measure=may_measure)

    def _say(self, start: Start) -> None:
        if start.words:
            (self._report.warning if start.is_warning else self._report.info)(start.event, start.words)

    def _use(self, profile: Profile) -> Plan:
        """The best of what was measured that fits the memory which is free now; the prediction where nothing does."""
        self._profile = profile
        if (build := profile.key.parts.get("build")) != self._image.build_id:
            words = f"profile {profile.key.id} is pinned: used although build: {build} -> {self._image.build_id}"
            self._report.info("profile_pinned", words, profile=profile.key.id)
        self._report.info("profile_used", f"profile {profile.key.id}: {profile.speed}", profile=profile.key.id)
        picked = pick(profile, self._settings.mode, self._space)
        lacking = picked.passed_over if isinstance(picked, Picked) else picked
        for words in lacking:
            self._report.warning("plan_passed_over", f"{words}; {who_holds(self.hardware)}")
        if isinstance(picked, Picked):
            if not picked.is_best or self._settings.mode != profile.mode:
                self._report.info("plan_picked", f"serving {picked.plan.key}: {picked.why}", mode=self._settings.mode)
            return picked.plan
        self._report.warning("plan_predicted", "nothing that was measured fits now: serving the prediction")
        return self._space.best

    def launch(self, chosen: Plan) -> None:
        """Spawns the engine at once; `serve` waits for it."""
        self._plan = chosen
        self._lines.clear()
        for choice in chosen.choices:
            if choice.is_refusal:
                self._report.warning("not_as_asked", f"{choice.name} is {choice.value}: {choice.reason}")
        self._report.phase(Phase.LOADING, Path(chosen.model_path).name)
        self._report.info("engine_start", f"starting the engine: {explain_memory(chosen)}", context=chosen.context)
        self._supervisor.start(self.command(chosen))

    def command(self, chosen: Plan) -> Command:
        return command(
            chosen,
            self._engine,
            engine_dir=self._settings.engine_dir,
            socket_path=self._socket,
            cache_dir=self._cache_dir,
            stall_timeout_s=self._settings.stall_timeout_s,
            oom_kills=count_oom_kills,
        )

    @property
    def _cache_dir(self) -> Path:
        return self._settings.data_dir / "cache" / self._image.build_id

    async def decide(self) -> Plan:
        """Measures, unless told not to, or while another container does for the same key: nobody waits for it."""
        profile = self._store.load(self._key)
        if profile is None and (changed := self._store.why_unused(self._key, self._model.path.name)):
            self._report.info("profile_unused", f"no profile for this start; since the last one changed: {changed}")
        if self._model.is_embedding_model and self._settings.tune != "off":
            self._report.info("tune_off", "the model gives vectors, not text: serving the prediction")
            return self._space.best
        with self._store.tuning(self._key) as is_ours:
            profile = self._store.load(self._key)
            start = self._at_start(profile, may_measure=is_ours)
            self._say(start)
            if start.act is Act.MEASURE:
                return (await self.tune()).plan
        return self._space.best if profile is None else self._use(profile)

    async def tune_alone(self) -> Profile:
        """Raises ConfigError while another container measures for the same key: two would spoil each other's."""
        with self._store.tuning(self._key) as is_ours:
            if not is_ours:
                message = "another container on this volume is measuring for the same key"
                raise ConfigError(message, hint="wait for it; its profile will serve both")
            return await self.tune()

    async def tune(self) -> Profile:
        # Here: a start from a profile never needs them.
        from appliance.probe.watch import Watch
        from appliance.tune.tuner import Goal, Tuner, speed_in_words
        from appliance.tune.workload import parse_mix

        settings = self._settings
        self._report.phase(Phase.TUNING, "starting")
        plans = await self._refined(await asyncio.to_thread(self._space.all))
        kept = self._store.kept(self._key)
        self._measurements = list(kept)
        words = f"measuring the most promising of {len(plans):,} plans within {settings.budget_s:g} s"
        if kept:
            words += f"; {len(kept)} measurements are there from a start that was interrupted"
        self._report.info("tune_start", words)
        tuner = Tuner(
            self._space,
            plans,
            self.command,
            Goal(mix=parse_mix(settings.workload), mode=cast("Mode", settings.mode), native=self._space.native),
            budget_s=settings.budget_s,
            tell=self._on_step,
            done=self._on_measured,
            watch=lambda: Watch(self.hardware, self._environment),
            kept=kept,
        )
        tuned = await tuner.run()
        self._profile = Profile(
            key=self._key,
            plan=tuned.plan,
            plans=tuned.plans,
            like=tuned.like,
            measurements=tuned.measurements,
            mode=settings.mode,
            workload=settings.workload,
            native=self._space.native,
            job_s=tuned.job_s,
            speed=speed_in_words(tuned),
            seconds=tuned.seconds,
            stopped_by=tuned.stopped_by,
            created=datetime.now(UTC).isoformat(timespec="seconds"),
            allocated=tuned.allocated,
            disturbance=tuned.disturbance,
            gpu_uuids=gpu_uuids(self.hardware),
        )
        self._keep(self._profile)
        return self._profile

    def _keep(self, profile: Profile) -> None:
        is_kept = self._store.save(profile)
        pinned = self._store.pinned(self._key)
        if pinned is not None:
            words = f"profile {pinned.key.id} is pinned and stays the one used; `appliance profiles unpin` ends that"
            self._report.warning("profile_pinned", words, profile=pinned.key.id)
        if profile.disturbance:
            stays = "" if is_kept else ", and the profile that is there stays"
            words = (
                f"something else was at work while this was measured: {profile.disturbance}; it is provisional{stays}"
            )
            self._report.warning("provisional", words)
        words = f"chose {profile.plan.key} in {profile.seconds:.0f} s: {profile.speed}; stopped: {profile.stopped_by}"
        self._report.info("tuned", words, profile=profile.key.id, stopped_by=profile.stopped_by)

    async def _refined(self, plans: Sequence[Plan]) -> Sequence[Plan]:
        """The most promising ones as the engine's own loader reckons them, where they use GPUs: on a CPU its log tells
        the same."""
        if not plans[0].placement.shares:
            return plans
        from appliance.engines.llama_fit import query_projections  # here, since a start from a profile never needs it

        first = sorted(plans, key=lambda plan: plan.speed.job_s if plan.speed else 0.0)[:REFINED]
        projections = await asyncio.to_thread(
            query_projections,
            self._settings.engine_dir,
            first,
            self._engine,
            cache_dir=self._cache_dir,
            budget_s=self._settings.budget_s / 10,
        )
        refined = {plan.key: plan for plan in refine(first, projections)}
        answered = sum(found is not None for found in projections)
        words = f"the engine's loader reckoned {answered} of {len(first)} plans: {len(refined)} fit by its figures"
        self._report.info("plans_refined", words)
        dropped = {plan.key for plan in first} - set(refined)
        return [refined.get(plan.key, plan) for plan in plans if plan.key not in dropped] or plans

    def _on_step(self, step: Step) -> None:
        words = f"{step.plan.key}: {step.what}"
        self._report.phase(Phase.TUNING, words)
        self._report.info("tune_step", words)

    def _on_measured(self, measurement: Measurement) -> None:
        self._measurements.append(measurement)
        self._store.keep(self._key, self._measurements)
        if measurement.error:
            self._report.warning("tune_failed", measurement.in_words())
            return
        self._report.info("tune_measured", measurement.in_words(), points=[asdict(p) for p in measurement.points])

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
            await self._supervisor.stop()
            self._report.info("stopped", "the engine is gone")

    async def _cancel_when_stopped(self, story: asyncio.Task[Any] | None) -> None:
        await self._stop.wait()
        self._report.info("stopping", "asked to stop")
        if story is not None:
            story.cancel()

    @asynccontextmanager
    async def open_gateway(self) -> AsyncIterator[None]:
        """Listens at once: clients are told what a start is doing. Drains before the engine is stopped."""
        keys = self._keys()
        # Here: FastAPI, uvicorn and aiohttp take half a second, and above they would delay the engine's start by it.
        from appliance.gateway.app import create_app
        from appliance.gateway.auth import Keys
        from appliance.gateway.server import Gateway

        app = create_app(
            socket_path=self._socket,
            keys=Keys(frozenset({keys})) if keys else None,
            progress=lambda: self._report.progress,
            documents={
                "status": self._status,
                "hardware": lambda: hardware_document(self.hardware),
                "plan": lambda: as_document(self._plan) if self._plan else {},
                "profile": self._profile_document,
                "tuning": lambda: {"measurements": [asdict(m) for m in self._measurements]},
            },
            engine_restarts=lambda: self._supervisor.restarts,
        )
        gateway = await Gateway.open(app, self._settings.host, self._settings.port)
        self._report.info("listening", f"listening on {self._settings.host}:{gateway.port}", port=gateway.port)
        address = self._settings.address_path
        address.write_text(f"{self._settings.host} {gateway.port}\n", encoding="ascii")
        try:
            yield
        finally:
            address.unlink(missing_ok=True)
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.shield(gateway.drain(self._settings.drain_s))

    def _keys(self) -> str | None:
        if not self._settings.auth:
            self._report.warning("auth_off", "authentication is off: whoever reaches the port can use the model")
            return None
        return read_or_make_key(self._settings.key_path)

    async def serve(self) -> None:
        """Waits until the engine answers, then until it is given up. Raises the error of its ending then."""
        crash = await self._supervisor.wait_ready()
        if crash is not None:
            raise as_error(crash)
        self._on_ready()
        watcher = asyncio.create_task(self._follow_state())
        try:
            raise as_error(await self._supervisor.wait_failed(), served=True)
        finally:
            watcher.cancel()

    def _on_ready(self) -> None:
        self._allocated = parse_allocated(self._lines)
        self._lines.clear()
        self._report.phase(Phase.READY)
        seconds = self._supervisor.ready_seconds or 0.0
        words = f"ready: the engine loaded in {seconds:.1f} s and allocated {self._allocated.total:,.0f} MiB"
        self._report.info("ready", words, seconds=round(seconds, 3), allocated_mib=asdict(self._allocated))

    async def _follow_state(self) -> None:
        """After a crash clients are told so until the next engine answers."""
        was_ready = True
        while True:
            is_ready = self._supervisor.state is State.READY
            if was_ready and not is_ready and (crash := self._supervisor.crash) is not None:
                self._report.phase(Phase.RESTARTING, crash.describe())
                self._report.error("engine_died", f"engine {crash.describe()}", log=list(crash.log[-20:]))
            if is_ready and not was_ready:
                self._on_ready()
            was_ready = is_ready
            await asyncio.sleep(0.05)

    def _on_line(self, line: str) -> None:
        if self._report.progress.phase is not Phase.READY:
            self._lines.append(line)
        if is_worth_showing(line):
            self._report.warning("engine", line[:1000])

    def _status(self) -> dict[str, Any]:
        progress = self._report.progress
        return {
            "phase": str(progress.phase),
            "message": progress.sentence(),
            "version": __version__,
            "cell": self._image.cell,
            "build_id": self._image.build_id,
            "engine": {"name": self._image.engine, "version": self._engine.version, "build": self._engine.build},
            "model": self._plan.alias if self._plan else None,
            "context": self._plan.context if self._plan else None,
            "chosen": in_short(self._plan) if self._plan else None,
            "speed": self._profile.speed if self._profile else None,
            "memory_prediction_error": self._profile.prediction_error if self._profile else None,
            "from_profile": self._profile is not None and not self._measurements,
            "engine_restarts": self._supervisor.restarts,
        }

    def _profile_document(self) -> dict[str, Any]:
        if self._profile is None:
            return {}
        error = self._profile.prediction_error
        return {**asdict(self._profile), "key": {"id": self._profile.key.id, "parts": self._profile.key.parts}} | {
            "memory_prediction_error": error,
            "allocated_now": asdict(self._allocated) if self._allocated else None,
        }
