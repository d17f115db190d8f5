"""Forecast of a model on this machine by the engine's planner, before its weights are here."""

from __future__ import annotations

import re

from appliance.engines.engine import Engine, Inputs, Install
from appliance.errors import FatalError
from appliance.plan import Costs, Placement, Plan
from appliance.profile import Key
from appliance.selection.rank import Forecast
from appliance.start.inputs import StartInputs


def without_profile(engine: Engine, install: Install, inputs: Inputs) -> StartInputs:
    """Return inputs for a model without a profile: the empty key finds none."""
    return StartInputs(engine=engine, install=install, inputs=inputs, key=Key(parts={}))


def forecast(start: StartInputs, wanted_context: int) -> Forecast | str:
    """Return the forecast, or in words why the model cannot be served."""
    try:
        space = start.space()
        plan = space.predicted
        depth = min(wanted_context, plan.context) / 2
        return _forecast(plan, space.costs(plan), depth)
    except FatalError as error:
        return _short(error.message)


def _forecast(plan: Plan, costs: Costs, depth: float) -> Forecast:
    decode_ms, prefill_ms = costs.decode_ms(depth), costs.prefill_ms(costs.batch, depth) / costs.batch
    return Forecast(
        where=_where(plan.placement),
        context=plan.context,
        is_on_gpus=bool(plan.placement.shares) and not _on_the_host(plan.placement),
        decode_tokens_per_s=1000 / decode_ms if decode_ms else None,
        prefill_tokens_per_s=1000 / prefill_ms if prefill_ms else None,
    )


def _short(message: str) -> str:
    """Shorten "model does not fit: q.gguf needs 9 MiB (8 weights), and 5 MiB are usable (…)" for a table."""
    found = re.sub(r" \([^()]*\)", "", message)
    return re.sub(r"^model does not fit: \S+ needs", "needs", found)


def _where(placement: Placement) -> str:
    """Describe the placement: "all on the GPU", "12 layers on the CPU", "experts of 40 layers on the CPU"."""
    if not placement.shares:
        return "CPU"
    gpus = len(placement.shares)
    return _on_the_host(placement) or ("all on the GPU" if gpus == 1 else f"all on {gpus} GPUs")


def _on_the_host(placement: Placement) -> str:
    layers, experts = placement.cpu_layers, placement.cpu_expert_layers
    parts = [f"{_counted(layers)} on the CPU"] if layers else []
    parts += [f"experts of {_counted(experts)} on the CPU"] if experts else []
    return ", ".join(parts)


def _counted(layers: int) -> str:
    return f"{layers} layer{'s' * (layers > 1)}"
