"""An engine that is up for as long as something is measured on it, and what is asked of it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any, TypeVar

import aiohttp

from appliance.command import Command
from appliance.engines.llama.endings import as_error
from appliance.errors import EngineNotReadyError, FatalError
from appliance.supervisor import Supervisor

T = TypeVar("T")
DEATH_S = 1.0  # a dying engine closes its connections a moment before its exit is seen


@asynccontextmanager
async def running(command: Command, *, on_line: Callable[[str], None] | None = None) -> AsyncIterator[Supervisor]:
    """Ready inside of the block, and gone after it. Raises what `as_error` makes of it when it fails on the way: a
    broken connection is told as what the engine ended with."""
    supervisor = Supervisor(on_line=on_line)
    try:
        supervisor.start(command)
        if (crash := await supervisor.wait_ready()) is not None:
            raise as_error(crash)
        try:
            yield supervisor
        except EngineNotReadyError as error:
            raise await _cause(supervisor, error) from error
    finally:
        await supervisor.stop()


async def unless_stalled(
    work: Coroutine[Any, Any, T], supervisor: Supervisor, timeout_s: float, *, doing: str = "it was measured"
) -> T:
    """No fixed limit, since a slow machine is no broken one: what counts is that the engine works at all."""
    working = asyncio.create_task(work)
    stalling = asyncio.create_task(supervisor.wait_stalled(timeout_s))
    try:
        await asyncio.wait((working, stalling), return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        message = f"engine made no progress for {timeout_s:g} s while {doing}"
        raise EngineNotReadyError(message, hint="its last lines are above", log=supervisor.log_tail)
    finally:
        for task in (working, stalling):
            task.cancel()
        await asyncio.gather(working, stalling, return_exceptions=True)


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


def session_with(command: Command) -> aiohttp.ClientSession:
    """On the engine's socket, for any number of requests at once, however long they take."""
    connector = aiohttp.UnixConnector(path=str(command.socket_path), limit=0)
    return aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=None))


async def post(
    session: aiohttp.ClientSession, route: str, body: dict[str, Any], *, doing: str = "measuring"
) -> dict[str, Any]:
    """The engine's answer; EngineNotReadyError when it refuses or breaks off."""
    try:
        async with session.post(f"http://engine{route}", json=body) as reply:
            data = await reply.json()
            if reply.status != 200:
                message = f"engine refused {route} while {doing}: {reply.status}: {data}"
                raise EngineNotReadyError(message)
    except (aiohttp.ClientError, ValueError) as error:
        message = f"engine broke off {route} while {doing}: {type(error).__name__}: {error}"
        raise EngineNotReadyError(message) from error
    return dict(data)


async def _cause(supervisor: Supervisor, seen: FatalError) -> FatalError:
    """Why the engine ended, if it did: a broken connection says nothing of it. Else what was seen."""
    try:
        async with asyncio.timeout(DEATH_S):
            return as_error(await supervisor.wait_failed())
    except TimeoutError:
        return seen
