"""The requests that are with the engine now, and whether another one is taken. One event loop, no locks."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

from appliance.gateway import refusal


class Traffic:
    def __init__(self) -> None:
        self._running: set[asyncio.Future[None]] = set()
        self._is_idle = asyncio.Event()
        self._is_idle.set()
        self.is_closed = False

    @property
    def running(self) -> int:
        return len(self._running)

    @contextmanager
    def admitted(self) -> Iterator[asyncio.Future[None]]:
        """Around one request. The future is done once the request must end now; raises Refusal when closed."""
        if self.is_closed:
            raise refusal.shutting_down()
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
