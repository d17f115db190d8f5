"""The whole appliance in the test's own process, all but the engine: what no setting has can be set there."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from io import StringIO
from typing import Any

import aiohttp

from appliance.console.report import Report
from appliance.serve.gateway.listen import open_gateway
from appliance.serve.gateway.stop import stoppable
from appliance.serve.life.bring_up import serve_model
from appliance.serve.model.served_model import ServedModel
from appliance.serve.open.open import open_slot
from appliance.settings import load_settings
from tests.ports import free_port
from tests.process.stages.boot import Home, short_folder


class Front:
    """A client's view of the whole appliance in this process, except for the engine."""

    def __init__(self, url: str, key: str, served: ServedModel) -> None:
        self.served = served
        self._url, self._headers = url, {"Authorization": f"Bearer {key}"}

    async def ask(
        self, method: str = "POST", path: str = "/v1/chat/completions", *, timeout_s: float = 120.0, **body: Any
    ) -> tuple[int, bytes]:
        async with (
            aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=timeout_s)) as session,
            session.request(method, self._url + path, json=body or None, headers=self._headers) as reply,
        ):
            return reply.status, await reply.read()

    @property
    def asked(self) -> int:
        """The number of requests that were sent to an engine."""
        return self.served.upstream.sent if self.served.upstream else 0

    @property
    def hangs(self) -> int:
        return self.served.upstream.hangs if self.served.upstream else 0


@asynccontextmanager
async def front_of(home: Home, *, stall_timeout_s: float, patience_s: float, **settings: str) -> AsyncIterator[Front]:
    with short_folder() as runtime_dir:
        more = {"port": str(free_port()), "drain_s": "0.1", "stall_timeout_s": str(stall_timeout_s), **settings}
        environment = home.environment(runtime_dir, **more)
        report = Report("json", StringIO())
        slot = open_slot(load_settings({}, environment), environment, report)
        served = slot.served
        assert served is not None
        served.patience_s = patience_s
        async with (
            asyncio.timeout(300),
            stoppable(report, [slot]),
            open_gateway(slot.settings, report, [slot]) as gateway,
        ):
            serving = asyncio.create_task(serve_model(slot, gateway.backends[0]))
            front = Front(f"http://127.0.0.1:{gateway.port}", home.key, served)
            try:
                while (await front.ask("GET", "/health/ready"))[0] != 200:
                    assert not serving.done()
                    await asyncio.sleep(0.02)
                yield front
            finally:
                serving.cancel()
                await asyncio.gather(serving, return_exceptions=True)
