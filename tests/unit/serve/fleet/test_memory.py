"""Arithmetic of free memory beside loaded models and other containers."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from appliance.probe import GpuProbe
from appliance.serve.fleet.memory import HOST, beside_containers, free_on, held_by, less
from tests.builders import PLANS, card, machine

MIB = st.integers(0, 40_000)


@given(limit=st.none() | MIB, used=MIB, taken=st.integers(-50_000, 50_000), free=MIB)
def test_what_is_taken_is_less_and_what_is_given_back_is_at_most_all(
    limit: int | None, used: int, taken: int, free: int
) -> None:
    gpu = replace(card(), vram_free_mib=min(free, 24576))
    before = replace(machine(limit_mib=limit, limit_used_mib=used), gpus=GpuProbe(gpus=(gpu,)))
    place = gpu.uuid or ""
    after = free_on(less(before, {HOST: taken, place: taken}))
    had = free_on(before)
    assert after[place] == min(max(0, had[place] - taken), 24576)
    assert after[HOST] == min(max(0, had[HOST] - taken), *(() if limit is None else (limit,)), 10**9)


@pytest.mark.parametrize(("claimed", "left"), [(0.0, 15884), (5_000.0, 10884), (16_000.0, 0), (1e308, 15884)])
def test_no_claim_of_another_container_is_more_than_a_machine_has(claimed: float, left: int) -> None:
    assert beside_containers(machine(), {HOST: claimed}).memory.usable_mib == left


def test_a_unified_gpu_and_one_whose_memory_is_unknown_are_left_as_they_are() -> None:
    gpus = (replace(card(), vram_free_mib=None), replace(card(1), is_unified=True))
    before = replace(machine(), gpus=GpuProbe(gpus=gpus))
    assert less(before, {gpu.uuid or "": 100.0 for gpu in gpus}).gpus.gpus == gpus


def test_what_an_engine_allocated_beyond_its_plan_does_not_multiply_its_prompt_cache() -> None:
    plan = next(plan for plan in PLANS if plan.memory.cache)
    planned, over_mib = held_by(plan)[HOST], 100.0
    assert held_by(plan, allocated_mib=plan.predicted_mib + over_mib)[HOST] == pytest.approx(planned + over_mib)
    assert held_by(plan, allocated_mib=plan.predicted_mib / 2)[HOST] == planned
