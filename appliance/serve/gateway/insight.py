"""What is known of a slot's machine, for the gateway's metrics and pages."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from appliance.probe.load.meter import Reading
from appliance.serve.gateway.documents import losses_of
from appliance.serve.gateway.slot import ModelSlot
from appliance.serve.receipts.watch import RequestWatch, Watcher
from appliance.system.detached import detached

if TYPE_CHECKING:
    from appliance.gateway.clients.traffic import Traffic  # for the name only

FRESH_S = 1.0
WAIT_S = 0.2  # a hung driver must not delay a page


class SlotInsight:
    """See `appliance.gateway.engine.insight.Insight`. Without a served model nothing is known."""

    def __init__(self, slot: ModelSlot) -> None:
        self._slot = slot
        self._reading: asyncio.Task[Reading] | None = None
        self._watcher: Watcher | None = None

    @property
    def receipts(self) -> str:
        return self._slot.settings.receipts

    def watch(self, body: bytes, traffic: Traffic, *, load_s: float = 0.0, loaded: str = "") -> RequestWatch | None:
        served = self._slot.served
        if served is None:
            return None
        if self._watcher is None or self._watcher.served is not served:
            self._watcher = Watcher(served)
        return RequestWatch(self._watcher, body, traffic, load_s=load_s, loaded=loaded)

    def watts(self) -> float | None:
        served = self._slot.served
        return served.meter.watts if served else None

    def joules(self) -> float | None:
        served = self._slot.served
        last = served.meter.last if served else None
        return last.joules if last else None

    def losses(self) -> tuple[str, ...]:
        served = self._slot.served
        return tuple(loss.kind for loss in losses_of(served)) if served else ()

    async def refresh(self) -> None:
        served = self._slot.served
        if served is None:
            return
        if self._reading is None or self._reading.done():
            if (last := served.meter.last) is not None and last.is_fresh(FRESH_S):
                return
            self._reading = asyncio.create_task(detached(served.meter.read, fresh_s=FRESH_S))
        await asyncio.wait((self._reading,), timeout=WAIT_S)
