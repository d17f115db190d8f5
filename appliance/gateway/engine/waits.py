"""The requests that wait for one engine, and for how long none of them got a part of its answer."""

from __future__ import annotations

import heapq
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from appliance.gateway.engine.upstream import Response


class _Wait:
    """One waiting request. `waited_s` counts from `since`: when it began, or when any request last got something."""

    def __init__(self, response: Response, body_bytes: int, since: float, *, needs_model: bool) -> None:
        self.response = response
        self._needs_model = needs_model
        self.body_bytes = body_bytes
        self.since = since
        self.waited_s = 0.0

    @property
    def last_content(self) -> float:
        """When it last got something that only a working model sends."""
        found = self.response.last_content if self._needs_model else None
        return float("-inf") if found is None else found

    def pass_time(self, seconds: float, *, now: float, last: float) -> None:
        if last > self.since:
            self.since, self.waited_s = last, 0.0
        self.waited_s += min(seconds, now - self.since - self.waited_s)


class Waits:
    """The requests of one engine. The watcher reports how much time has passed, because time in which the gateway stood
    still is no silence of the engine. Each answer notes when content came, so that a piece costs nothing here.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._all: set[_Wait] = set()
        self._last = float("-inf")  # when any request last got something
        # time waited by clients that left without an answer; they may ask again and again get nothing
        self._left_s = 0.0

    @contextmanager
    def waiting(self, response: Response, body_bytes: int, *, needs_model: bool = True) -> Iterator[None]:
        """Count one request while the block runs, from before its connection is made. If it `needs_model`, content of
        its answer ends the silence."""
        wait = _Wait(response, body_bytes, self._clock(), needs_model=needs_model)
        self._all.add(wait)
        try:
            yield
        finally:
            self._look()
            self._all.discard(wait)
            wait.pass_time(0.0, now=self._clock(), last=self._last)
            # an answer, even an error, shows that the engine answers others too
            self._left_s = self._left_s + wait.waited_s if response.is_owed else 0.0

    def _look(self) -> None:
        """End the silence if content has come."""
        last = max((wait.last_content for wait in self._all), default=self._last)
        if last > self._last:
            self._last, self._left_s = last, 0.0

    def begin(self) -> None:
        """Count anew: nothing waits yet."""
        self._last, self._left_s = self._clock(), 0.0

    @property
    def requests(self) -> int:
        """Number of requests that wait for the engine; requests whose client does not read are not counted."""
        return len(self._owed())

    def pass_time(self, seconds: float) -> None:
        self._look()
        now = self._clock()
        for wait in self._owed():
            wait.pass_time(seconds, now=now, last=self._last)

    @property
    def silent_s(self) -> float:
        """Seconds since any request got something, as of the last `pass_time`."""
        return self._left_s + max((wait.waited_s for wait in self._owed()), default=0.0)

    def largest(self, requests: int) -> list[int]:
        """Return the sizes in bytes of the largest bodies of waiting requests."""
        return heapq.nlargest(requests, (wait.body_bytes for wait in self._owed()))

    def give_up(self, why: str) -> None:
        for wait in self._all:
            wait.response.give_up(why)

    def _owed(self) -> list[_Wait]:
        return [wait for wait in self._all if wait.response.is_owed]
