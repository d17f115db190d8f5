"""How everything stops."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from appliance.progress import Phase
from appliance.report import Report
from appliance.serve.served_model import ServedModel


@asynccontextmanager
async def stoppable(report: Report, *models: ServedModel) -> AsyncIterator[asyncio.Event]:
    """SIGTERM and SIGINT stop whatever is going on; every engine is gone when this ends, however it ends. The event
    is set once a signal asked for the end."""
    asked = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, asked.set)
    watcher = asyncio.create_task(_cancel_when_asked(asked, asyncio.current_task(), report))
    try:
        yield asked
    except asyncio.CancelledError:
        if not asked.is_set():
            raise
    finally:
        watcher.cancel()
        for served in models:
            served.report.phase(Phase.STOPPING)
            served.guard.give_up()
        stops = await asyncio.gather(*(served.host.stop() for served in models), return_exceptions=True)
        for failure in stops:
            if failure is not None:
                raise failure  # only now: each engine had its time to end
        report.info("stopped", "the engine is gone")


async def _cancel_when_asked(asked: asyncio.Event, main: asyncio.Task[Any] | None, report: Report) -> None:
    await asked.wait()
    report.info("stopping", "asked to stop")
    if main is not None:
        main.cancel()
