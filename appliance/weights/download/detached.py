"""Run a blocking call that a stop need not wait for."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any, TypeVar

T = TypeVar("T")


async def detached(call: Callable[[], T]) -> T:
    """Return the call's result. On cancellation this returns at once; the thread ends by itself, and the process
    does not wait for it.

    Only for calls without side effects, such as a query to a server.
    """
    loop = asyncio.get_running_loop()
    done: asyncio.Future[T] = loop.create_future()

    def run() -> None:
        try:
            result = call()
        except Exception as error:
            tell(done.set_exception, error)
        else:
            tell(done.set_result, result)

    def tell(set_ending: Callable[[Any], None], value: object) -> None:
        with suppress(RuntimeError):  # the loop has ended, so nothing waits for the result
            loop.call_soon_threadsafe(lambda: None if done.done() else set_ending(value))

    threading.Thread(target=run, name="detached", daemon=True).start()
    return await done
