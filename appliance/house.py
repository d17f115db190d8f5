"""What is alive during a start and after it: one engine, one gateway, and what they show of themselves."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections import deque
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from appliance import __version__
from appliance.command import Command
from appliance.engines.endings import as_error
from appliance.engines.llama_server import Allocated, command, is_worth_showing, parse_allocated
from appliance.gateway.progress import Phase
from appliance.image_facts import EngineFacts, ImageFacts
from appliance.plan import Plan, as_document, as_measured, explain_memory, in_short, nearest, refine
from appliance.probe import Hardware, count_oom_kills, gpu_uuids
from appliance.probe import as_document as hardware_document
from appliance.profile import Key, Profile, ProfileStore
from appliance.profile.at_start import Act, Found, Start, at_start
from appliance.report import Report
from appliance.settings import Settings
from appliance.supervisor import Restart, State, Supervisor
from appliance.volume import read_or_make_key

if TYPE_CHECKING:
    from appliance.tune.measure import Step
    from appliance.tune.search import Measurement

LOG_LINES = 5000  # kept until readiness; buffer sizes are among the first few hundred


class House:
    """Made inside the running loop. The order of its verbs is `boot`'s business."""

    def __init__(
        self, settings: Settings, image: ImageFacts, engine: EngineFacts, hardware: Hardware, report: Report
    ) -> None:
        self._settings = settings
        self._image = image
        self._engine = engine
        self._hardware = hardware
        self._report = report
        self._socket = settings.runtime_dir / f"appliance-{os.getpid()}.sock"  # short: 107 bytes is all a socket has
        self._lines: deque[str] = deque(maxlen=LOG_LINES)
        self._supervisor = Supervisor(restart=Restart(), on_line=self._on_line)
        self._plan: Plan | None = None
        self._profile: Profile | None = None
        self._allocated: Allocated | None = None
        self._measurements: list[Measurement] = []
        self._stop = asyncio.Event()

    @property
    def was_stopped(self) -> bool:
        """Whether a signal asked for the end."""
        return self._stop.is_set()

    @property
    def has_engine(self) -> bool:
        return self._plan is not None

    def adopt(self, profile: Profile | None, plans: Sequence[Plan], store: ProfileStore) -> None:
        """Starts the engine at once when there is a profile that is not to be measured again."""
        if profile is not None and (start := self._at_start(profile, store, may_measure=True)).act is Act.USE:
            self._say(start)
            self.launch(self._use(profile, plans))

    def _at_start(self, profile: Profile | None, store: ProfileStore, *, may_measure: bool) -> Start:
        found = None
        if profile is not None:
            id_ = profile.key.id
            found = Found(id=id_, stale=store.why_stale(profile), is_pinned=store.is_pinned(id_))
        # Until somebody measures while nobody asks, `idle` measures first, as it did.
        tune = "off" if self._settings.tune == "off" else "first"
        return at_start(found, tune=tune, may_measure=may_measure)

    def _say(self, start: Start) -> None:
        if start.words:
            (self._report.warning if start.is_warning else self._report.info)(start.event, start.words)

    def _use(self, profile: Profile, plans: Sequence[Plan]) -> Plan:
        """What was measured, within what this start plans: the memory that is free may be another by now."""
        self._profile = profile
        chosen = as_measured(nearest(plans, profile.plan), profile.plan)
        if (build := profile.key.parts.get("build")) != self._image.build_id:
            words = f"profile {profile.key.id} is pinned: used although build: {build} -> {self._image.build_id}"
            self._report.info("profile_pinned", words, profile=profile.key.id)
        self._report.info("profile_used", f"profile {profile.key.id}: {profile.speed}", profile=profile.key.id)
        if (chosen.context, chosen.kv_type) != (profile.plan.context, profile.plan.kv_type):
            then = f"{profile.plan.context:,} tokens at {profile.plan.kv_type}"
            words = f"memory carries {chosen.context:,} tokens at {chosen.kv_type} now, {then} when it was measured"
            self._report.info("window_changed", words, context=chosen.context, kv_type=chosen.kv_type)
        return chosen

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

    async def decide(self, plans: Sequence[Plan], key: Key, store: ProfileStore) -> Plan:
        """Measures, unless told not to, or while another container does for the same key: nobody waits for it."""
        profile = store.load(key)
        if profile is None and (changed := store.why_unused(key, Path(plans[0].model_path).name)):
            self._report.info("profile_unused", f"no profile for this start; since the last one changed: {changed}")
        if plans[0].is_embedding and self._settings.tune != "off":
            self._report.info("tune_off", "the model gives vectors, not text: serving the prediction")
            return plans[0]
        with store.tuning(key) as is_ours:
            profile = store.load(key)
            start = self._at_start(profile, store, may_measure=is_ours)
            self._say(start)
            if start.act is Act.MEASURE:
                return (await self.tune(plans, key, store)).plan
        return plans[0] if profile is None else self._use(profile, plans)

    async def tune(self, plans: Sequence[Plan], key: Key, store: ProfileStore) -> Profile:
        from appliance.tune.search import job_s
        from appliance.tune.tuner import speed_in_words, tune  # here, since a start from a profile never needs it

        self._report.phase(Phase.TUNING, "starting")
        plans = await self._refined(plans)
        self._report.info("tune_start", f"measuring up to {len(plans)} plans within {self._settings.budget_s:g} s")
        tuned = await tune(
            plans, self.command, budget_s=self._settings.budget_s, tell=self._on_step, done=self._on_measured
        )
        speed = speed_in_words(tuned)
        self._profile = Profile(
            key=key,
            plan=tuned.plan,
            measurements=tuned.measurements,
            job_s=job_s(tuned.chosen, tuned.workload),
            workload=tuned.workload.name,
            speed=speed,
            seconds=tuned.seconds,
            stopped_by=tuned.stopped_by,
            created=datetime.now(UTC).isoformat(timespec="seconds"),
            allocated=tuned.chosen.allocated,
            gpu_uuids=gpu_uuids(self._hardware),
        )
        is_kept = store.save(self._profile)
        pinned = store.pinned(key)
        if not is_kept or pinned is not None:
            which = pinned.key.id if pinned else key.id
            words = f"profile {which} is pinned and stays the one that is used; `appliance profiles unpin` ends that"
            self._report.warning("profile_pinned", words, profile=which)
        words = f"chose {in_short(tuned.plan)} in {tuned.seconds:.0f} s: {speed}"
        self._report.info("tuned", words, profile=key.id, stopped_by=tuned.stopped_by)
        return self._profile

    async def _refined(self, plans: Sequence[Plan]) -> Sequence[Plan]:
        """The plans as the engine's own loader reckons them, where they use GPUs: on a CPU its log tells the same."""
        if not plans[0].placement.shares:
            return plans
        from appliance.engines.llama_fit import query_projections  # here, since a start from a profile never needs it

        projections = await asyncio.to_thread(
            query_projections,
            self._settings.engine_dir,
            plans,
            self._engine,
            cache_dir=self._cache_dir,
            budget_s=self._settings.budget_s / 10,
        )
        refined = refine(plans, projections)
        answered = sum(found is not None for found in projections)
        words = f"the engine's loader reckoned {answered} of {len(plans)} plans: {len(refined)} fit by its figures"
        self._report.info("plans_refined", words)
        return refined or plans

    def _on_step(self, step: Step) -> None:
        words = f"{in_short(step.plan)}: {step.what}"
        self._report.phase(Phase.TUNING, words)
        self._report.info("tune_step", words)

    def _on_measured(self, measurement: Measurement) -> None:
        self._measurements.append(measurement)
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
                "hardware": lambda: hardware_document(self._hardware),
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
