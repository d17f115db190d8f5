"""Runs of the engine's program over a text, on the CPU, while no request runs: they show what a model lost."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from appliance.model import Model
from appliance.plan import Plan
from appliance.probe import probe
from appliance.quantize.loss import CHUNKS, Run
from appliance.quantize.pauses import Pauses
from appliance.race import first_of
from appliance.serve.background.checks.idle_turns import until_quiet
from appliance.serve.background.idle_policy import SETTLE_S
from appliance.serve.model.served_model import ServedModel
from appliance.system.detached import detached

if TYPE_CHECKING:
    from appliance.gateway.clients.traffic import Traffic  # for types only: it takes half a second to import


class IdleText:
    """Makes runs over a text beside one served model; `pauses` stops them while the machine is needed."""

    def __init__(self, served: ServedModel, traffic: Traffic) -> None:
        self._served = served
        self._traffic = traffic
        self.pauses = Pauses(self._until_busy, self.until_quiet)

    async def _until_busy(self) -> None:
        await first_of(self._traffic.until_arrival(), self._served.sharing.is_shared.wait())

    async def until_quiet(self) -> None:
        await until_quiet(self._served, self._traffic, SETTLE_S)

    async def run_of(self, model: Model, **changes: object) -> Run:
        """Return a run with the model, and with `changes` of the settings. Raises ModelDoesNotFitError (31)."""
        plan = await detached(self._plan, model, changes)
        start = self._served.start
        return Run(name=model.path.name, start=partial(start.engine.text_reader, plan, start.install))

    def _plan(self, model: Model, changes: dict[str, object]) -> Plan:
        served = self._served
        hardware = served.beside(probe(served.settings.data_dir, served.environment))
        usual: dict[str, object] = {
            "devices": "none",
            "ctx_size": 2 * CHUNKS.chunk_tokens,
            "kv_type": "f16",
            "speculation": "off",
            "draft_model": None,
            "draft_tokens": None,
            "gpu_layers": None,
            "n_cpu_moe": None,
            "moe_slots": "off",
            "parallel": 1,
            "cache_ram_mib": 0,
            "load_mode": "mmap",
        }
        settings = replace(served.settings, **{**usual, **changes})  # type: ignore[arg-type]
        inputs = replace(served.inputs, settings=settings, model=model, hardware=hardware, draft=None)
        return replace(served.start.engine.space(inputs).predicted, context=CHUNKS.chunk_tokens)
