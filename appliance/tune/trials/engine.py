"""An engine that is up for as long as something is measured on it, and what is asked of it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from appliance.command import Command
from appliance.engines.engine import ChunkSpec, Engine, Install, TextReader
from appliance.errors import EngineNotReadyError, FatalError
from appliance.plan import Plan
from appliance.race import first_of
from appliance.supervisor import Supervisor

T = TypeVar("T")
DEATH_S = 1.0  # a dying engine closes its connections a moment before its exit is seen


@dataclass(frozen=True, kw_only=True)
class Bench:
    """What plans are measured with: the engine's server on a socket of its own, and the engine's other programs."""

    engine: Engine
    install: Install
    socket_path: Path

    def start(self, plan: Plan) -> Command:
        """Killed when it is no longer needed: it has served nobody, and somebody may be waiting."""
        return replace(self.engine.command(plan, self.install, self.socket_path), stop_grace_s=0.0)

    def reader(self, plan: Plan, chunk_spec: ChunkSpec, text: Path) -> TextReader:
        return self.engine.text_reader(plan, self.install, chunk_spec, text)


@asynccontextmanager
async def running(
    engine: Engine, command: Command, *, on_line: Callable[[str], None] | None = None
) -> AsyncIterator[Supervisor]:
    """Ready inside of the block, and gone after it. Raises the engine's error when it fails on the way: a broken
    connection is told as what the engine ended with."""
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
    """Return what the work returns. A slow machine is no broken one: the engine has to work at all, and to end within
    `most_s`, which a spinning one does not. Raises EngineNotReadyError."""
    working, stalled = await first_of(work, supervisor.wait_stalled(timeout_s), timeout_s=most_s)
    if working.cancelled():
        message = (
            f"engine did not end within {most_s:g} s while {doing}"
            if stalled.cancelled()
            else f"engine made no progress for {timeout_s:g} s while {doing}"
        )
        raise EngineNotReadyError(message, hint="its last lines are above", log=supervisor.log_tail)
    result: T = working.result()
    return result


async def in_time(seconds: float, work: Coroutine[Any, Any, T]) -> T | None:
    """None when the time is up before it has ended; a TimeoutError of its own is raised."""
    limit = asyncio.timeout(seconds)
    try:
        async with limit:
            return await work
    except TimeoutError:
        if not limit.expired():
            raise
        return None


async def _cause(engine: Engine, supervisor: Supervisor, seen: FatalError) -> FatalError:
    """Why the engine ended, if it did: a broken connection says nothing of it. Else what was seen."""
    try:
        async with asyncio.timeout(DEATH_S):
            return engine.as_error(await supervisor.wait_failed())
    except TimeoutError:
        return seen
