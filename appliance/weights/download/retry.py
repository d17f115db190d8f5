"""Retry policy: which errors are transient, how long to wait, and when to give up. Pure, except for the wait itself."""

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
LONGEST_ASKED_S = 900.0  # a longer wait counts as a refusal
PASSING = frozenset({408, 425, 429, 500, 502, 503, 504, 520, 521, 522, 524})  # 520 and above: used by proxies


class Transient(Exception):  # noqa: N818 - it ends nothing by itself
    """A temporary failure. `retry_after_s` is the server's request; `is_unreached` is True if no connection was
    made."""

    def __init__(self, words: str, retry_after_s: float | None = None, *, is_unreached: bool = False) -> None:
        super().__init__(words)
        self.words = words
        self.retry_after_s = retry_after_s
        self.is_unreached = is_unreached


class Patience:
    """Counts failures in a row; progress resets it. `wait_s` returns how long to wait after a failure.

    Raises DownloadError after too long without progress, or if the server asks for too long a wait. The limit is
    short for a server that was never reached: probably there is no network.
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
            message = f"download failed: {what}: {failure.words}, asks to wait {asked:,.0f} s"
            raise DownloadError(message, hint="try again after that time; the bytes fetched so far are kept")
        waited = self._now() - self._since
        wait: float = min(FIRST_WAIT_S * 2.0 ** (self._failures - 1), LONGEST_WAIT_S)
        if asked is not None:
            self._since += asked  # a wait that the server requested does not count
            return max(asked, FIRST_WAIT_S)
        total_s = self._total_s if self._was_reached else min(self._total_s, UNREACHED_S)
        if waited + wait > total_s:
            message = f"download failed: {what}: {failure.words}, after {self._failures} attempts in {waited:,.0f} s"
            raise DownloadError(message, hint="check the network, then try again: the bytes fetched so far are kept")
        return wait


async def patiently(
    ask: Callable[[], Awaitable[T]], patience: Patience, what: str, on_wait: Callable[[str], None]
) -> T:
    """Return the result of `ask`, retried after each Transient. `on_wait` receives the reason."""
    while True:
        try:
            return await ask()
        except Transient as failure:
            wait = patience.wait_s(failure, what)
            on_wait(f"{failure.words}; asking again in {math.ceil(wait):,} s")
            await asyncio.sleep(wait)


def parse_retry_after(value: str | None, now: float) -> float | None:
    """Parse both forms of Retry-After, `120` or a date, into seconds; None if invalid."""
    if not value:
        return None
    if re.fullmatch(r" *[0-9]{1,9} *", value):
        return float(value)
    try:
        seconds: float = parsedate_to_datetime(value).timestamp() - now
    except (ValueError, OverflowError):
        return None
    return max(0.0, seconds)
