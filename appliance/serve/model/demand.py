"""The requests at one engine, as its supervisor sees them, and how long they may wait."""

from __future__ import annotations

from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from appliance.command import Silence
from appliance.engines.engine import Space
from appliance.plan import Costs, Plan

if TYPE_CHECKING:
    from appliance.gateway.engine.upstream_pool import UpstreamPool
    from appliance.gateway.engine.waits import Waits

PATIENCE_S = 600.0
PREFILLS = 10.0  # predicted time for all prompts that are read together, times this
BYTES_A_TOKEN = 3.0  # of a request's body: four in English text, three in Chinese, six in JSON escapes


class Asked(Protocol):
    """The fields of a served model that are read here."""

    patience_s: float
    upstream: UpstreamPool | None

    @property
    def space_of_profile(self) -> Space: ...


class EngineDemand:
    """The requests of the engine with this plan at this socket."""

    def __init__(self, served: Asked, plan: Plan, socket_path: Path) -> None:
        self._served = served
        self._plan = plan
        self._socket_path = socket_path

    @property
    def requests(self) -> int:
        return waits.requests if (waits := self._waits) else 0

    def begin(self) -> None:
        if waits := self._waits:
            waits.begin()

    def pass_time(self, seconds: float) -> Silence:
        waits = self._waits
        if waits is None:
            return Silence(requests=0, seconds=0.0, patience_s=self._served.patience_s)
        waits.pass_time(seconds)
        patience_s, silent_s = self._served.patience_s, waits.silent_s
        if silent_s >= patience_s / 2:  # predicting may take a moment, and is not needed before
            patience_s = max(patience_s, PREFILLS * self._prefill_s(waits.largest(self._plan.parallel)))
        return Silence(requests=waits.requests, seconds=silent_s, patience_s=patience_s)

    def give_up(self, why: str) -> None:
        if self._served.upstream is not None:
            self._served.upstream.give_up(self._socket_path, why)

    @property
    def _waits(self) -> Waits | None:
        upstream = self._served.upstream
        return upstream.waits(self._socket_path) if upstream else None

    @cached_property
    def _costs(self) -> Costs:
        return self._served.space_of_profile.costs(self._plan)

    def _prefill_s(self, bodies: list[int]) -> float:
        """Return the predicted seconds of all prefills, one after the other."""
        tokens = [min(body / BYTES_A_TOKEN, self._plan.context) for body in bodies]
        return sum(self._costs.prefill_ms(round(each), each / 2) for each in tokens) / 1000
