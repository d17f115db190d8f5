"""Engine that runs while something is measured on it, with supervision and time limits."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from appliance.command import Command
from appliance.engines.engine import ChunkSpec, Engine, Install, TextReader
from appliance.errors import EngineNotReadyError, FatalError
from appliance.plan import Allocated, Plan
from appliance.race import first_of
from appliance.supervisor import Supervisor

T = TypeVar("T")
DEATH_S = 1.0  # wait for an exit after a broken connection: a dying engine closes its connections first


@dataclass(frozen=True, kw_only=True)
class ServingEngine:
    """Engine that serves clients, without speculative decoding. `load_s` is the duration of its own start."""

    plan: Plan
    command: Command
    supervisor: Supervisor
    load_s: float
    allocated: Allocated | None


@dataclass(frozen=True, kw_only=True)
class Opened:
    """Engine that a plan is measured on. `serves` is True for the engine that serves; `allocated` is then known."""

    supervisor: Supervisor
    command: Command
    load_s: float
    serves: bool = False
    allocated: Allocated | None = None


@dataclass(frozen=True, kw_only=True)
class Bench:
    """Tools for measuring plans: the engine's server on a socket of its own, and the engine's other programs.

    `serving` is the engine that serves clients, on which its own plan is measured without a load; None: every plan is
    loaded. `on_load` is called before each load.
    """

    engine: Engine
    install: Install
    socket_path: Path
    serving: ServingEngine | None = None
    on_load: Callable[[], None] = lambda: None

    def start(self, plan: Plan) -> Command:
        """Return the command that starts the plan. At its end the engine is killed without a grace period: it has no
        clients, and a user may be waiting."""
        self.on_load()
        return replace(self.engine.command(plan, self.install, self.socket_path), stop_grace_s=0.0)

    @asynccontextmanager
    async def opened(self, plan: Plan, *, on_line: Callable[[str], None] | None = None) -> AsyncIterator[Opened]:
        """Provide a ready engine with this plan: the one that serves if it has the plan, else one that is loaded for
        the block. Raises the engine's error if it fails."""
        serving = self.serving
        if serving is not None and serving.plan.key == plan.key and plan.speculation is None:
            yield Opened(
                supervisor=serving.supervisor,
                command=serving.command,
                load_s=serving.load_s,
                serves=True,
                allocated=serving.allocated,
            )
            return
        began = asyncio.get_running_loop().time()
        command = self.start(plan)
        async with running(self.engine, command, on_line=on_line) as supervisor:
            load_s = asyncio.get_running_loop().time() - began
            yield Opened(supervisor=supervisor, command=command, load_s=load_s)

    def reader(self, plan: Plan, chunk_spec: ChunkSpec, text: Path) -> TextReader:
        return self.engine.text_reader(plan, self.install, chunk_spec, text)


@asynccontextmanager
async def running(
    engine: Engine, command: Command, *, on_line: Callable[[str], None] | None = None
) -> AsyncIterator[Supervisor]:
    """Run an engine: it is ready inside the block and stopped after it. Raises the engine's error if it fails. If a
    connection breaks, the error is that of the engine's end."""
    supervisor = Supervisor(on_line=on_line)
    try:
        supervisor.start(command)
        if (crash := await supervisor.wait_ready()) is not None:
            raise engine.as_error(crash)
        try:
            yield supervisor
        except EngineNotReadyError as error:
            raise await _cause(engine, supervisor, error) from error
    finally:
        await supervisor.stop()


async def unless_stalled(
    work: Coroutine[Any, Any, T],
    supervisor: Supervisor,
    timeout_s: float,
    *,
    doing: str = "it was measured",
    most_s: float | None = None,
) -> T:
    """Return the result of `work`. Raises EngineNotReadyError if the engine makes no progress for `timeout_s`, or if
    the work takes longer than `most_s`, which an engine in an endless loop does. A slow engine is not an error."""
    working, stalled = await first_of(work, supervisor.wait_stalled(timeout_s), timeout_s=most_s)
    if working.cancelled():
        message = (
            f"engine did not end within {most_s:g} s while {doing}"
            if stalled.cancelled()
            else f"engine made no progress for {timeout_s:g} s while {doing}"
        )
        raise EngineNotReadyError(message, hint="the log has its last lines", log=supervisor.log_tail)
    result: T = working.result()
    return result


async def in_time(seconds: float, work: Coroutine[Any, Any, T]) -> T | None:
    """Return the result of `work`, or None if the time was up first; infinite `seconds` are no limit. A TimeoutError of
    the work itself is raised."""
    limit = asyncio.timeout(seconds if seconds < math.inf else None)
    try:
        async with limit:
            return await work
    except TimeoutError:
        if not limit.expired():
            raise
        return None


async def _cause(engine: Engine, supervisor: Supervisor, seen: FatalError) -> FatalError:
    """Return the error of the engine's end if it ended, else `seen`: a broken connection alone does not tell the
    cause."""
    try:
        async with asyncio.timeout(DEATH_S):
            return engine.as_error(await supervisor.wait_failed())
    except TimeoutError:
        return seen
