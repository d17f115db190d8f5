"""What a predicted speed says of how far it may be off, and what several cards do at the same time."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from appliance.engines.llama.planning.placement.intervals import SPREADS, Group, group_of
from appliance.engines.llama.planning.placement.roofline import Roofline, costs_of
from appliance.plan import CHAT_TOKENS_IN, Costs, GpuAllocation, Interval, Placement, Plan, Speed
from appliance.plan.explain import as_document
from appliance.plan.plan import NOTHING
from appliance.tune.search.cost_terms import Candidate, Effects, prefill_terms
from tests.builders import device, model
from tests.golden.machines import MACHINES
from tests.unit.engines.llama.planning.test_plan_gpus import reason, space


@pytest.mark.parametrize(
    ("machine", "name", "quantization", "group"),
    [
        ("h100", "llama-3.3-70b", "Q4_K_M", "one card"),
        ("h200", "gpt-oss-120b", "MXFP4", "mixture on one card"),
        ("2x2080ti-22g", "llama-3.1-8b", "Q8_0", "several cards"),
        ("4090", "gpt-oss-120b", "MXFP4", "card and host"),
        ("cpu-16g", "llama-3.1-8b", "Q4_K_M", "CPU"),
    ],
)
def test_every_plan_says_how_far_its_speed_may_be_off(machine: str, name: str, quantization: str, group: Group) -> None:
    of = model(name, quantization)
    for plan in space(MACHINES[machine], of).all():
        kind = group_of(plan.placement, of)
        assert plan.speed
        assert ratios(plan.speed) == pytest.approx(
            [math.exp(sign * part) for part in SPREADS[kind] for sign in (-1, 1)]
        )
    best = space(MACHINES[machine], of).best
    assert group_of(best.placement, of) == group
    assert best.speed
    said = best.speed.describe()
    assert said in (words(best) if best.placement.shares else value(best, "speed"))
    shown = as_document(best)["speed"]
    assert shown["decode_interval"]["low"] < shown["decode_tokens_per_s"] < shown["decode_interval"]["high"]
    assert shown["prefill_interval"]["low"] < shown["prefill_tokens_per_s"] < shown["prefill_interval"]["high"]


def ratios(speed: Speed) -> list[float]:
    decode, prefill = speed.decode_interval, speed.prefill_interval
    assert decode
    assert prefill
    return [
        decode.low / speed.decode_tokens_per_s,
        decode.high / speed.decode_tokens_per_s,
        prefill.low / speed.prefill_tokens_per_s,
        prefill.high / speed.prefill_tokens_per_s,
    ]


def words(plan: Plan) -> str:
    return reason(plan, "placement")


def value(plan: Plan, name: str) -> str:
    return next(choice.value for choice in plan.choices if choice.name == name)


def test_a_speed_is_told_with_its_interval_and_without_where_it_has_none() -> None:
    plain = Speed(decode_tokens_per_s=36.0, prefill_tokens_per_s=922.0, job_s=1.0)
    assert plain.describe() == "36 tok/s of decode, 922 of prefill"
    assert plain.within(0.1, 0.2).describe() == "36 tok/s of decode (33 to 40), 922 of prefill (755 to 1126)"
    slow = Speed(decode_tokens_per_s=0.96, prefill_tokens_per_s=0.7, job_s=1.0)
    assert slow.within(0.2, 0.1).describe() == "1.0 tok/s of decode (0.8 to 1.2), 0.7 of prefill (0.6 to 0.8)"
    assert Interval(low=1.96, high=2.4).describe() == "2.0 to 2.4"


def test_cards_that_hold_layers_read_a_long_prompt_at_the_same_time() -> None:
    """Each has the next ubatch while the card behind it works on the last: four need a third of the time of one."""
    one, two, four = (split(count) for count in (1, 2, 4))
    assert one.overlap == 0.0 < two.overlap < four.overlap < 0.75
    assert two.prefill_ms(512, 256) == pytest.approx(one.prefill_ms(512, 256))
    assert 0.55 < two.prefill_ms(16384, 8192) / one.prefill_ms(16384, 8192) < 0.65
    assert 0.33 < four.prefill_ms(16384, 8192) / one.prefill_ms(16384, 8192) < 0.45
    assert four.decode_ms(512) == pytest.approx(one.decode_ms(512), rel=0.02)  # one card after the other
    lopsided = split(2, first=30)
    assert lopsided.overlap < two.overlap / 2


def split(count: int, *, first: int | None = None) -> Costs:
    """Return the costs of one model on `count` equal GPUs. Each has an equal run of layers; `first` sets another number
    for the first."""
    of = model("llama-3.1-8b", "Q4_K_M")
    cards = [replace(device(f"GPU-{number}", index=number), tflops=100.0) for number in range(count)]
    ends = [first, 33] if first else [round(33 * (number + 1) / count) for number in range(count)]
    shares = tuple(
        GpuAllocation(gpu=card, device=f"CUDA{card.index}", layers=end - start, memory=NOTHING)
        for card, start, end in zip(cards, [0, *ends], ends, strict=False)
    )
    placement = Placement(shares=shares, split_mode="layer" if count > 1 else "none")
    roofline = Roofline(model=of, kv_type="f16", ubatch=512, dram_gb_s=50.0, upload=cards[0])
    return costs_of(roofline, placement, {card.id: card for card in cards})


def test_nothing_overlaps_beside_weights_in_host_memory() -> None:
    here = space(MACHINES["2x4090"], model("gpt-oss-120b", "MXFP4"))
    assert here.best.placement.cpu_expert_layers
    assert here.costs(here.best).overlap == 0.0


def test_overlap_begins_with_the_second_batch_and_the_tuner_counts_it_as_well() -> None:
    costs = Costs(gpu_prefill_ms=1.0, prefill_depth_us=1.0, copy_ms=3.0, batch=512, overlap=0.5)
    assert costs.prefill_ms(512, 0) == 515.0
    assert costs.prefill_ms(1024, 0) == 0.75 * 1024 + 6
    assert costs.prefill_ms(0, 0) == 0.0
    assert (costs + Costs(gpu_prefill_ms=1.0)).overlap == 0.5
    found = Candidate(key="a", knobs=(), context=4096, work=costs)
    terms = prefill_terms(found, Effects([found], found, {}), 0, 2048)
    assert sum(term.ms for term in terms) == pytest.approx(costs.prefill_ms(2048, 1024))
    assert costs.batch >= CHAT_TOKENS_IN  # a short chat is one batch: nothing overlaps
