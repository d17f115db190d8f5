"""The requests that are with the engine now, whether another one is taken, and for how long nobody has asked. One
event loop, no locks."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext

from appliance.gateway.wire import api_error

RATE_S = 3.0
PAUSES_KEPT = 32


class Rate:
    """Events of streamed answers: about one a token, as engines send them. Of the last `RATE_S`."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._seen: deque[tuple[float, int]] = deque()
        self.total = 0
        """Since the beginning."""

    def add(self, chunk: bytes) -> None:
        count = chunk.count(b"\n\n")
        self.total += count
        self._seen.append((self._clock(), count))
        self._forget()

    @property
    def per_s(self) -> float:
        """0 soon after the last one. At least a quarter of the time is divided by: few events are no speed."""
        self._forget()
        if not self._seen:
            return 0.0
        seconds = max(self._clock() - self._seen[0][0], RATE_S / 4)
        return sum(count for _, count in self._seen) / seconds

    def _forget(self) -> None:
        oldest = self._clock() - RATE_S
        while self._seen and self._seen[0][0] < oldest:
            self._seen.popleft()


class Traffic:
    def __init__(self) -> None:
        self.rate = Rate()
        self._running: set[asyncio.Future[None]] = set()
        self._is_idle = asyncio.Event()
        self._is_idle.set()
        self._working = 0
        self._is_working = asyncio.Event()
        self._rests_since = time.monotonic()
        self.arrivals = 0
        """How many requests for work have come so far."""
        self.pauses: deque[float] = deque(maxlen=PAUSES_KEPT)
        """Seconds between the end of one request for work and the next, the last of them."""
        self.is_closed = False

    @property
    def running(self) -> int:
        """Of every kind, those that are held among them."""
        return len(self._running)

    @property
    def working(self) -> int:
        """Of those that run, the requests for work."""
        return self._working

    @property
    def idle_s(self) -> float:
        """Since the last request for work ended, since the beginning where there was none; 0 while one runs."""
        return 0.0 if self._working else time.monotonic() - self._rests_since

    async def until_arrival(self) -> None:
        """Returns when a request for work comes, at once when one runs. Of one that came and went before, only
        `arrivals` tells."""
        await self._is_working.wait()

    @contextmanager
    def admitted(self, *, is_work: bool = True) -> Iterator[asyncio.Future[None]]:
        """Around one request. The future is done once the request must end now; raises ApiError when closed."""
        if self.is_closed:
            raise api_error.shutting_down()
        with self._at_work() if is_work else nullcontext(), self._counted() as must_end:
            yield must_end

    @contextmanager
    def _at_work(self) -> Iterator[None]:
        if self.arrivals and not self._working:
            self.pauses.append(self.idle_s)
        self.arrivals += 1
        self._working += 1
        self._is_working.set()
        try:
            yield
        finally:
            self._working -= 1
            if not self._working:
                self._is_working.clear()
                self._rests_since = time.monotonic()

    @contextmanager
    def _counted(self) -> Iterator[asyncio.Future[None]]:
        must_end: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._running.add(must_end)
        self._is_idle.clear()
        try:
            yield must_end
        finally:
            self._running.discard(must_end)
            if not self._running:
                self._is_idle.set()

    def close(self) -> None:
        """New requests are refused from now on; running ones go on."""
        self.is_closed = True

    def end_all(self) -> None:
        for must_end in self._running:
            if not must_end.done():
                must_end.set_result(None)

    async def until_idle(self, timeout_s: float) -> bool:
        """False when requests are still running after `timeout_s`."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._is_idle.wait()
        except TimeoutError:
            return False
        return True


async def all_idle(each: Iterable[Traffic], timeout_s: float) -> bool:
    """False when requests of any are still running after `timeout_s`."""
    return all(await asyncio.gather(*(traffic.until_idle(timeout_s) for traffic in each)))
