"""How busy a served model is: what the model server protocol of the inference gateway asks of /metrics.

`docs/proposals/003-model-server-protocol` of kubernetes-sigs/gateway-api-inference-extension @84436a9: gauges, whose
names are the engine's to say.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from appliance.engine_route import LoadGauges
from appliance.gateway.engine import upstream
from appliance.gateway.engine.upstream_pool import UpstreamPool
from appliance.values import dataclass

# The picker scrapes 20 times a second; an engine answers between two batches and is asked this often at most.
FRESH_S = 1.0
# A scrape waits so long for the engine, and then shows what it said before.
WAIT_S = 0.2
# An engine reads a batch of a prompt on a slow CPU in less.
GIVE_UP_S = 60.0

ParseKvUse = Callable[[bytes], float | None]


@dataclass(frozen=True, kw_only=True)
class Load:
    """`running` requests are with the engine, `waiting` ones have no slot yet or wait for an engine. `kv_use` from 0 to
    1; None where the engine does not tell."""

    model: str
    gauges: LoadGauges
    waiting: int
    running: int
    kv_use: float | None


class KvUse:
    """Share of the KV cache that running requests take. The engine is asked at a scrape, and for no other reason."""

    def __init__(self, pool: UpstreamPool, path: str, parse: ParseKvUse) -> None:
        """`parse` raises ValueError for what it cannot read; it is None while no engine serves."""
        self._pool = pool
        self._path = path
        self._parse = parse
        self._asked_at = float("-inf")
        self._asking: asyncio.Task[None] | None = None
        self.share: float | None = None

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
            self.share = self._parse(body) if answer.status == 200 else None
        except (upstream.UnreachableError, upstream.BrokenError, TimeoutError, ValueError):
            self.share = None  # the gauge is then absent; an engine that is gone has logs of its own
