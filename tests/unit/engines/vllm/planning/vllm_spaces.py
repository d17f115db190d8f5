"""Spaces of vLLM for tests of what follows from them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from appliance.engines.vllm.planning.arguments.launch import VllmLaunch, launch_of
from appliance.engines.vllm.planning.space import Space
from appliance.model import Model
from appliance.plan import Plan
from appliance.probe import Gpu, Hardware
from tests.golden.vllm_plans import hardware, inputs
from tests.shapes.folders import folder_model

CPU, TURINGS, ADA, SERVER = "cpu-16g", "2x2080ti-22g", "1x4090", "h200"


def space(
    machine: str | Hardware = ADA,
    model: str | Model = "qwen3-8b-fp8",
    environment: Mapping[str, str] | None = None,
    **flags: str,
) -> Space:
    there = hardware(machine) if isinstance(machine, str) else machine
    return Space(inputs(there, folder_model(model) if isinstance(model, str) else model, flags, environment))


def best(*args: Any, **flags: Any) -> Plan:
    return space(*args, **flags).best


def launch(plan: Plan) -> VllmLaunch:
    return launch_of(plan)


def reason(plan: Plan, name: str) -> str:
    return next(choice.reason for choice in plan.choices if choice.name == name)


def with_cards(machine: str, **changes: Any) -> Hardware:
    """Return the machine with `changes` applied to every GPU."""
    found = hardware(machine)
    return replace(found, gpus=replace(found.gpus, gpus=tuple(replace(card, **changes) for card in found.gpus.gpus)))


def cards(machine: str, *changed: Mapping[str, Any]) -> Hardware:
    """Return the machine with copies of its first GPU, one for each of `changed`, which has the fields to replace."""
    found = hardware(machine)
    first: Gpu = found.gpus.gpus[0]
    made = tuple(replace(first, index=at, uuid=f"GPU-{at}", **each) for at, each in enumerate(changed))
    return replace(found, gpus=replace(found.gpus, gpus=made))
