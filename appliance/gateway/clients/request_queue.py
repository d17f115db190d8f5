"""A request that came while the engine is away for a moment: it waits, and whoever asked for a stream is told why."""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections.abc import Awaitable, Callable

from appliance.console.progress import Progress
from appliance.gateway.clients.traffic import Traffic
from appliance.gateway.wire import api_error

TELL_EVERY_S = 5.0  # proxies and clients give up on silence after 30 s at the earliest
CHECK_EVERY_S = 0.05  # a phase is looked at, not awaited: what is waited for takes seconds
_STREAM = re.compile(rb'"stream"\s*:\s*true')

Tell = Callable[[str], Awaitable[None]]


async def until_back(
    progress: Callable[[], Progress], traffic: Traffic, tell: Tell | None, *, every_s: float = TELL_EVERY_S
) -> None:
    """Returns once the engine serves. Raises ApiError when it will not: it failed, or the appliance stops."""
    tell_at = 0.0
    while (now := progress()).is_held:
        if traffic.is_closed:
            # Not after the grace of a stop: nobody goes on loading the engine then.
            raise api_error.shutting_down()
        if tell is not None and time.monotonic() >= tell_at:
            await tell(now.sentence())
            tell_at = time.monotonic() + every_s
        await asyncio.sleep(CHECK_EVERY_S)
    if not now.is_ready:
        raise api_error.not_ready(now)


def asks_for_stream(body: bytes) -> bool:
    """Whether the engine will answer with a stream, by its own rule: `stream` is true, and neither 1 nor "true"."""
    # The search first: it is done in no time for the large bodies, which are images and have no such words. A quote
    # inside of a string is escaped, so what is found is a key, if only of an object further in.
    if _STREAM.search(body) is None:
        return False
    try:
        document = json.loads(body)
    except (ValueError, RecursionError):
        return False  # the engine will say what is wrong with it
    return isinstance(document, dict) and document.get("stream") is True
