"""The load of a served model, as the model server protocol of the inference gateway expects it in /metrics.

`docs/proposals/003-model-server-protocol` of kubernetes-sigs/gateway-api-inference-extension @84436a9 defines the
gauges; each engine has their names as aliases of ours.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from typing import Generic, TypeVar

from appliance.gateway.engine import upstream
from appliance.gateway.engine.upstream_pool import UpstreamPool
from appliance.values import dataclass

# The endpoint picker scrapes 20 times a second, but an engine answers only between two batches: it is asked at most
# this often.
FRESH_S = 1.0
# A scrape waits so long for the engine's answer, then shows the previous one.
WAIT_S = 0.2
# Time limit for the engine's answer; one batch of prefill on a slow CPU takes less.
GIVE_UP_S = 60.0

T = TypeVar("T")
ParseKvUse = Callable[[bytes], float | None]
ParseCounts = Callable[[bytes], Mapping[str, float]]


@dataclass(frozen=True, kw_only=True)
class Load:
    """`running` requests are with the engine; `waiting` ones wait for a slot or an engine. `kv_use` is 0 to 1; None if
    the engine does not report it."""

    model: str
    waiting: int
    running: int
    kv_use: float | None


class EngineFigure(Generic[T]):
    """What the engine answers on one path, such as the use of its KV cache. It is asked only when somebody looks."""

    def __init__(self, pool: UpstreamPool, path: str, parse: Callable[[bytes], T | None]) -> None:
        """`parse` returns None while no engine serves, and raises ValueError for an answer that it cannot read."""
        self._pool = pool
        self._path = path
        self._parse = parse
        self._asked_at = float("-inf")
        self._asking: asyncio.Task[None] | None = None
        self.value: T | None = None

    async def refresh(self) -> None:
        if self._asking is None or self._asking.done():
            if time.monotonic() - self._asked_at < FRESH_S:
                return
            self._asked_at = time.monotonic()
            self._asking = asyncio.create_task(self._ask())
        await asyncio.wait((self._asking,), timeout=WAIT_S)

    async def _ask(self) -> None:
        try:
            async with (
                asyncio.timeout(GIVE_UP_S),
                upstream.request(self._pool.socket_path, "GET", self._path, (), b"") as answer,
            ):
                body = await answer.read()
            self.value = self._parse(body) if answer.status == 200 else None
        except (upstream.UnreachableError, upstream.BrokenError, TimeoutError, ValueError):
            self.value = None  # the gauge is then absent; the log tells of an engine that is gone
