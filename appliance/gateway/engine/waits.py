"""What one engine owes: requests that wait for it, and for how long none of them got anything."""

from __future__ import annotations

import heapq
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from appliance.gateway.engine.upstream import Response
from appliance.gateway.wire.events import has_content


class _Wait:
    """One request. `waited_s` is counted from `since` on: when it began, or when any of them got something."""

    def __init__(self, response: Response, body_bytes: int, since: float) -> None:
        self.response = response
        self.body_bytes = body_bytes
        self.since = since
        self.waited_s = 0.0

    def pass_time(self, seconds: float, *, now: float, last: float) -> None:
        if last > self.since:
            self.since, self.waited_s = last, 0.0
        self.waited_s += min(seconds, now - self.since - self.waited_s)


class Waits:
    """The requests with one engine. Whoever watches it says how much time has passed: a gateway that stood still is no
    silence of the engine."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._all: set[_Wait] = set()
        self._last = float("-inf")  # when any of them got something
        self._left_s = 0.0  # that clients waited who left with nothing: they ask again, and again get nothing

    @contextmanager
    def waiting(self, response: Response, body_bytes: int) -> Iterator[None]:
        """Around one request, from before its connection is made."""
        wait = _Wait(response, body_bytes, self._clock())
        self._all.add(wait)
        try:
            yield
        finally:
            self._all.discard(wait)
            wait.pass_time(0.0, now=self._clock(), last=self._last)
            # One that was answered, be it with an error, shows that others are.
            self._left_s = self._left_s + wait.waited_s if response.is_owed else 0.0

    def note_piece(self, piece: bytes) -> None:
        """End the silence: a piece of an answer came that only a working model gives. Called for each token."""
        if has_content(piece):
            self.begin()

    def begin(self) -> None:
        """Start anew: nobody has waited yet."""
        self._last, self._left_s = self._clock(), 0.0

    @property
    def requests(self) -> int:
        """How many wait for the engine. One whose client does not read is not for it to answer."""
        return len(self._owed())

    def pass_time(self, seconds: float) -> None:
        now = self._clock()
        for wait in self._owed():
            wait.pass_time(seconds, now=now, last=self._last)

    @property
    def silent_s(self) -> float:
        """Seconds since any of them got something, as of the last `pass_time`."""
        return self._left_s + max((wait.waited_s for wait in self._owed()), default=0.0)

    def largest(self, requests: int) -> list[int]:
        """Return the sizes of the largest bodies, in bytes, of those that wait."""
        return heapq.nlargest(requests, (wait.body_bytes for wait in self._owed()))

    def give_up(self, why: str) -> None:
        for wait in self._all:
            wait.response.give_up(why)

    def _owed(self) -> list[_Wait]:
        return [wait for wait in self._all if wait.response.is_owed]
