"""What holds for plans of every machine and model. `make properties` takes 2,000 examples of each, as a workflow does
every week; without it they are few enough for a minute."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, replace
from itertools import pairwise

from hypothesis import HealthCheck, assume, example, given, settings
from hypothesis import strategies as st

from appliance.engines.llama.planning.memory.memory import KV_BYTES, UBATCH
from appliance.engines.llama.planning.placement.batch import CLEARLY_FASTER
from appliance.engines.llama.planning.placement.context import AS_FAST, MORE_THAN_A_SLIVER
from appliance.engines.llama.planning.placement.placement import EVEN_FOR
from appliance.engines.llama.planning.placement.tensor_mode import CLEARLY as TENSOR_CLEARLY
from appliance.engines.llama.planning.placement.tensor_mode import GOOD_LINK_GB_S, TENSOR
from appliance.engines.llama.planning.space import Space
from appliance.errors import FatalError, ModelDoesNotFitError
from appliance.model import Model
from appliance.plan import CONTEXT_STEP, LONG_PROMPTS, Memory, Plan
from appliance.probe import Gpu, Hardware
from tests.builders import examples, machine
from tests.golden.letters import EMPTY, decode_tokens_per_s
from tests.random_machines import (
    CHAT_IN,
    gpu,
    gpus,
    job_s,
    layer_of,
    machines,
    models,
    sliding,
    space_of,
    stacked,
    with_gpus,
)

SOME, MANY = examples(60), 1000
LONG_IN = LONG_PROMPTS["chat"]
# Faster than that, and another ubatch or a rounder cache is taken for it; an even split may cost a little beside it.
CLEARLY = (1 + EVEN_FOR) / CLEARLY_FASTER
CLEARLY_ROUNDED = (1 + EVEN_FOR) / AS_FAST
SLACK = 1.02  # a split that is as fast as chance allows is taken where it is even
WIDE_MOE = layer_of(dense_mib=1500, expert_mib=2500, k_elements=1024, v_elements=1024)
MODES = ("speed", "balanced", "context")
# A few examples are the same in each run, so that `make test` is repeatable. Many examples are new ones each week.
patient = settings(
    max_examples=SOME, deadline=None, derandomize=SOME < MANY, suppress_health_check=[HealthCheck.too_slow]
)


def planned(hardware: Hardware, model: Model, **flags: str) -> tuple[Space, Plan] | None:
    try:
        space = space_of(hardware, model, **flags)
        return space, space.best
    except ModelDoesNotFitError:
        return None


def is_worse(space: Space, plan: Plan, than: tuple[Space, Plan]) -> bool:
    """True if the plan has less context and is slower. Each plan is judged on its own machine."""
    before, best = than
    is_slower = relied_on_s(space, plan, CHAT_IN) > SLACK * relied_on_s(before, best, CHAT_IN)
    return plan.context < best.context and is_slower


def small_machine(total_mib: int = 8000) -> Hardware:
    return machine(total_mib=total_mib, logical=4, physical=2)


@patient
@given(machines(), models())
@example(  # q8_0 is faster by a tenth but for the rounding of whole layers
    with_gpus(
        small_machine(32000), [gpu(0, free_mib=12000, gb_s=200.0, lanes=1), gpu(1, free_mib=16000, gb_s=360.0, lanes=1)]
    ),
    stacked([layer_of(dense_mib=150, expert_mib=800, k_elements=1024, v_elements=1024)] * 12, 131072, experts=8),
)
@example(  # with a ubatch of 512 a layer more lies on a slower card
    with_gpus(
        small_machine(128000), [gpu(at, free_mib=12000, gb_s=gb_s) for at, gb_s in enumerate((200.0, 200.0, 936.0))]
    ),
    stacked([layer_of(dense_mib=600, expert_mib=2500, k_elements=1024, v_elements=1024)] * 4, 131072, experts=8),
)
@example(  # split mode tensor has room with a ubatch of 256
    with_gpus(small_machine(), [gpu(at, free_mib=4000, gb_s=200.0) for at in range(2)]),
    stacked([layer_of(dense_mib=20, expert_mib=800, k_elements=1024, v_elements=1024)] * 6, 4096, experts=8),
)
@example(  # with two layers on the CPU the experts of one more would fit
    with_gpus(small_machine(32000), [gpu(0, gb_s=200.0, lanes=1), gpu(1, gb_s=200.0)]),
    stacked(
        [
            layer if at in (0, 6) else sliding(layer)
            for at, layer in enumerate([layer_of(dense_mib=150, expert_mib=2500, v_elements=1024)] * 11)
        ],
        40960,
        experts=8,
    ),
)
def test_no_plan_is_beaten_in_context_and_in_speed_by_another_of_its_space(hardware: Hardware, model: Model) -> None:
    """The other plan may have any ubatch. `clearly` says what counts for split mode tensor."""
    found = planned(hardware, model)
    assume(found is not None)
    assert found is not None
    space, best = found
    assert beating(space, best, space.all()) == []


def test_no_plan_beats_one_that_copies_weights() -> None:
    model = stacked([layer_of(dense_mib=150)] * 7, 4096)
    found = planned(with_gpus(small_machine(), [gpu(0, free_mib=2500, gb_s=200.0)]), model)
    assert found is not None
    assert beating(*found, found[0].all()) == []


def test_experts_leave_the_gpus_where_that_makes_a_slow_card_needless() -> None:
    """Found with this property: the fewest that fit would have filled the slow card, too."""
    full = layer_of(dense_mib=1500, expert_mib=800, k_elements=1024, v_elements=1024)
    layers = [sliding(full) if at % 2 else full for at in range(10)]
    speeds = ((4000, 1790.0, 16), (24000, 600.0, 1), (4000, 200.0, 1))
    cards = [gpu(at, free_mib=mib, gb_s=gb_s, lanes=lanes) for at, (mib, gb_s, lanes) in enumerate(speeds)]
    hardware = with_gpus(machine(total_mib=8000, logical=16, physical=8), cards)
    found = planned(hardware, stacked(layers, 131072, experts=64))
    assert found is not None
    space, best = found
    assert [share.gpu.index for share in best.placement.shares] == [0, 1]
    assert beating(space, best, space.all()) == []


def test_what_one_card_costs_is_not_told_of_another() -> None:
    """Found by `make properties`: the large slow card carries more, and both are the first to the engine."""
    cards = [gpu(0, free_mib=2500, gb_s=600.0, lanes=1), gpu(1, free_mib=4000, gb_s=200.0, lanes=1)]
    found = planned(with_gpus(small_machine(), cards), stacked([layer_of(dense_mib=150)] * 2, 40960))
    assert found is not None
    space, best = found
    on_one = {plan.placement.shares[0].gpu.index: plan for plan in space.all() if plan.placement.summary() == "CUDA0 3"}
    assert sorted(on_one) == [0, 1]
    assert job_s(space, on_one[1]) > 2 * job_s(space, on_one[0])
    assert beating(space, best, space.all()) == []


def beating(space: Space, best: Plan, others: Sequence[Plan]) -> list[str]:
    """Return the keys of plans that beat `best`: as much context, clearly faster near empty, and no slower with half of
    the context, nor with a long prompt."""
    half = best.context / 2
    near, deep, long = job_s(space, best), job_s(space, best, half), job_s(space, best, tokens_in=LONG_IN)
    return [
        plan.key
        for plan in others
        if plan.context >= best.context
        and near > clearly(best, plan) * job_s(space, plan)
        and deep > job_s(space, plan, half)
        and long >= job_s(space, plan, tokens_in=LONG_IN)
    ]


def is_slower(one: tuple[Space, Plan], other: tuple[Space, Plan]) -> bool:
    """True if `one` is slower with a short prompt, by which placements are compared, and with a long one, by which a
    ubatch is chosen."""
    return all(relied_on_s(*one, tokens) > SLACK * relied_on_s(*other, tokens) for tokens in (CHAT_IN, LONG_IN))


def relied_on_s(space: Space, plan: Plan, tokens_in: int) -> float:
    """Return the seconds that a prediction may promise. Split mode tensor's are multiplied, because that mode is
    experimental."""
    return job_s(space, plan, tokens_in=tokens_in) * (TENSOR_CLEARLY if plan.placement.split_mode == TENSOR else 1.0)


def clearly(best: Plan, plan: Plan) -> float:
    """Return how many times as fast another plan must be to count as the better prediction. Experts leave the GPUs
    before attention does: attention on the CPU slows with each token, so its place is worth as much as an exact cache.
    Split mode tensor is experimental, and its constants are fitted to three figures from two cards with good links.
    With other cards it is measured, and not predicted."""
    if plan.placement.split_mode != TENSOR:
        leaves_gpus = plan.placement.cpu_layers > 0 == best.placement.cpu_layers
        return CLEARLY if plan.kv_type == best.kv_type and not leaves_gpus else CLEARLY_ROUNDED
    links = [share.gpu.pinned_gb_s for share in plan.placement.shares]
    return TENSOR_CLEARLY if len(links) == 2 and min(links) >= GOOD_LINK_GB_S else float("inf")


@patient
@given(machines(), models(), st.sampled_from(["host", "card", "bandwidth", "another"]), st.data())
def test_a_better_machine_is_never_worse_in_context_and_in_speed(
    hardware: Hardware, model: Model, what: str, data: st.DataObject
) -> None:
    before = planned(hardware, model)
    assume(before is not None)
    assert before is not None
    better = improved(hardware, what, data.draw(gpus()))
    after = planned(better, model)
    assert after is not None, "what had room has none on a better machine"
    assert not is_worse(*after, before), (before[1].key, after[1].key)


@patient
@given(machines(), models(), st.sampled_from(["host", "card", "bandwidth", "another"]), st.data())
def test_a_better_machine_is_never_worse_in_the_terms_of_its_mode(
    hardware: Hardware, model: Model, what: str, data: st.DataObject
) -> None:
    """Mode `speed` must be no slower on a better machine. Mode `context` must hold no less, except for a sliver:
    placements are chosen near empty, while its context is counted by reading along when full."""
    better = improved(hardware, what, data.draw(gpus()))
    for mode in ("speed", "context"):
        flags = {"mode": mode, "ubatch": str(UBATCH)}
        before, after = planned(hardware, model, **flags), planned(better, model, **flags)
        assert (before is None) or after is not None, "what had room has none on a better machine"
        if before is None or after is None:
            continue
        if mode == "context" and reads_along(before) == reads_along(after):
            assert after[1].context * MORE_THAN_A_SLIVER >= before[1].context, (before[1].key, after[1].key)
        elif mode == "speed":
            assert not is_slower(after, before), (before[1].key, after[1].key)


def reads_along(found: tuple[Space, Plan]) -> bool:
    """True if a usable context can be read along with when full. Mode `context` then goes by that, else by what
    fits."""
    return found[0].context_plan.reads_along


@st.composite
def cards_of_a_generation(draw: st.DrawFn) -> tuple[Gpu, Gpu]:
    """Two cards, the second with more memory and no less bandwidth."""
    sizes = draw(st.lists(st.sampled_from(range(4000, 33000, 1000)), min_size=2, max_size=2, unique=True).map(sorted))
    speeds = draw(st.lists(st.sampled_from([200.0, 360.0, 400.0, 600.0, 936.0]), min_size=2, max_size=2).map(sorted))
    small, large = (gpu(0, free_mib=mib, gb_s=gb_s) for mib, gb_s in zip(sizes, speeds, strict=True))
    return small, large


@patient
@given(machines(cards=st.just([])), models(), cards_of_a_generation(), st.sampled_from(MODES))
def test_more_memory_never_gives_less_context_at_the_same_speed(
    hardware: Hardware, model: Model, cards: tuple[Gpu, Gpu], mode: str
) -> None:
    """The same speed means within a tenth, and within 3 % in mode `speed`, which keeps 0.97 of the best. One ubatch is
    given for all. A smaller one leaves room for more, but is taken only if layers would leave a faster card."""
    flags = {"mode": mode, "ubatch": str(UBATCH)}
    before, after = (planned(with_gpus(hardware, [card]), model, **flags) for card in cards)
    assume(before is not None)
    assert before is not None
    assert after is not None, "what had room has none with more memory"
    slow, fast = sorted((decode(*before), decode(*after)))
    if fast <= slow * (1.03 if mode == "speed" else 1.1):
        assert after[1].context >= kept_context(before[1], after[1]), (before[1].key, after[1].key)


def decode(space: Space, plan: Plan) -> float:
    return decode_tokens_per_s(space.costs(plan), EMPTY)


def kept_context(plan: Plan, beside: Plan) -> float:
    """Return the tokens of context that the plan `beside` must have at least. An exacter cache may cost a sliver of
    them."""
    is_exacter = KV_BYTES[beside.kv_type] > KV_BYTES[plan.kv_type]
    return plan.context / MORE_THAN_A_SLIVER if is_exacter else plan.context


def test_a_faster_card_takes_no_speed_away() -> None:
    """Found with this property: a ubatch of 256 put one more layer on the slow cards, and with a faster card it did
    not."""
    cards = [gpu(at, free_mib=2500, gb_s=200.0, lanes=1) for at in range(2)]
    slow = with_gpus(small_machine(), [*cards, gpu(2, free_mib=4000, gb_s=360.0, lanes=4)])
    model = stacked([layer_of(dense_mib=600)] * 12, 40960)
    before, after = planned(slow, model), planned(improved(slow, "bandwidth", cards[0]), model)
    assert before is not None
    assert after is not None
    assert not is_worse(*after, before), (before[1].key, after[1].key)


def test_a_faster_card_of_two_takes_no_speed_away_that_a_prediction_may_rely_on() -> None:
    """Found with this property: the faster card sped up whole layers by the lead that split mode tensor needs. Split
    mode tensor itself gained nothing."""
    cards = [gpu(at, free_mib=6000, gb_s=360.0) for at in range(2)]
    slow = with_gpus(small_machine(), cards)
    model = stacked([layer_of(dense_mib=600, k_elements=1024, v_elements=1024)] * 7, 131072)
    before, after = (
        planned(slow, model, kv_type="f16"),
        planned(improved(slow, "bandwidth", cards[0]), model, kv_type="f16"),
    )
    assert before is not None
    assert after is not None
    assert before[1].placement.split_mode == TENSOR
    assert not is_worse(*after, before), (before[1].key, after[1].key)


def test_a_third_card_with_a_slow_link_takes_no_pair_apart() -> None:
    """Found with this property: the first two by bandwidth were the only pair for split mode tensor."""
    two = with_gpus(small_machine(), [gpu(at, gb_s=360.0) for at in range(2)])
    model = stacked([layer_of(dense_mib=600, k_elements=1024, v_elements=1024)] * 9, 131072)
    third = gpu(0, free_mib=6000, gb_s=936.0, lanes=4)
    before, after = planned(two, model), planned(improved(two, "another", third), model)
    assert before is not None
    assert after is not None
    assert after[1].placement.split_mode == TENSOR
    assert not is_worse(*after, before), (before[1].key, after[1].key)


def test_a_fourth_card_takes_no_context_away() -> None:
    """Found with this property: a ubatch of 256 gave more context on two of three cards, and was not taken with a
    fourth."""
    full = layer_of(dense_mib=20, k_elements=1024, v_elements=1024)
    model = stacked([sliding(full) if at % 2 else full for at in range(5)], 131072)
    three = [
        gpu(0, free_mib=2500, gb_s=200.0, lanes=4),
        *(gpu(at, free_mib=2500, gb_s=936.0, lanes=1) for at in (1, 2)),
    ]
    before = planned(with_gpus(small_machine(), three), model)
    after = planned(
        improved(with_gpus(small_machine(), three), "another", gpu(0, free_mib=2500, gb_s=936.0, lanes=4)), model
    )
    assert before is not None
    assert after is not None
    assert not is_worse(*after, before), (before[1].key, after[1].key)


def improved(hardware: Hardware, what: str, another: Gpu) -> Hardware:
    memory, found = hardware.memory, hardware.gpus.gpus
    if what == "another":
        return with_gpus(hardware, (*found, another))
    if what == "host" or not found:
        more = replace(memory, total_mib=2 * memory.total_mib, available_mib=memory.available_mib + memory.total_mib)
        return replace(hardware, memory=more)
    first = found[0]
    if what == "card":
        mib = (first.vram_free_mib or 0) + 4096
        first = replace(first, vram_free_mib=mib, vram_total_mib=mib)
    else:
        first = replace(first, bandwidth_gb_s=2 * (first.bandwidth_gb_s or 0.0))
    return with_gpus(hardware, (first, *found[1:]))


@patient
@given(machines(cards=st.just([])), models(), st.lists(gpus(), min_size=2, max_size=3), st.data())
def test_equal_cards_in_other_slots_make_an_equal_plan(
    hardware: Hardware, model: Model, cards: list[Gpu], data: st.DataObject
) -> None:
    """The cards differ only in their links, and come in any order."""
    first = cards[0]
    equal = [replace(first, pcie_width=card.pcie_width, pcie_width_max=card.pcie_width) for card in cards]
    before = planned(with_gpus(hardware, equal), model)
    after = planned(with_gpus(hardware, data.draw(st.permutations(equal))), model)
    assert (before is None) == (after is None)
    if before and after:
        assert as_seen(*before) == as_seen(*after)


def as_seen(space: Space, plan: Plan) -> tuple[object, ...]:
    shares = [(share.layers, share.memory, share.gpu.upload_gb_s) for share in plan.placement.shares]
    return plan.context, plan.kv_type, plan.placement.cpu_layers, plan.placement.cpu_expert_layers, shares, plan.speed


@patient
@given(machines(), models(), st.sampled_from(MODES))
def test_no_term_of_memory_is_negative_and_the_sum_is_within_what_is_free(
    hardware: Hardware, model: Model, mode: str
) -> None:
    found = planned(hardware, model, mode=mode)
    assume(found is not None)
    assert found is not None
    free = {gpu.uuid: gpu.vram_free_mib or 0 for gpu in hardware.gpus.gpus}
    for plan in found[0].all():
        assert all(value >= 0 for value in terms(plan.memory))
        assert plan.memory.total <= plan.usable_mib <= hardware.memory.usable_mib
        for share in plan.placement.shares:
            assert all(value >= 0 for value in terms(share.memory))
            assert share.memory.total <= share.gpu.free_mib == free[share.gpu.id] - share.gpu.held_back_mib


def terms(memory: Memory) -> list[float]:
    return [getattr(memory, field.name) for field in fields(memory)]


@patient
@given(machines(), models())
@example(  # balanced takes split mode tensor beside whole layers on both cards; speed has them on one
    with_gpus(small_machine(), [gpu(0, free_mib=2500, gb_s=200.0), gpu(1, free_mib=2500, gb_s=360.0)]),
    stacked([layer_of(dense_mib=150, k_elements=1024, v_elements=1024)] * 2, 131072),
)
@example(  # weights are copied: balanced reads a long prompt sooner with 512 at a time, context has room for 256
    with_gpus(small_machine(32000), [gpu(at, free_mib=6000, gb_s=200.0, lanes=1) for at in range(2)]),
    stacked([layer_of(dense_mib=1500, expert_mib=2500)] * 4, 40960, experts=8),
)
@example(  # weights are copied: with the ubatch that suits balanced best it would have less context than speed
    with_gpus(
        machine(total_mib=16000, logical=4, physical=2),
        [gpu(0, free_mib=6000, gb_s=200.0, lanes=1), gpu(1, free_mib=16000, gb_s=936.0, lanes=1)],
    ),
    stacked([WIDE_MOE] + [sliding(WIDE_MOE)] * 5, 131072, experts=64),
)
@example(  # a ubatch of 256 has a layer more on the faster card: context takes it, balanced reads a long prompt sooner
    with_gpus(small_machine(), [gpu(0, free_mib=6000, gb_s=360.0, lanes=1), gpu(1, gb_s=936.0, lanes=1)]),
    stacked([layer_of(dense_mib=20, expert_mib=800)] * 8, 40960, experts=8),
)
@example(  # weights are copied: balanced gave a tenth of a chat's speed for 3 % of a long prompt's time
    with_gpus(machine(total_mib=64000, logical=4, physical=2), [gpu(0, free_mib=8000, gb_s=200.0, lanes=1)]),
    stacked([layer_of(dense_mib=1500, expert_mib=2500)] * 7, 40960, experts=8),
)
def test_modes_are_ordered_in_context_and_in_speed(hardware: Hardware, model: Model) -> None:
    """Each mode has its own ubatch. One may have no room for a ubatch with which another reads a long prompt sooner.
    With one ubatch for all, only a chat's speed counts."""
    found = {mode: planned(hardware, model, mode=mode) for mode in MODES}
    assert len({plan is None for plan in found.values()}) == 1
    speed, balanced, context = (found[mode] for mode in MODES)
    if speed and balanced and context:
        assert speed[1].context <= balanced[1].context <= context[1].context
        assert not is_slower(speed, balanced)
        assert not is_slower(balanced, context)
    of_one = [each for mode in MODES if (each := planned(hardware, model, mode=mode, ubatch=str(UBATCH)))]
    for one, other in pairwise(of_one):
        assert relied_on_s(*one, CHAT_IN) <= SLACK * relied_on_s(*other, CHAT_IN), (one[1].key, other[1].key)


@patient
@given(machines(), models(), st.sampled_from(["8192", "100000"]))
def test_what_is_asked_for_is_planned_or_refused_in_words(hardware: Hardware, model: Model, context: str) -> None:
    said = outcome(hardware, model, int(context))
    assert said in ("10 and a hint", "31 and a hint", "as asked for")


def outcome(hardware: Hardware, model: Model, context: int) -> str:
    try:
        plan = space_of(hardware, model, ctx_size=str(context)).best
    except FatalError as error:
        return f"{error.exit_code} and {'a hint' if error.hint else 'none'}"
    return "as asked for" if 0 <= plan.context - context < CONTEXT_STEP else f"{plan.context:,}"
