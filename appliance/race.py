"""Several things that are waited for at once, of which nothing is left running behind."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import Any


async def first_of(*waits: Awaitable[Any], timeout_s: float | None = None) -> tuple[asyncio.Future[Any], ...]:
    """Until one of them ends, with a result or an exception, or the time is up. The others are cancelled, and have
    ended when this returns, also when it is cancelled itself.

    Returns all in their order: the first that is not `cancelled()` ended by itself. `result()` of it raises what it
    raised; this raises nothing of theirs.
    """
    futures = tuple(asyncio.ensure_future(wait) for wait in waits)
    try:
        await asyncio.wait(futures, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for future in futures:
            future.cancel()
        await asyncio.gather(*futures, return_exceptions=True)
    return futures
