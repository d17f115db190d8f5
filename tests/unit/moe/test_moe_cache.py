"""The caches of layers: what may be read, what is evicted, and who decides."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from appliance.moe.cache import (
    GUARD_TOKENS,
    Decision,
    LayerCache,
    Rule,
    Shared,
    SlotsTooFewError,
    Takeover,
    Upload,
    layer_caches,
)
from appliance.moe.cost import Cost
from appliance.moe.uses import Uses
from tests.unit.moe.routing import COST, DESKTOP, tokens


def cache(
    *, slots: int = 6, experts: int = 16, top_k: int = 3, rule: Rule = "priced", cost: Cost = COST, **more: object
) -> LayerCache:
    shared = Shared(uses=Uses(4), in_flight_max_mb=2 * top_k * COST.expert_mb, rule=rule)
    return LayerCache(cost=cost, slots=slots, experts=experts, top_k=top_k, shared=shared, **more)  # type: ignore[arg-type]


def land(one: LayerCache, decision: Decision) -> None:
    for upload in decision.uploads:
        one.landed(upload)
    one.observe()


SLOW = Cost(replace(DESKTOP, pcie_gb_s=3), 2.9)


def test_a_prompt_fills_free_slots_at_once() -> None:
    one = cache(slots=6, cost=SLOW)
    land(one, one.decide((0, 1, 2), is_prompt=True))
    land(one, one.decide((3, 4, 5), is_prompt=True))
    assert one.residents == {0, 1, 2, 3, 4, 5}


def test_a_prompt_keeps_what_it_used_most_however_slow_the_link() -> None:
    one = cache(slots=3, cost=SLOW)
    for used in ((0, 1, 2), (3, 4, 0), (3, 5, 4), (3, 4, 0)):
        land(one, one.decide(used, is_prompt=True))
    assert one.residents == {0, 3, 4}


def test_a_prompt_is_in_no_comparison_of_rules() -> None:
    """Copies that a prompt makes for free would let all-CPU take over on a slow link."""
    told: list[Takeover] = []
    (one,) = layer_caches([SLOW], slots=6, experts=64, top_k=[3], on_takeover=told.append)
    for used in tokens(5, count=3 * GUARD_TOKENS, experts=64, top_k=3):
        land(one, one.decide(used, is_prompt=True))
    assert not told
    assert one.shared.predicted_ms == {}


def test_a_free_slot_is_filled_when_the_uses_so_far_have_cost_as_much_as_the_copy() -> None:
    """At 3 GB/s a copy takes 0.97 ms, 0.69 ms longer than attention and the CPU's work. A first hit saves 0.056 ms, so
    12 uses pay for less, 13 for more. At 50 GB/s a copy delays nothing."""
    one, copied = cache(slots=6, cost=SLOW), []
    for _ in range(13):
        decision = one.decide((0, 1, 2))
        copied.append(len(decision.uploads))
        land(one, decision)
    assert copied == [0] * 12 + [1]
    fast = cache(slots=6, cost=Cost(replace(DESKTOP, pcie_gb_s=50, dram_gb_s=100), 2.9))
    assert len(fast.decide((0, 1, 2)).uploads) == 3


def test_each_expert_is_computed_in_one_place() -> None:
    one = cache()
    for used in tokens(3, count=200, experts=16, top_k=3):
        decision = one.decide(used)
        assert sorted((*decision.gpu, *decision.fetch, *decision.cpu)) == sorted(used)
        assert set(decision.fetch) <= {upload.expert for upload in decision.uploads}
        assert [upload.is_fetch for upload in decision.uploads] == [
            u.expert in decision.fetch for u in decision.uploads
        ]
        land(one, decision)


@given(st.integers(0, 10**6), st.sampled_from(("priced", "lru", "lru-1")), st.integers(3, 9))
def test_slots_in_flight_are_neither_read_nor_evicted(seed: int, rule: Rule, slots: int) -> None:
    """Copies end in a random order, some late, some never, some with an error; each slot knows what is in it."""
    draw = random.Random(seed)
    one = cache(slots=slots, rule=rule)
    content: dict[int, int | None] = {}  # by slot; None while a copy is under way
    under_way: list[Upload] = []
    for used in tokens(seed, count=60, experts=16, top_k=3):
        readable = {expert for expert in content.values() if expert is not None}
        assert one.residents == readable
        decision = one.decide(used)
        assert set(decision.gpu) <= readable
        for upload in decision.uploads:
            assert upload.slot not in {other.slot for other in under_way}
            assert content.get(upload.slot) == upload.victim
            assert upload.expert not in readable
            assert upload.expert not in {other.expert for other in under_way}
            content[upload.slot] = None
            under_way.append(upload)
        assert len(content) <= slots
        assert one.shared.in_flight_mb == pytest.approx(len(under_way) * COST.expert_mb)
        assert one.shared.in_flight_mb <= one.shared.in_flight_max_mb + 1e-9
        before = draw.random() < 0.5
        if not before:
            one.observe()
        draw.shuffle(under_way)
        while under_way and draw.random() < 0.6:
            upload = under_way.pop()
            one.landed(upload)
            content[upload.slot] = upload.expert
        if before:
            one.observe()


def test_a_copy_ends_once() -> None:
    one = cache()
    upload = one.decide((0, 1, 2)).uploads[0]
    one.landed(upload)
    with pytest.raises(KeyError):
        one.landed(upload)


def test_zero_slots_are_all_cpu() -> None:
    one = cache(slots=0)
    for used in tokens(1, count=20, experts=16, top_k=3):
        assert one.decide(used) == Decision((), (), used, (), COST.all_cpu_ms(3))
        one.observe()


def test_slots_for_less_than_a_token_are_refused_with_the_reason() -> None:
    with pytest.raises(SlotsTooFewError, match="2 slots of layer 4 hold less than one token's experts: 3"):
        cache(slots=2, layer=4)


def test_what_is_always_used_stays() -> None:
    one = cache(slots=5, pinned=(14, 15))
    for used in tokens(9, count=100, experts=14, top_k=3):
        decision = one.decide(used)
        assert {14, 15}.isdisjoint(upload.victim for upload in decision.uploads)
        land(one, decision)
    assert {14, 15} <= one.residents


def test_a_token_that_a_layer_cannot_have_and_calls_out_of_order_are_refused() -> None:
    one = cache()
    with pytest.raises(ValueError, match="3 experts, not 2"):
        one.decide((0, 1))
    with pytest.raises(RuntimeError, match="observe"):
        one.observe()
    one.decide((0, 1, 2))
    with pytest.raises(RuntimeError, match="twice"):
        one.decide((0, 1, 2))


def test_the_same_tokens_give_the_same_decisions() -> None:
    def decisions() -> list[Decision]:
        one, found = cache(), []
        for used in tokens(7, count=150, experts=16, top_k=3):
            found.append(one.decide(used))
            land(one, found[-1])
        return found

    assert decisions() == decisions()


def test_an_upload_that_costs_much_is_made_less_often() -> None:
    slow = Cost(replace(DESKTOP, pcie_gb_s=3), 2.9)
    made = []
    for cost in (COST, slow):
        (one,) = layer_caches([cost], slots=6, experts=16, top_k=[3], is_guarded=False)
        count = 0
        for used in tokens(7, count=300, experts=16, top_k=3, reuse=0.2):
            decision = one.decide(used)
            count += len(decision.uploads)
            land(one, decision)
        made.append(count)
    assert made[1] < made[0] / 2


class Misled(Uses):
    """Values upside down: what was used least is taken to be used most."""

    def learn(self, samples: object, counts: object) -> None:
        del samples, counts
        self.weights = [-abs(each) for each in self.weights]


def test_a_rule_that_is_behind_gives_way_and_says_so() -> None:
    told: list[Takeover] = []
    shared = Shared(uses=Misled(4), in_flight_max_mb=6 * COST.expert_mb, on_takeover=told.append)
    one = LayerCache(cost=COST, slots=6, experts=16, top_k=3, shared=shared, is_guarded=True)
    cyclic = tokens(5, count=4 * GUARD_TOKENS, experts=16, top_k=3, reuse=0.75)
    for used in cyclic:
        land(one, one.decide(used))
    assert told
    assert told[0].before == "priced"
    assert told[0].token == GUARD_TOKENS
    assert told[0].after_ms is not None
    assert told[0].after_ms < told[0].before_ms
    assert "takes over from priced at token 256" in told[0].in_words()


def test_ours_is_tried_again_some_time_after_another_rule_took_over() -> None:
    told: list[Takeover] = []
    (one,) = layer_caches([COST], slots=6, experts=16, top_k=[3], on_takeover=told.append)
    one.shared.rule = "cpu"
    for used in tokens(5, count=10 * GUARD_TOKENS, experts=16, top_k=3):
        land(one, one.decide(used))
    assert told[0].before == "cpu"
    assert one.shared.rule == told[-1].after == "priced"
    assert f"priced is tried again instead of {told[-1].before} at token" in told[-1].in_words()


def test_uses_of_an_earlier_run_fill_the_slots() -> None:
    one = cache(slots=4)
    counts = [0, 900, 0, 300, 0, 600, 100, *[0] * 9]
    assert one.begin(1000, counts) == (1, 5, 3, 6)
    assert one.decide((1, 5, 3)).gpu == (1, 5, 3)


def test_too_few_uses_of_an_earlier_run_are_left_out() -> None:
    one = cache(slots=4)
    assert one.begin(255, [100] * 16) == ()
    land(one, one.decide((1, 5, 3), is_prompt=True))
    assert one.residents == {1, 5, 3}
