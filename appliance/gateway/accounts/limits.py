"""Counts what one named key uses against its limits. Times are those of the clock that is passed in."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from appliance.gateway.accounts.named_keys import NamedKey
from appliance.gateway.clients.request_log import FinishedRequest
from appliance.gateway.wire.api_error import ApiError

MINUTE_S = 60.0
STREAM_RETRY_S = 1


class Window:
    """Amounts of the last minute. Exact: a limit holds in every minute, not only in those of the clock."""

    def __init__(self) -> None:
        self._amounts: deque[tuple[float, int]] = deque()
        self.total = 0

    def add(self, now: float, amount: int) -> None:
        self._forget(now)
        self._amounts.append((now, amount))
        self.total += amount

    def wait_s(self, now: float, most: int) -> float:
        """Return the seconds until the total is below `most`; 0 if it is."""
        self._forget(now)
        left = self.total
        if left < most:
            return 0.0
        for began, amount in self._amounts:
            left -= amount
            if left < most:
                return min(MINUTE_S, began + MINUTE_S - now)  # of floats, the sum may be a little more
        return MINUTE_S

    def _forget(self, now: float) -> None:
        while self._amounts and self._amounts[0][0] <= now - MINUTE_S:
            self.total -= self._amounts.popleft()[1]


class Meter:
    """The use of one named key. It outlives changes of the key's limits."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._requests = Window()
        self._tokens = Window()
        self.running = 0

    @contextmanager
    def admitted(self, key: NamedKey) -> Iterator[None]:
        """Count one request while the block runs. Raises ApiError (429) if a limit of the key is reached."""
        self._check(key)
        if key.requests_per_minute is not None:
            self._requests.add(self._clock(), 1)
        self.running += 1
        try:
            yield
        finally:
            self.running -= 1

    def note(self, row: FinishedRequest, speed: float) -> None:
        """Count the tokens of a request that ended.

        If the engine did not tell those of a stream, as for a client that left, `speed` (tokens per second) estimates
        them.
        """
        made = row.tokens_out
        if made is None and row.stream and row.ttft_s is not None:
            made = round((row.seconds - row.ttft_s) * speed)
        if tokens := (row.tokens_in or 0) + (made or 0):
            self._tokens.add(self._clock(), tokens)

    def _check(self, key: NamedKey) -> None:
        now = self._clock()
        if key.streams is not None and self.running >= key.streams:
            words = f"{key.streams} requests at the same time"
            raise _refusal(key, "streams", words, STREAM_RETRY_S)
        for name, window, kind in (
            ("requests_per_minute", self._requests, "requests"),
            ("tokens_per_minute", self._tokens, "tokens"),
        ):
            most: int | None = getattr(key, name)
            if most is not None and (wait_s := window.wait_s(now, most)) > 0:
                raise _refusal(key, name, f"{most:,} {kind} a minute", math.ceil(wait_s))


def _refusal(key: NamedKey, name: str, words: str, retry_s: int) -> ApiError:
    detail = f"the key '{key.name}' is limited to {words} ({name}): try again in {retry_s} s"
    return ApiError(429, name, detail, kind="rate_limit_error", headers=((b"retry-after", b"%d" % retry_s),))
