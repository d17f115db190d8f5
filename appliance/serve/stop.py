"""How everything stops."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

from appliance.console.progress import Phase
from appliance.console.report import Report
from appliance.serve.served_model import ServedModel

if TYPE_CHECKING:
    from appliance.serve.awaited import AwaitedModel


@asynccontextmanager
async def stoppable(report: Report, *models: ServedModel | AwaitedModel) -> AsyncIterator[asyncio.Event]:
    """SIGTERM and SIGINT stop whatever is going on; every engine is gone when this ends, however it ends. The event
    is set once a signal asked for the end."""
    asked = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, asked.set)
    watcher = asyncio.create_task(_cancel_when_asked(asked, asyncio.current_task(), report))
    is_failing = True
    try:
        yield asked
        is_failing = False
    except asyncio.CancelledError:
        is_failing = not asked.is_set()
        if is_failing:
            raise
    finally:
        watcher.cancel()
        stops = await asyncio.gather(*(_stop(model) for model in models), return_exceptions=True)
        failures = [failure for failure in stops if failure is not None]
        for failure in failures:  # only now: each engine had its time to end
            report.error("not_stopped", f"an engine may be left: {type(failure).__name__}: {failure}")
        if failures and not is_failing:
            raise failures[0]  # else the error to end with is what ended the start
        if not failures:
            report.info("stopped", "the engine is gone")


async def _stop(model: ServedModel | AwaitedModel) -> None:
    model.report.phase(Phase.STOPPING)
    served = model if isinstance(model, ServedModel) else model.served
    if served is None:
        return
    try:
        served.guard.give_up()
    finally:
        await served.host.stop()


async def _cancel_when_asked(asked: asyncio.Event, main: asyncio.Task[Any] | None, report: Report) -> None:
    await asked.wait()
    report.info("stopping", "asked to stop")
    if main is not None:
        main.cancel()
