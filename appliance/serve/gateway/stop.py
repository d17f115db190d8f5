"""The order of a stop: the gateway drains, then the engines end."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Any

from appliance.console.progress import Phase
from appliance.console.report import Report
from appliance.serve.gateway.slot import ModelSlot
from appliance.system.detached import detached


@asynccontextmanager
async def stoppable(report: Report, slots: Sequence[ModelSlot]) -> AsyncIterator[asyncio.Event]:
    """Stop on SIGTERM and SIGINT. Every engine is gone when this ends, however it ends; slots may have come meanwhile.

    The event is set once a signal has asked for the end.
    """
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
        stops = await asyncio.gather(*(_stop(slot) for slot in slots), return_exceptions=True)
        failures = [failure for failure in stops if failure is not None]
        for failure in failures:  # only now: each engine had time to end
            report.error("not_stopped", f"an engine may be left: {type(failure).__name__}: {failure}")
        if failures and not is_failing:
            raise failures[0]  # a start that fails ends with its own error instead
        if not failures:
            report.info("stopped", "the engine is gone")


async def _stop(slot: ModelSlot) -> None:
    slot.report.phase(Phase.STOPPING)
    await stop_engine(slot)
    if slot.served is not None:
        with suppress(RuntimeError):  # no thread is left: what was measured last is measured again
            await detached(slot.served.finish_writing)


async def put_to_sleep(slot: ModelSlot) -> None:
    """Stop the slot's engine; `bring_up` may start another. A slot whose weights are not here becomes absent."""
    slot.pending = None
    slot.report.phase(Phase.ASLEEP)
    await stop_engine(slot)


async def stop_engine(slot: ModelSlot) -> None:
    """Stop the check of kernels and every engine of the slot."""
    if slot.served is None:
        return
    try:
        slot.served.guard.give_up()
        slot.served.meter.stop()
    finally:
        await slot.served.host.stop()


async def _cancel_when_asked(asked: asyncio.Event, main: asyncio.Task[Any] | None, report: Report) -> None:
    await asked.wait()
    report.info("stopping", "asked to stop")
    if main is not None:
        main.cancel()
