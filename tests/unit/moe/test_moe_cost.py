"""The formula, the splits that come from it, and batches."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from appliance.moe.cost import Cost, Rates
from appliance.moe.split import BatchCost, split_batch
from tests.unit.moe.every_assignment import brute_force_batch, brute_force_split
from tests.unit.moe.routing import COST, DESKTOP

FIGURES = st.floats(1.0, 120.0)
MS = st.floats(0.0, 0.3)


@st.composite
def costs(draw: st.DrawFn) -> Cost:
    rates = Rates(
        cpu_gb_s=draw(FIGURES),
        pcie_gb_s=draw(FIGURES),
        dram_gb_s=draw(FIGURES),
        other_ms=draw(MS),
        cpu_fixed_ms=draw(MS),
        gpu_expert_ms=draw(MS),
        gpu_fixed_ms=draw(MS),
    )
    return Cost(rates, draw(st.floats(0.5, 20.0)))


def test_the_formula_by_hand() -> None:
    assert COST.layer_ms(2, 4, 0, 0) == pytest.approx(0.03 + 4 * 2.9 / 52)
    assert COST.layer_ms(2, 4, 4, 0) == pytest.approx(4 * 2.9 / 24 + 0.008)  # nothing on the CPU: no fixed time
    assert COST.layer_ms(6, 0, 0, 0) == pytest.approx(6 * 0.008)
    assert COST.layer_ms(5, 1, 0, 6) == pytest.approx(6 * 2.9 / 24 - 0.08)  # uploads hide behind the layer's other time
    saturated = Cost(replace(DESKTOP, pcie_gb_s=100, dram_gb_s=20), 2.9)
    assert saturated.layer_ms(0, 6, 2, 1) == pytest.approx(7 * 2.9 / 20 - 0.08)


@given(costs(), st.lists(st.booleans(), min_size=1, max_size=7), st.data())
def test_the_closed_form_is_the_best_of_every_assignment(
    cost: Cost, is_resident: list[bool], data: st.DataObject
) -> None:
    hits = sum(is_resident)
    copied = data.draw(st.integers(0, len(is_resident) - hits))
    split = cost.splits(len(is_resident), hits)[copied]
    assert split.ms == pytest.approx(brute_force_split(cost, is_resident, copied))
    assert split.ms == cost.layer_ms(split.hits, len(is_resident) - split.hits, split.fetched, split.uploads)
    assert split.fetched + split.uploads == copied


@given(costs(), st.integers(1, 8), st.data())
def test_no_split_is_above_all_cpu_and_none_gets_worse_with_hits(cost: Cost, top_k: int, data: st.DataObject) -> None:
    hits = data.draw(st.integers(0, top_k))
    best = cost.splits(top_k, hits)[0].ms
    assert best <= cost.all_cpu_ms(top_k)
    assert cost.best_ms(top_k, hits) <= best
    if hits:
        assert cost.best_ms(top_k, hits) <= cost.best_ms(top_k, hits - 1)


@given(costs(), st.integers(1, 8), st.data(), st.sampled_from(("cpu_gb_s", "pcie_gb_s", "dram_gb_s")), st.floats(1, 4))
def test_a_faster_side_is_never_slower(cost: Cost, top_k: int, data: st.DataObject, name: str, factor: float) -> None:
    hits = data.draw(st.integers(0, top_k))
    faster = Cost(replace(cost.rates, **{name: getattr(cost.rates, name) * factor}), cost.expert_mb)
    for slow, fast in zip(cost.splits(top_k, hits), faster.splits(top_k, hits), strict=True):
        assert fast.ms <= slow.ms + 1e-12


@pytest.mark.parametrize(("name", "value"), [("cpu_gb_s", 0.0), ("dram_gb_s", float("inf")), ("other_ms", -0.1)])
def test_rates_that_cannot_be_are_refused_by_name(name: str, value: float) -> None:
    with pytest.raises(ValueError, match=name):
        replace(DESKTOP, **{name: value})


def test_an_expert_without_a_size_is_refused() -> None:
    with pytest.raises(ValueError, match="size of an expert"):
        Cost(DESKTOP, 0.0)


@pytest.mark.parametrize("seed", range(150))
def test_greedy_batches_are_within_3_percent_of_brute_force(seed: int) -> None:
    draw = random.Random(seed)
    cpu, pcie = draw.uniform(10, 100), draw.uniform(5, 60)
    rates = Rates(
        cpu_gb_s=cpu,
        pcie_gb_s=pcie,
        dram_gb_s=draw.uniform(max(cpu, pcie), cpu + pcie),
        other_ms=draw.uniform(0, 0.3),
        cpu_fixed_ms=draw.uniform(0, 0.1),
        gpu_expert_ms=draw.uniform(0.002, 0.05),
    )
    cost = BatchCost(
        cost=Cost(rates, draw.uniform(1, 12)), cpu_token_ms=draw.uniform(0, 0.2), gpu_token_ms=draw.uniform(0, 0.01)
    )
    count = draw.randint(1, 9)
    tokens = [draw.choice((1, 1, 2, 3, 8, 30)) for _ in range(count)]
    is_resident = [draw.random() < 0.4 for _ in range(count)]
    split = split_batch(cost, tokens, is_resident)
    assert sorted((*split.gpu, *split.cpu)) == list(range(count))
    assert split.ms <= 1.03 * brute_force_batch(cost, tokens, is_resident)
    assert split.ms <= cost.batch_ms(tokens, is_resident, [False] * count)


def test_a_batch_of_one_token_costs_what_the_formula_says() -> None:
    cost = BatchCost(cost=COST, cpu_token_ms=0.0)
    resident = [True, True, False, False]
    assert cost.batch_ms([1] * 4, resident, [True, True, False, False]) == pytest.approx(COST.layer_ms(2, 2, 0, 0))
    assert cost.batch_ms([1] * 4, resident, [False] * 4) == pytest.approx(COST.all_cpu_ms(4))
