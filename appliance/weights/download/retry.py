"""When to ask again: what passes by itself, how long to wait, and when to give up. Pure but for the wait itself."""

from __future__ import annotations

import asyncio
import math
import re
import time
from collections.abc import Awaitable, Callable
from email.utils import parsedate_to_datetime
from typing import TypeVar

from appliance.errors import DownloadError

T = TypeVar("T")
FIRST_WAIT_S = 0.25
LONGEST_WAIT_S = 30.0
UNREACHED_S = 20.0
LONGEST_ASKED_S = 900.0  # more than that is no wait but a refusal
PASSING = frozenset({408, 425, 429, 500, 502, 503, 504, 520, 521, 522, 524})  # from 520 on: proxies' own


class Transient(Exception):  # noqa: N818 - it ends nothing by itself
    """A failure that may pass. `retry_after_s` is what the server asked for; `is_unreached`: no connection came up."""

    def __init__(self, words: str, retry_after_s: float | None = None, *, is_unreached: bool = False) -> None:
        super().__init__(words)
        self.words = words
        self.retry_after_s = retry_after_s
        self.is_unreached = is_unreached


class Patience:
    """Failures in a row: `wait_s` is how long to wait after this one. Any progress starts it anew.

    Raises DownloadError when the time without progress is up, or when the server asks for more than can be waited. Of a
    server that was never reached that time is short: more likely there is no network than an interruption.
    """

    def __init__(self, total_s: float, now: Callable[[], float] = time.monotonic) -> None:
        self._total_s = total_s
        self._now = now
        self._failures, self._since = 0, now()
        self._was_reached = False

    def progressed(self) -> None:
        self._failures, self._since = 0, self._now()
        self._was_reached = True

    def wait_s(self, failure: Transient, what: str) -> float:
        self._failures += 1
        self._was_reached = self._was_reached or not failure.is_unreached
        asked = failure.retry_after_s
        if asked is not None and asked > LONGEST_ASKED_S:
            message = f"download failed: {what}: {failure.words}, and asks to wait {asked:,.0f} s"
            raise DownloadError(message, hint="try again then; what was fetched is kept")
        waited = self._now() - self._since
        wait: float = min(FIRST_WAIT_S * 2.0 ** (self._failures - 1), LONGEST_WAIT_S)
        if asked is not None:
            self._since += asked  # a wait that the server asked for is not counted against it
            return max(asked, FIRST_WAIT_S)
        total_s = self._total_s if self._was_reached else min(self._total_s, UNREACHED_S)
        if waited + wait > total_s:
            message = f"download failed: {what}: {failure.words}, after {self._failures} attempts in {waited:,.0f} s"
            raise DownloadError(message, hint="check the network, then try again: what was fetched is kept")
        return wait


async def patiently(
    ask: Callable[[], Awaitable[T]], patience: Patience, what: str, on_wait: Callable[[str], None]
) -> T:
    """The result of `ask`, which is asked again after each Transient. `on_wait` is told why, in words."""
    while True:
        try:
            return await ask()
        except Transient as failure:
            wait = patience.wait_s(failure, what)
            on_wait(f"{failure.words}; asking again in {math.ceil(wait):,} s")
            await asyncio.sleep(wait)


def parse_retry_after(value: str | None, now: float) -> float | None:
    """Seconds, of either form that HTTP has: `120` or a date."""
    if not value:
        return None
    if re.fullmatch(r" *[0-9]{1,9} *", value):
        return float(value)
    try:
        seconds: float = parsedate_to_datetime(value).timestamp() - now
    except (ValueError, OverflowError):
        return None
    return max(0.0, seconds)
