"""Counts the requests that are with the engine, decides whether another is taken, and measures idle time. One event
loop, no locks."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

from appliance.gateway.wire import api_error

RATE_S, STEP_S = 3.0, 0.1
PAUSES_KEPT = 32


class Rate:
    """Rate of events in streamed answers over the last `RATE_S`. Engines send about one event per token."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._steps: deque[list[float]] = deque()  # beginning of each `STEP_S`, and the events that came in it
        self._step_ends = float("-inf")
        self.total = 0
        """Number of events since the start."""

    def add(self, chunk: bytes) -> None:
        count = chunk.count(b"\n\n")
        self.total += count
        now = self._clock()
        if now >= self._step_ends:
            self._forget(now)
            self._steps.append([now, 0])
            self._step_ends = now + STEP_S
        self._steps[-1][1] += count

    @property
    def per_s(self) -> float:
        """Events per second; 0 if none came in the last `RATE_S`. Divides by at least a quarter of `RATE_S`: few events
        give no meaningful rate."""
        now = self._clock()
        self._forget(now)
        if not self._steps:
            return 0.0
        seconds = max(now - self._steps[0][0], RATE_S / 4)
        return sum(count for _, count in self._steps) / seconds

    def _forget(self, now: float) -> None:
        while self._steps and self._steps[0][0] < now - RATE_S:
            self._steps.popleft()


class Traffic:
    def __init__(self) -> None:
        self.rate = Rate()
        self._running: set[asyncio.Future[None]] = set()
        self._is_idle = asyncio.Event()
        self._is_idle.set()
        self._working = 0
        self._is_working = asyncio.Event()
        self._rests_since = time.monotonic()
        self._work_s = 0.0
        self._work_changed = self._rests_since
        self.arrivals = 0
        """Number of inference requests so far."""
        self.pauses: deque[float] = deque(maxlen=PAUSES_KEPT)
        """Seconds between the end of one inference request and the next, for the latest `PAUSES_KEPT` pauses."""
        self._is_closed = asyncio.Event()

    @property
    def running(self) -> int:
        """Number of running requests of every kind, held ones included."""
        return len(self._running)

    @property
    def working(self) -> int:
        """Number of running inference requests."""
        return self._working

    @property
    def work_s(self) -> float:
        """Seconds of all inference requests so far, those that run included: two at once count twice."""
        return self._work_s + self._working * (time.monotonic() - self._work_changed)

    @property
    def idle_s(self) -> float:
        """Seconds since the last inference request ended, or since the start if there was none; 0 while one runs."""
        return 0.0 if self._working else time.monotonic() - self._rests_since

    async def until_arrival(self) -> None:
        """Wait until an inference request runs; returns at once if one does. A request that came and went before shows
        only in `arrivals`."""
        await self._is_working.wait()

    @contextmanager
    def admitted(self, *, is_work: bool = True) -> Iterator[asyncio.Future[None]]:
        """Count one request while the block runs. The yielded future is done when the request must end. Raises ApiError
        if closed."""
        if self.is_closed:
            raise api_error.shutting_down()
        must_end: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._running.add(must_end)
        self._is_idle.clear()
        if is_work:
            self._begin_work()
        try:
            yield must_end
        finally:
            self._running.discard(must_end)
            if not self._running:
                self._is_idle.set()
            if is_work:
                self._end_work()

    def _begin_work(self) -> None:
        if self.arrivals and not self._working:
            self.pauses.append(self.idle_s)
        self.arrivals += 1
        self._count_work(1)
        self._is_working.set()

    def _end_work(self) -> None:
        self._count_work(-1)
        if not self._working:
            self._is_working.clear()
            self._rests_since = time.monotonic()

    def _count_work(self, more: int) -> None:
        self._work_s, self._work_changed = self.work_s, time.monotonic()
        self._working += more

    @property
    def is_closed(self) -> bool:
        """True once new requests are refused, because the appliance stops."""
        return self._is_closed.is_set()

    async def until_closed(self) -> None:
        """Wait until new requests are refused."""
        await self._is_closed.wait()

    def close(self) -> None:
        """Refuse new requests from now on; running ones continue."""
        self._is_closed.set()

    def end_all(self) -> None:
        for must_end in self._running:
            if not must_end.done():
                must_end.set_result(None)

    async def until_idle(self, timeout_s: float) -> bool:
        """Wait until no request runs. False if requests still run after `timeout_s`."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._is_idle.wait()
        except TimeoutError:
            return False
        return True


async def all_idle(each: Iterable[Traffic], timeout_s: float) -> bool:
    """Wait until none of them has running requests. False if some still run after `timeout_s`."""
    return all(await asyncio.gather(*(traffic.until_idle(timeout_s) for traffic in each)))
