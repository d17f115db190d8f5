"""Plans of a start before which an engine of the same configuration was seen to serve."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from appliance.engines.vllm.planning.memory.memory import MIB, Batch, Reserve, forward_mib, reserve_of
from appliance.engines.vllm.planning.model.shape import shape_of
from appliance.engines.vllm.planning.observed_memory import resized
from appliance.engines.vllm.planning.space import Space
from appliance.errors import ModelDoesNotFitError
from appliance.plan import Allocated, CardPeak, MemoryPeak, Plan, Speculation, with_launch
from tests.builders import examples
from tests.golden.vllm_plans import hardware, inputs
from tests.shapes.folders import folder_model
from tests.unit.engines.vllm.planning.vllm_spaces import ADA, TURINGS, launch, reason, with_cards

MARGIN_MIB = 150
FAR = 10**6
MODELS = {ADA: "qwen3-8b-fp8", TURINGS: "qwen3.6-27b-awq", "2x4090": "llama-3.3-70b-awq", "24+8": "gemma-3-12b"}


def seen(plan: Plan, beyond_mib: float, *, is_whole: bool = True) -> MemoryPeak:
    """Return a peak in which every rank of the plan held `beyond_mib` more than planned."""
    cards = tuple(
        CardPeak(
            device=share.gpu.id,
            kv_mib=share.memory.kv,
            ready_mib=1,
            peak_mib=round(share.memory.total + share.gpu.context_mib + beyond_mib),
        )
        for share in plan.placement.shares
    )
    return MemoryPeak(plan=replace(plan, choices=()), cards=cards, is_whole=is_whole)


def space(peak: MemoryPeak | None, machine: str = ADA, **flags: str) -> Space:
    given = inputs(hardware(machine), folder_model(MODELS[machine]), flags)
    return Space(replace(given, memory_peaks=() if peak is None else (peak,)))


def free_mib(plan: Plan, at: int = 0) -> float:
    gpu = plan.placement.shares[at].gpu
    return gpu.free_mib + gpu.held_back_mib


def held_back_mib(plan: Plan) -> float:
    gpu = plan.placement.shares[0].gpu
    return gpu.held_back_mib - gpu.context_mib


@cache
def first_of(machine: str) -> Plan:
    return space(None, machine).best


FIRST = first_of(ADA)


@pytest.mark.parametrize("beyond_mib", [-300, 0, 40, 351, 1200])
def test_what_was_held_beside_the_cache_is_left_for_it_again(beyond_mib: int) -> None:
    peak = seen(FIRST, beyond_mib)
    plan = space(peak).best
    (share,) = plan.placement.shares
    assert share.memory.kv == pytest.approx(free_mib(plan) - peak.cards[0].beside_kv_mib - MARGIN_MIB, abs=1)
    assert launch(plan).kv_bytes == int(share.memory.kv * MIB)
    assert held_back_mib(plan) == pytest.approx(MARGIN_MIB + max(0, beyond_mib), abs=1)
    assert "seen in service, assumed were 352" in reason(plan, "reserve")
    assert reason(plan, "kv_cache").endswith("in bytes")
    assert 0 < (launch(plan).utilization or 0) <= (launch(FIRST).utilization or 0)  # the engine starts where it did


def test_before_the_largest_work_was_seen_a_peak_decides_nothing() -> None:
    """Without activations it would leave more for the cache than vLLM itself finds, or less than it was left with."""
    kv_mib = FIRST.placement.shares[0].memory.kv
    left = Allocated(kv=kv_mib - 300)
    for beyond_mib in (-600, 0, 200, 900, 2000):
        there = space(seen(FIRST, beyond_mib, is_whole=False))
        assert there.best == FIRST
        assert there.now(FIRST, left) == space(None).now(FIRST, left)


def test_one_configuration_of_several_is_found() -> None:
    other = seen(replace(FIRST, parallel=8), 3000)
    wanted = seen(FIRST, 900)
    given = inputs(hardware(ADA), folder_model(MODELS[ADA]), {})
    both = Space(replace(given, memory_peaks=(other, replace(wanted, is_whole=False), wanted))).best
    assert both == space(wanted).best


def test_what_sampling_takes_beyond_a_prompt_stays_beside_what_was_seen() -> None:
    """A full prefill step does not show the memory of sampling all sequences at once."""
    many = {"parallel": "256"}
    first = space(None, **many).best
    (share,) = first.placement.shares
    shape = shape_of(folder_model(MODELS[ADA]))
    batch = Batch(tokens=launch(first).max_num_batched_tokens, seqs=256)
    sampling_mib = share.memory.compute - forward_mib(shape, launch(first).dtype, batch)
    assert sampling_mib > 100
    for beyond_mib in (-600, 0, 900):
        peak = seen(first, beyond_mib)
        plan = space(peak, **many).best
        left_mib = free_mib(plan) - peak.cards[0].beside_kv_mib - MARGIN_MIB
        assert plan.placement.shares[0].memory.kv == pytest.approx(left_mib - sampling_mib, abs=1)


def test_a_peak_beside_which_nothing_fits_is_left_out_and_said() -> None:
    share = FIRST.placement.shares[0]
    peak = seen(FIRST, share.memory.kv + 1000)
    plan = space(peak).best
    assert (launch(plan), plan.placement) == (launch(FIRST), FIRST.placement)
    (said,) = (choice for choice in plan.choices if choice.name == "reserve")
    assert said.is_refusal
    assert said.reason.endswith("seen in service and are not used: nothing would fit")
    assert space(peak, speculation="ngram").predicted.speculation is not None


@pytest.mark.parametrize(
    "changes",
    [{"max_num_batched_tokens": 4096}, {"graph_mode": "PIECEWISE"}, {"dtype": "float16"}],
)
def test_what_was_seen_of_another_configuration_says_nothing(changes: dict[str, object]) -> None:
    assert space(seen(with_launch(FIRST, **changes), 900)).best == FIRST
    assert space(seen(replace(FIRST, parallel=8), 900)).best == FIRST
    drafting = replace(FIRST, speculation=Speculation(kind="ngram", tokens=3))
    assert space(seen(drafting, 900)).best == FIRST
    peak = seen(FIRST, 900)
    elsewhere = replace(peak, cards=(replace(peak.cards[0], device="GPU-other"),))
    assert space(elsewhere).best == FIRST


def test_another_context_is_the_same_configuration() -> None:
    assert "seen in service" in reason(space(seen(replace(FIRST, context=4096), 900)).best, "reserve")


@pytest.mark.parametrize(
    "flags",
    [{"reserve_mib": "700"}, {"engine_arg": "--gpu-memory-utilization 0.5"},
     {"engine_arg": "--kv-cache-memory-bytes 4294967296"}],
)  # fmt: skip
def test_the_users_own_value_wins_and_it_is_said(flags: dict[str, str]) -> None:
    before = space(None, **flags).best
    plan = space(seen(before, 900), **flags).best
    assert launch(plan) == launch(before)
    assert plan.placement == before.placement
    assert reason(plan, "reserve").endswith("beyond the estimate were seen in service and are not used")


def test_a_measured_plan_keeps_all_but_the_bytes_of_its_cache() -> None:
    kv_mib = FIRST.placement.shares[0].memory.kv
    left_mib = Allocated(kv=kv_mib - 300)  # more than was estimated went to the rest
    measured = space(None).at_context(FIRST, 8192)
    assert measured is not None
    for beyond_mib in (100, 600):
        peak = seen(FIRST, beyond_mib + 300)
        plan = space(peak).now(measured, left_mib)
        assert isinstance(plan, Plan)
        assert (plan.key, plan.context) == (measured.key, 8192)
        wanted_mib = free_mib(plan) - peak.cards[0].beside_kv_mib - MARGIN_MIB
        assert plan.placement.shares[0].memory.kv == pytest.approx(wanted_mib, abs=1)
    as_it_was = space(None).now(measured, left_mib)
    assert isinstance(as_it_was, Plan)
    assert as_it_was.placement.shares[0].memory.kv == pytest.approx(left_mib.kv, abs=1)


def test_a_measured_plan_that_would_not_fit_at_its_peak_is_passed_over() -> None:
    measured = space(None).at_context(FIRST, 40_960)
    assert measured is not None
    lacking = space(seen(FIRST, FIRST.placement.shares[0].memory.kv)).now(measured)
    assert isinstance(lacking, str)
    assert "40,960 tokens" in lacking


@given(
    st.sampled_from(sorted(MODELS)),
    st.integers(-4000, 30_000),
    st.integers(0, 2000),
    st.sampled_from([{}, {"parallel": "256"}, {"ubatch": "8192"}]),
)
@settings(max_examples=examples(60))
def test_cache_and_what_was_held_beside_it_are_never_above_what_is_free(
    machine: str, beyond_mib: int, less_mib: int, flags: dict[str, str]
) -> None:
    there = with_cards(machine)
    cards = tuple(replace(card, vram_free_mib=max(0, (card.vram_free_mib or 0) - less_mib)) for card in there.gpus.gpus)
    given_ = inputs(replace(there, gpus=replace(there.gpus, gpus=cards)), folder_model(MODELS[machine]), flags)
    try:
        first, unseen = space(None, machine, **flags).best, Space(given_).best
    except ModelDoesNotFitError:
        return
    whole = seen(first, beyond_mib)
    assert Space(replace(given_, memory_peaks=(replace(whole, is_whole=False),))).best == unseen
    plan = Space(replace(given_, memory_peaks=(whole,))).best
    if not any("seen in service, assumed were" in choice.reason for choice in plan.choices):
        return
    for share, card in zip(plan.placement.shares, whole.cards, strict=True):
        assert share.gpu.id == card.device
        free_now_mib = share.gpu.free_mib + share.gpu.held_back_mib
        assert share.memory.kv + card.beside_kv_mib + MARGIN_MIB <= free_now_mib + 1


def test_the_cache_is_counted_by_the_engines_own_tokens() -> None:
    for machine in MODELS:
        there = space(None, machine)
        plan = there.best
        tokens = there.kv_tokens(plan)
        assert tokens
        predicted = [share.memory.kv for share in plan.placement.shares]
        one_block = max(predicted) / launch(plan).blocks
        assert there.kv_mib(plan, tokens) == pytest.approx(predicted, abs=2 * one_block)


@given(
    st.sampled_from(sorted(MODELS)),
    st.integers(-FAR, FAR),
    st.integers(0, 2000),
    st.booleans(),
    st.sampled_from([None, 0, 300, 4000]),
)
@settings(max_examples=examples(60))
def test_no_plan_counts_on_memory_that_is_not_there(
    machine: str, beyond_mib: int, less_mib: int, is_whole: bool, asked_mib: int | None
) -> None:
    flags = {} if asked_mib is None else {"reserve_mib": str(asked_mib)}
    peak = seen(first_of(machine), beyond_mib, is_whole=is_whole)
    there = with_cards(machine)
    cards = tuple(replace(card, vram_free_mib=max(0, (card.vram_free_mib or 0) - less_mib)) for card in there.gpus.gpus)
    there = replace(there, gpus=replace(there.gpus, gpus=cards))
    given_ = replace(inputs(there, folder_model(MODELS[machine]), flags), memory_peaks=(peak,))
    try:
        plan = Space(given_).best
    except ModelDoesNotFitError:
        return
    for share in plan.placement.shares:
        reserve_mib = share.gpu.held_back_mib - share.gpu.context_mib
        assert reserve_mib >= (MARGIN_MIB if asked_mib is None else asked_mib) - 1e-6
        assert share.memory.kv >= 0
        assert share.memory.compute >= 0
        assert share.memory.total <= share.gpu.free_mib + 1
        assert asked_mib is None or reserve_mib == pytest.approx(asked_mib, abs=1e-6)


@given(st.floats(-FAR, FAR), st.booleans(), st.booleans())
@settings(max_examples=examples(100))
def test_a_reserve_is_never_below_what_stays(beyond_mib: float, late: bool, drafts: bool) -> None:
    card = replace(hardware(ADA).gpus.gpus[0], display=True)
    assumed = reserve_of(card, 24_564.0, asked_mib=None, compiles_late=late, drafts=drafts)
    found = resized(assumed, beyond_mib)
    assert isinstance(found, Reserve)
    assert found.mib >= sum(mib for _, mib in assumed.lasting) == MARGIN_MIB + 256
