"""What one engine owes: requests that wait for it, and for how long none of them got anything."""

from __future__ import annotations

import heapq
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from appliance.gateway.events import has_content
from appliance.gateway.upstream import Response


class _Wait:
    """One request. `since` is when it began, or when any of them got something last."""

    def __init__(self, response: Response, body_bytes: int, since: float) -> None:
        self.response = response
        self.body_bytes = body_bytes
        self.since = since
        self.waited_s = 0.0


class Waits:
    """Of the requests with one engine. Whoever watches it says how much time has passed: a gateway that stood still is
    no silence of the engine."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._all: set[_Wait] = set()
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
            # One that was answered, be it with an error, shows that others are.
            self._left_s = self._left_s + wait.waited_s if response.is_owed else 0.0

    def note_piece(self, piece: bytes) -> None:
        """Something of an answer came that only a working model gives, unless it is said before any answer."""
        if has_content(piece):
            self.begin()

    def begin(self) -> None:
        """Nothing is owed yet."""
        self._left_s, now = 0.0, self._clock()
        for wait in self._all:
            wait.since, wait.waited_s = now, 0.0

    @property
    def requests(self) -> int:
        """That wait for the engine; one whose client does not read is not for it to answer."""
        return len(self._owed())

    def pass_time(self, seconds: float) -> None:
        now = self._clock()
        for wait in self._owed():
            wait.waited_s += min(seconds, now - wait.since - wait.waited_s)

    @property
    def silent_s(self) -> float:
        """Since any of them got something."""
        return self._left_s + max((wait.waited_s for wait in self._owed()), default=0.0)

    def largest(self, requests: int) -> list[int]:
        """Bytes of the largest bodies of those that wait."""
        return heapq.nlargest(requests, (wait.body_bytes for wait in self._owed()))

    def give_up(self, why: str) -> None:
        for wait in self._all:
            wait.response.give_up(why)

    def _owed(self) -> list[_Wait]:
        return [wait for wait in self._all if wait.response.is_owed]
