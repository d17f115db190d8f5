"""Requests that come while the engine is away for a moment wait here; clients that asked for a stream are told why."""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections.abc import Awaitable, Callable

from appliance.console.progress import Progress
from appliance.gateway.clients.traffic import Traffic
from appliance.gateway.wire import api_error

TELL_EVERY_S = 5.0  # proxies and clients give up after 30 s of silence at the earliest
CHECK_EVERY_S = 0.05  # the phase is polled; the engine takes seconds to come back
_STREAM = re.compile(rb'"stream"\s*:\s*true')

Tell = Callable[[str], Awaitable[None]]


async def until_back(
    progress: Callable[[], Progress], traffic: Traffic, tell: Tell | None, *, every_s: float = TELL_EVERY_S
) -> None:
    """Wait until the engine serves. Raises ApiError if it will not: it failed, or the appliance stops."""
    tell_at = 0.0
    while (now := progress()).is_held:
        if traffic.is_closed:
            # At once, without the grace of a stop: the engine is not loaded any further then.
            raise api_error.shutting_down()
        if tell is not None and time.monotonic() >= tell_at:
            await tell(now.sentence())
            tell_at = time.monotonic() + every_s
        await asyncio.sleep(CHECK_EVERY_S)
    if not now.is_ready:
        raise api_error.not_ready(now)


def asks_for_stream(body: bytes) -> bool:
    """True if the engine will answer with a stream. The engine's rule: `stream` is true; 1 or "true" do not count."""
    # The search runs first: it is fast for large bodies, which are images and do not contain the word. A quote inside a
    # string is escaped, so a match is a key, though perhaps of a nested object.
    if _STREAM.search(body) is None:
        return False
    try:
        document = json.loads(body)
    except (ValueError, RecursionError):
        return False  # the engine reports what is wrong with the body
    return isinstance(document, dict) and document.get("stream") is True
