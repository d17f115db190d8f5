"""Properties of memory: no term is negative, parts add up to the whole, and no place is filled beyond its room."""

from __future__ import annotations

from dataclasses import fields, replace

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from appliance.engines.llama.planning.arguments.launch import launch_of
from appliance.engines.llama.planning.memory.memory import KV_BYTES, MIB, cells, layers_of, weights_mib
from appliance.engines.llama.planning.space import Space
from appliance.errors import ModelDoesNotFitError
from appliance.model import Model
from appliance.plan import Memory, Plan
from appliance.probe import Gpu, Hardware
from appliance.settings import resolve_settings
from tests.builders import examples, facts, model
from tests.golden.machines import MACHINES
from tests.shapes import PUBLISHED

PARTS = ("repacked", "mapped_twice")  # of the weights, or the engine's own count: in no sum
QUANTIZATIONS = {"gpt-oss-120b": "MXFP4", "deepseek-v3": "Q2_K"}

cards = st.lists(
    st.tuples(st.integers(2000, 90000), st.sampled_from([300.0, 936.0, 3350.0]), st.sampled_from([1, 4, 16])),
    max_size=4,
)
asked = st.fixed_dictionaries(
    {},
    optional={
        "ctx_size": st.sampled_from(["512", "8192", "32768"]),
        "kv_type": st.sampled_from(["f16", "q8_0"]),
        "parallel": st.sampled_from(["1", "4", "16"]),
        "ubatch": st.sampled_from(["128", "2048"]),
        "mode": st.sampled_from(["speed", "context"]),
    },
)


def machine(having: list[tuple[int, float, int]], host: str) -> Hardware:
    template = MACHINES["2x4090"].gpus.gpus[0]

    def gpu(index: int, free_mib: int, gb_s: float, width: int) -> Gpu:
        return replace(
            template,
            index=index,
            uuid=f"GPU-{index}",
            vram_total_mib=free_mib,
            vram_free_mib=free_mib,
            bandwidth_gb_s=gb_s,
            pcie_width=width,
            pcie_width_max=16,
        )

    found = MACHINES[host]
    gpus = tuple(gpu(index, *card) for index, card in enumerate(having))
    return replace(found, gpus=replace(found.gpus, gpus=gpus))


def planned(hardware: Hardware, of: Model, flags: dict[str, str]) -> Plan | None:
    image, engine = facts(has_cuda=True)
    try:
        return Space(resolve_settings(flags, {}), image, engine, hardware, of).best
    except ModelDoesNotFitError:
        return None


def places(plan: Plan) -> list[Memory]:
    return [plan.memory, *(share.memory for share in plan.placement.shares)]


def check_terms(memory: Memory) -> None:
    terms = {field.name: getattr(memory, field.name) for field in fields(memory)}
    assert {name: mib for name, mib in terms.items() if mib < 0} == {}
    assert memory.total == pytest.approx(sum(mib for name, mib in terms.items() if name not in PARTS))
    assert memory.repacked <= memory.weights + 1e-6


def check_room(plan: Plan, hardware: Hardware) -> None:
    free = {gpu.uuid: gpu.vram_free_mib or 0 for gpu in hardware.gpus.gpus}
    assert plan.memory.total <= hardware.memory.usable_mib
    for share in plan.placement.shares:
        assert share.memory.total + share.gpu.held_back_mib <= free[share.gpu.id] + 1e-6


def check_sums(plan: Plan, of: Model) -> None:
    """Check that the memory of all places adds up. Each part of a whole layer lies in one place; split tensors may lie
    in several."""
    kept = [layer for layer in layers_of(of) if not layer.is_draft]
    ubatch = launch_of(plan).ubatch
    elements = sum((la.k_elements + la.v_elements) * cells(la, plan.context, ubatch, plan.parallel) for la in kept)
    cache = elements * KV_BYTES[plan.kv_type] / MIB
    states = sum(layer.state_bytes for layer in kept) * plan.parallel / MIB
    found = places(plan)
    sums = [sum(getattr(memory, name) for memory in found) for name in ("weights", "kv", "state")]
    # A tied embedding is looked up on the host and multiplied on a GPU: there twice.
    twice = of.output_bytes / MIB if of.output_is_tied and plan.placement.shares else 0.0
    made = plan.memory.repacked
    if plan.placement.parts:
        assert sums[0] >= weights_mib(of) - 1e-3
        assert sums[1] >= cache - 1e-3
        assert sums[2] >= states - 1e-3
        return
    assert weights_mib(of) - 1.0 <= sums[0] <= weights_mib(of) + twice + made + 1.0
    assert sums[1] == pytest.approx(cache)
    assert sums[2] == pytest.approx(states)


@pytest.mark.thorough
@settings(deadline=None, max_examples=examples(100))
@given(cards, st.sampled_from(["cpu-16g", "2x4090", "h200"]), st.sampled_from(sorted(PUBLISHED)), asked)
def test_terms_of_a_plan_are_never_negative_and_add_up(
    having: list[tuple[int, float, int]], host: str, name: str, flags: dict[str, str]
) -> None:
    hardware, of = machine(having, host), model(name, QUANTIZATIONS.get(name, "Q4_K_M"))
    assume(int(flags.get("ctx_size", "0")) <= of.longest_context)  # more is refused before anything is planned
    plan = planned(hardware, of, flags)
    if plan is None:
        return
    for memory in places(plan):
        check_terms(memory)
    check_room(plan, hardware)
    check_sums(plan, of)
