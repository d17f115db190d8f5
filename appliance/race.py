"""Waiting for several things at once without leaving a task behind."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import Any


async def first_of(*waits: Awaitable[Any], timeout_s: float | None = None) -> tuple[asyncio.Future[Any], ...]:
    """Wait until one of `waits` ends with a result or an exception, or until `timeout_s` has passed. Cancel the others
    and wait for their end, also if this call is cancelled.

    Returns the futures of all, in their order: the first that is not `cancelled()` ended by itself. Raises none of
    their exceptions; `result()` of a future does.
    """
    futures = tuple(asyncio.ensure_future(wait) for wait in waits)
    try:
        await asyncio.wait(futures, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for future in futures:
            future.cancel()
        await asyncio.gather(*futures, return_exceptions=True)
    return futures


async def all_of(*waits: Awaitable[Any]) -> None:
    """Wait until all of `waits` have ended. Raises the exception of the first that fails; the others are cancelled and
    their end is waited for, also if this call is cancelled."""
    futures = tuple(asyncio.ensure_future(wait) for wait in waits)
    try:
        await asyncio.wait(futures, return_when=asyncio.FIRST_EXCEPTION)
    finally:
        left = [future for future in futures if not future.done()]
        for future in left:
            future.cancel()
        await asyncio.gather(*left, return_exceptions=True)
    for future in futures:
        if not future.cancelled():
            future.result()
