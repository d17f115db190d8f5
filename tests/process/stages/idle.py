"""A gateway, engines and an idle tuner in the test's own loop, as in `appliance serve`: engines are programs."""

from __future__ import annotations

import asyncio
import json
import shutil
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from io import StringIO
from pathlib import Path
from typing import Any

import openai

from appliance.command import Command
from appliance.console.progress import Phase
from appliance.console.report import Report
from appliance.engines.llama.api.routes import DROPPED_HEADERS, ROUTES
from appliance.engines.llama.process.endings import as_error
from appliance.errors import FatalError
from appliance.gateway.app import create_app
from appliance.gateway.clients.auth import Keys
from appliance.gateway.engine.backend import Backend
from appliance.gateway.server import Gateway
from appliance.serve.background.idle_tuner import IdleTuner
from appliance.serve.model.engine_host import EngineHost
from appliance.serve.model.tuning_state import TuningState
from appliance.supervisor import Restart, Supervisor
from tests.process.stages.gateway import KEY
from tests.process.stages.supervisor import fake_command

GRACE_S = 180.0  # of an engine that does not heed SIGTERM: nobody should wait so long
MESSAGES: Any = [{"role": "user", "content": "one two three"}]


@dataclass(frozen=True, kw_only=True)
class FakePlan:
    """A plan that is the fake engine's knobs. `why` is for people and does not reach the engine."""

    knobs: tuple[str, ...] = ()
    why: str = ""

    @property
    def name(self) -> str:
        return self.knobs[self.knobs.index("--alias") + 1]


def fake_plan(name: str, *knobs: str, why: str = "") -> FakePlan:
    return FakePlan(knobs=("--alias", name, *knobs), why=why)


@dataclass
class Measuring:
    """A fake measurement: its own engine ignores SIGTERM, and each call takes the next of `sittings`, in seconds.

    A sitting that ends is not repeated. The last one returns `result`, those before it None."""

    folder: Path
    sittings: list[float]
    result: FakePlan | None = None
    error: FatalError | None = None
    calls: list[bool] = field(default_factory=list)
    pids: list[int] = field(default_factory=list)
    ended_at: float = 0.0

    async def __call__(self, is_alone: bool) -> FakePlan | None:
        self.calls.append(is_alone)
        socket_path = self.folder / "measured.sock"
        command = replace(fake_command(socket_path, "--ignore-sigterm"), stop_grace_s=0.0)
        supervisor = Supervisor()
        supervisor.start(command)
        self.pids.append(supervisor.pid or 0)
        try:
            assert await supervisor.wait_ready() is None
            await asyncio.sleep(self.sittings[0])
            self.sittings.pop(0)
        finally:
            await supervisor.stop()
            self.ended_at = time.monotonic()
        if self.error is not None:
            raise self.error
        return None if self.sittings else self.result


@dataclass(kw_only=True)
class IdleStage:
    folder: Path
    report: Report
    host: EngineHost[FakePlan]
    gateway: Gateway
    log: StringIO
    tuning: TuningState = field(default_factory=TuningState)

    def tuner(
        self,
        measure: Callable[[bool], Awaitable[FakePlan | None]],
        *,
        why_no_room: str = "",
        idle_s: float = 0.2,
        settle_s: float = 0.05,
        **more: Any,
    ) -> IdleTuner[FakePlan]:
        """Return a tuner on this stage. `more` are further arguments of IdleTuner."""

        async def why(_: FakePlan | None) -> str:
            return why_no_room

        return IdleTuner(
            host=self.host,
            traffic=self.backend.traffic,
            upstream=self.backend.upstream,
            report=self.report,
            tuning=self.tuning,
            measure=measure,
            why_no_room=why,
            as_error=as_error,
            idle_s=idle_s,
            settle_s=settle_s,
            **more,
        )

    @property
    def backend(self) -> Backend:
        (found,) = self.gateway.backends
        return found

    def events(self, name: str = "") -> list[dict[str, Any]]:
        rows = [json.loads(line) for line in self.log.getvalue().splitlines()]
        return [row for row in rows if name in ("", row["event"])]

    def openai(self) -> openai.AsyncOpenAI:
        url = f"http://127.0.0.1:{self.gateway.port}/v1"
        return openai.AsyncOpenAI(base_url=url, api_key=KEY, max_retries=0, timeout=60)

    async def model(self) -> str:
        """The alias of the engine that answers."""
        async with self.openai() as client:
            return (await client.chat.completions.create(model="any", messages=MESSAGES)).model

    async def stream(self) -> tuple[str, str]:
        """Return the model's name and the text of a streamed chat."""
        async with self.openai() as client:
            events = await client.chat.completions.create(model="any", messages=MESSAGES, stream=True)
            models, text, reason = set(), "", None
            async for event in events:
                models.add(event.model)
                text += event.choices[0].delta.content or ""
                reason = event.choices[0].finish_reason
        assert len(models) == 1
        assert reason == "stop"
        return models.pop(), text

    def pid(self) -> int:
        assert self.host.supervisor is not None
        assert self.host.supervisor.pid is not None
        return self.host.supervisor.pid


@asynccontextmanager
async def idle_stage(
    first: FakePlan,
    *,
    restart: Restart | None = None,
    command: Callable[[FakePlan, Path], Command] | None = None,
    tell_every_s: float = 0.1,
) -> AsyncIterator[IdleStage]:
    folder = Path(tempfile.mkdtemp(prefix="id", dir="/tmp"))
    sockets = (folder / "a.sock", folder / "b.sock")
    log = StringIO()
    report = Report("json", log)
    host: EngineHost[FakePlan] = EngineHost(
        sockets=sockets,
        command=command or (lambda plan, path: fake_command(path, *plan.knobs, stop_grace_s=GRACE_S)),
        supervise=lambda _: Supervisor(restart=restart),
    )
    try:
        host.launch(first)
        assert host.supervisor is not None
        assert await host.supervisor.wait_ready() is None
        report.phase(Phase.READY)
        backend = Backend(
            name="any",
            socket_path=sockets[0],
            routes=ROUTES,
            dropped_headers=DROPPED_HEADERS,
            progress=lambda: report.progress,
            documents={},
        )
        app = create_app([backend], keys=Keys(frozenset({KEY})), tell_every_s=tell_every_s)
        gateway = await Gateway.open(app, "127.0.0.1", 0)
        try:
            yield IdleStage(folder=folder, report=report, host=host, gateway=gateway, log=log)
        finally:
            await gateway.drain(0.0)
    finally:
        await host.stop()
        shutil.rmtree(folder)


@asynccontextmanager
async def running(tuner: IdleTuner[FakePlan]) -> AsyncIterator[asyncio.Task[bool]]:
    """Run the tuner beside the block. Its error, if any, is raised at the end of the block."""
    task = asyncio.create_task(tuner.run())
    try:
        yield task
    finally:
        was_done = task.done()
        task.cancel()
        results = await asyncio.gather(task, return_exceptions=True)
    if was_done and isinstance(results[0], Exception):
        raise results[0]
