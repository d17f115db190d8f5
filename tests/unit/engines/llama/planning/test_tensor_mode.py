"""Split mode tensor: who may have it, what it takes of each card, and when a prediction is one."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from appliance.engines.llama.planning.memory.memory import MIB, kv_mib, layers_of
from appliance.engines.llama.planning.placement.context import ContextPlan
from appliance.engines.llama.planning.placement.placement import PlacementJob, Resources
from appliance.engines.llama.planning.placement.tensor_mode import exchanged, teams, why_not
from appliance.engines.llama.planning.placement.tensor_placement import place_same, place_tensors
from appliance.engines.llama.planning.space import Space
from appliance.engines.llama.process.server import placement_arguments
from appliance.image_facts import EngineFacts
from appliance.model import Model, unread_projector
from appliance.plan import Device, Placement, Plan
from appliance.plan.parts.speeds import rate
from appliance.probe import Gpu, Hardware
from appliance.settings import resolve_settings
from tests.builders import facts, model
from tests.golden.machines import MACHINES
from tests.shapes import PUBLISHED

MODES = ("none", "layer", "row", "tensor")


def card(index: int, free_mib: float = 23000.0, *, gb_s: float = 750.0, link_gb_s: float = 24.0) -> Device:
    return Device(
        id=str(index),
        name=f"GPU {index}",
        index=index,
        free_mib=free_mib,
        held_back_mib=1024.0,
        bandwidth_gb_s=gb_s,
        upload_gb_s=link_gb_s / 2,
        pinned_gb_s=link_gb_s,
    )


def job(of: Model, **changes: object) -> PlacementJob:
    found = PlacementJob(model=of, context=8192, kv_type="f16", ubatch=512, parallel=4)
    return replace(found, **changes)  # type: ignore[arg-type]


def placements(of: Model, *devices: Device, **changes: object) -> list[Placement]:
    resources = Resources(devices=devices, spare_mib=64000.0, dram_gb_s=40.0)
    found = place_tensors(job(of, **changes), resources, MODES, teams(devices))
    return [placed.placement for placed in found]


def machine(gpus: int, *, width: int = 16, free_mib: int | None = None) -> Hardware:
    """Return a machine with equal GPUs of 24 GB on PCIe 4.0."""
    hardware = MACHINES["2x4090"]
    first = hardware.gpus.gpus[0]

    def gpu(index: int) -> Gpu:
        free = first.vram_free_mib if free_mib is None else free_mib
        return replace(
            first, index=index, uuid=f"GPU-{index}", pcie_width=width, pcie_width_max=width, vram_free_mib=free
        )

    return replace(hardware, gpus=replace(hardware.gpus, gpus=tuple(gpu(at) for at in range(gpus))))


def space(hardware: Hardware, of: Model, *, engine: EngineFacts | None = None, **flags: str) -> Space:
    image, known = facts(has_cuda=True)
    return Space(resolve_settings(flags, {}), image, engine or known, hardware, of)


def large() -> Model:
    """Return a model of the trusted architecture that is too large for one GPU of 24 GB."""
    return replace(model("qwen3.6-27b", "Q8_0"), architecture="llama")


def splits(plans: list[Plan]) -> set[str]:
    return {plan.placement.split_mode for plan in plans}


def test_two_cards_may_split_every_matrix_and_rows_are_no_more() -> None:
    found = space(MACHINES["2x2080ti-22g"], model("llama-3.1-8b", "F16")).all()
    assert splits(found) >= {"tensor"}
    assert "row" not in splits(found)
    split = [plan for plan in found if plan.placement.split_mode == "tensor"]
    assert {plan.kv_type for plan in split} == {"f16", "q8_0"}
    assert all(plan.memory.total <= plan.usable_mib for plan in split)


def test_where_the_engine_cannot_there_is_none() -> None:
    _, engine = facts(has_cuda=True)
    old = replace(engine, split_modes=("none", "layer", "row"))
    assert splits(space(MACHINES["2x2080ti-22g"], model("llama-3.1-8b", "F16"), engine=old).all()) <= {"none", "layer"}


@pytest.mark.parametrize("architecture", ["deepseek2", "nemotron_h", "gemma3n", "olmo2", "hrm_text"])
def test_architectures_that_llama_cpp_does_not_split_are_named(architecture: str) -> None:
    of = replace(model("qwen3-8b", "Q8_0"), architecture=architecture)
    assert why_not(of, MODES) == f"llama.cpp does not split {architecture} so"
    assert placements(of, card(0), card(1)) == []


@pytest.mark.parametrize("kv_type", ["f16", "bf16", "q8_0", "q4_0"])
def test_these_types_of_the_cache_are_split(kv_type: str) -> None:
    (found,) = placements(model("qwen3-8b", "Q8_0"), card(0), card(1), kv_type=kv_type)
    kept = kv_mib(model("qwen3-8b", "Q8_0"), kv_type, 8192)
    assert sum(share.memory.kv for share in found.shares) == pytest.approx(kept, rel=0.05)


@pytest.mark.parametrize("kv_type", ["q4_1", "q5_0", "q5_1", "iq4_nl", "q8_0/q4_0"])
def test_others_end_in_an_assertion_of_the_engine(kv_type: str) -> None:
    of = model("qwen3-8b", "Q8_0")
    assert why_not(of, MODES, kv_type) == f"it takes no cache of type {kv_type}"
    assert placements(of, card(0), card(1), kv_type=kv_type) == []


def test_a_rounded_cache_is_priced_as_it_was_measured() -> None:
    """GLM 4.5 Air on two cards with ROCm: 0.81 of f16 at 2,048 tokens, 0.59 at 32,768 (llama.cpp#21788)."""
    here = space(machine(2), large(), ctx_size="32768")
    found = {plan.kv_type: plan for plan in here.all() if plan.placement.split_mode == "tensor"}
    exact, rounded = here.costs(found["f16"]), here.costs(found["q8_0"])
    assert rounded.gpu_depth_us == pytest.approx(2.3 * exact.gpu_depth_us)
    attending = sum(layer.k_elements > 0 and not layer.is_draft for layer in large().stack)
    assert rounded.fixed_ms - exact.fixed_ms == pytest.approx(0.074 * attending)


def test_two_cards_that_hold_a_70b_with_a_rounded_cache_alone_split_every_matrix() -> None:
    of = model("llama-3.3-70b", "Q4_K_M")
    here = space(machine(2), of)
    best = here.best
    assert (best.kv_type, best.placement.split_mode) == ("q8_0", "tensor")
    assert here.context_plan.placed.placement.split_mode == "layer"
    assert best.context == here.context_plan.context
    reasons = {choice.name: choice.reason for choice in best.choices}
    assert reasons["kv_type"] == "f16 would not fit in split mode tensor; rounded at almost no loss"
    assert best.speed is not None
    assert best.speed.decode_tokens_per_s > 1.2 * here.context_plan.placed.speed.decode_tokens_per_s


def test_layers_on_the_cpu_and_heads_without_a_kernel_exclude_it() -> None:
    of = model("qwen3-8b", "Q8_0")
    layers = len(layers_of(of))
    assert len(placements(of, card(0), card(1))) == 1
    assert placements(of, card(0), card(1), gpu_layers=layers) == []
    assert len(placements(of, card(0), card(1), gpu_layers=layers + 1)) == 1
    assert placements(model("qwen3-30b-a3b", "Q4_K_M"), card(0), card(1), cpu_expert_layers=4) == []
    odd = replace(of, stack=tuple(replace(layer, k_elements=8 * 160, v_elements=8 * 160) for layer in of.stack))
    assert placements(odd, card(0), card(1)) == []


def test_beside_a_projector_whole_layers_are_used() -> None:
    of = replace(model("qwen3-8b", "Q8_0"), projector=unread_projector(Path("mmproj-F16.gguf"), 1000))
    assert placements(of, card(0), card(1)) == []


def test_slices_unified_memory_and_a_single_lane_take_no_part() -> None:
    of = model("qwen3-8b", "Q8_0")
    assert placements(of, card(0), replace(card(1), is_slice=True)) == []
    assert placements(of, card(0), replace(card(1), is_unified=True)) == []
    assert placements(of, card(0), card(1, link_gb_s=0.8)) == []
    (found,) = placements(of, card(0), card(1, link_gb_s=0.8), card(2))
    assert [share.gpu.index for share in found.shares] == [0, 2]


names = st.sampled_from(sorted(set(PUBLISHED) - {"deepseek-v3"}))


@given(names, st.lists(st.tuples(st.integers(4000, 90000), st.sampled_from([300.0, 750.0])), min_size=2, max_size=4))
def test_no_term_is_negative_and_parts_add_up_to_no_less_than_the_model(
    name: str, cards: list[tuple[int, float]]
) -> None:
    of = model(name, "Q4_K_M")
    devices = [card(at, float(free), gb_s=gb_s) for at, (free, gb_s) in enumerate(cards)]
    for found in placements(of, *devices):
        memories = [share.memory for share in found.shares]
        assert all(m.weights > 0 and m.kv > 0 and m.compute > 0 and m.state >= 0 for m in memories)
        assert all(share.memory.total <= share.gpu.free_mib for share in found.shares)
        loaded = sum(layer.dense_bytes + layer.expert_bytes for layer in layers_of(of) if not layer.is_draft)
        assert sum(m.weights for m in memories) >= (loaded + of.output_bytes) / MIB - 1e-6
        assert sum(m.kv for m in memories) >= kv_mib(of, "f16", 8192) - 1e-6
        assert found.gpu_layers == len(layers_of(of)) + 1


def test_equal_cards_get_equal_parts_and_others_by_bandwidth_or_by_memory() -> None:
    of = model("qwen3-8b", "Q8_0")
    (even,) = placements(of, card(0), card(1))
    assert even.parts == (1, 1)
    assert even.shares[0].memory == even.shares[1].memory
    assert even.summary() == "CUDA0 50 %, CUDA1 50 % of 37 layers (tensor)"
    (fast,) = placements(of, card(0, gb_s=900.0), card(1, gb_s=300.0))
    assert fast.parts == (75, 25)
    assert fast.summary() == "CUDA0 75 %, CUDA1 25 % of 37 layers (tensor)"
    assert fast.knobs == (("placement", "CUDA0 37, CUDA1 37"), ("split", "tensor 75:25"))
    (large_and_small,) = placements(of, card(0, 12000.0, gb_s=300.0), card(1, 4000.0, gb_s=300.0))
    assert large_and_small.parts == (75, 25)


def test_the_engine_is_told_parts_and_all_layers() -> None:
    _, engine = facts(has_cuda=True)
    found = space(MACHINES["2x2080ti-22g"], model("llama-3.1-8b", "F16")).all()
    plan = next(plan for plan in found if plan.placement.split_mode == "tensor")
    argv = placement_arguments(plan, engine)
    told = dict(zip(argv[::2], argv[1::2], strict=True))
    assert told["--split-mode"] == "tensor"
    assert told["--tensor-split"] == "1,1"
    assert told["--gpu-layers"] == "33"
    assert told["--device"] == "CUDA0,CUDA1"


def test_each_card_reads_its_part_and_what_they_exchange_is_added() -> None:
    here = space(machine(2), large(), kv_type="f16", ctx_size="8192")
    found = here.all()
    whole, split = (next(plan for plan in found if plan.placement.split_mode == mode) for mode in ("layer", "tensor"))
    of_layers, of_tensors = here.costs(whole), here.costs(split)
    more = exchanged(large(), [share.gpu for share in split.placement.shares], of_tensors.batch)
    assert of_tensors.gpu_ms == pytest.approx(of_layers.gpu_ms / 2, rel=0.01)
    assert of_tensors.gpu_prefill_ms - more.gpu_prefill_ms == pytest.approx(of_layers.gpu_prefill_ms / 2, rel=0.01)
    assert more.fixed_ms == pytest.approx(2 * 64 * 0.036, rel=0.1)


def test_heads_that_do_not_divide_evenly_are_waited_for() -> None:
    of = large()
    two, three = (
        place_tensors(job(of), Resources(devices=cards, spare_mib=64000.0, dram_gb_s=40.0), MODES, [cards])[0].speed
        for cards in ((card(0), card(1)), (card(0), card(1), card(2)))
    )
    assert three.decode_tokens_per_s < two.decode_tokens_per_s  # 4 heads: two cards wait for the one with two


def test_it_is_predicted_where_it_is_clearly_faster_over_a_good_link() -> None:
    of = large()
    best = space(machine(2), of, ctx_size="8192").best
    assert best.placement.split_mode == "tensor"
    reason = next(choice.reason for choice in best.choices if choice.name == "placement")
    assert "each matrix is split over 2 cards (--split-mode tensor, experimental in llama.cpp)" in reason
    assert space(machine(2, width=4), of, ctx_size="8192").best.placement.split_mode == "layer"
    unknown = replace(of, architecture="qwen35moe")
    own = replace(of, architecture="qwen35")
    assert space(machine(2), own, ctx_size="8192").best.placement.split_mode == "tensor"
    assert space(machine(2), unknown, ctx_size="8192").best.placement.split_mode == "layer"
    assert "tensor" in splits(space(machine(2), unknown, ctx_size="8192").all())


def split_of(here: Space) -> tuple[str, str]:
    """Return the value and the reason of the choice of the split mode."""
    (found,) = [choice for choice in here.best.choices if choice.name == "split"]
    assert here.best.placement.split_mode == found.value
    return found.value, found.reason


def test_the_taken_mode_tells_the_speeds_of_both() -> None:
    here = space(machine(2), large(), ctx_size="8192")
    mode, why = split_of(here)
    assert mode == "tensor"
    speed, layers = here.best.speed, here.context_plan.placed.speed
    assert speed is not None
    said = f"decode {rate(speed.decode_tokens_per_s)} tok/s, else {rate(layers.decode_tokens_per_s)}"
    assert said in why


def slow(hardware: Hardware) -> Hardware:
    gpus = tuple(replace(gpu, bandwidth_gb_s=360.0) for gpu in hardware.gpus.gpus)
    return replace(hardware, gpus=replace(hardware.gpus, gpus=gpus))


NOT_TAKEN = {
    "no run with qwen35moe is known": (machine(2), "qwen35moe", {}),
    "the link takes 6.7": (machine(2, width=4), "llama", {}),
    "predicted on two cards only": (slow(machine(4, free_mib=10_000)), "llama", {}),
    "a card lacks": (machine(2, free_mib=18_000), "llama", {"ctx_size": "100000", "kv_type": "f16"}),
    "llama.cpp does not split deepseek2 so": (machine(2), "deepseek2", {}),
    "it takes no cache of type q5_0": (machine(2), "llama", {"kv_type": "q5_0"}),
    "layers stay outside of the GPUs, as asked for": (machine(2), "llama", {"gpu_layers": "20"}),
    "over links of 2 GB/s or more": (machine(2, width=1), "llama", {}),
}


@pytest.mark.parametrize("words", NOT_TAKEN)
def test_where_it_is_not_taken_the_reason_is_told(words: str) -> None:
    hardware, architecture, flags = NOT_TAKEN[words]
    of = replace(large(), architecture=architecture)
    here = space(hardware, of, engine=None, **({"ctx_size": "8192"} | flags))
    mode, why = split_of(here)
    assert mode != "tensor"
    assert words in why


def test_a_gain_that_is_too_small_is_told_with_its_bound() -> None:
    _, why = split_of(space(machine(2), model("llama-3.1-8b", "Q4_K_M"), ctx_size="8192"))
    assert "so it has to be 1.25 times as fast" in why
    gain = re.search(r"a chat job ([\d.]+) times as fast", why)
    assert gain is not None
    assert float(gain[1]) < 1.25


def test_a_link_that_no_probe_found_is_told_as_unknown() -> None:
    found = machine(2)
    gpus = tuple(
        replace(gpu, pcie_generation=None, pcie_generation_max=None, pcie_width=None, pcie_width_max=None)
        for gpu in found.gpus.gpus
    )
    hardware = replace(found, gpus=replace(found.gpus, gpus=gpus), speeds=None)
    assert "the link is unknown and taken as 6.3" in split_of(space(hardware, large(), ctx_size="8192"))[1]


def test_a_single_card_has_no_split_to_choose() -> None:
    assert not [choice for choice in space(machine(1), large()).best.choices if choice.name == "split"]


def test_plans_beside_a_pair_that_is_not_the_first_are_of_that_pair() -> None:
    """A plan's key names no GPU, so plans on two different pairs would have the same key."""
    equal = machine(3)
    first, *others = equal.gpus.gpus
    slow_link = replace(first, pcie_width=4, pcie_width_max=4, bandwidth_gb_s=(first.bandwidth_gb_s or 0.0) + 4)
    unlike = replace(equal, gpus=replace(equal.gpus, gpus=(slow_link, *others)))
    found = space(unlike, large(), ctx_size="8192")
    of_two = [plan for plan in found.all() if plan.placement.split_mode == "tensor" and len(plan.placement.shares) == 2]
    assert found.best in of_two
    assert len(of_two) > 1
    assert {tuple(share.gpu.index for share in plan.placement.shares) for plan in of_two} == {(1, 2)}


def test_a_prediction_tells_no_figure_of_whole_layers() -> None:
    """The predicted plan has a bounded context and one type. Figures of whole layers would tell the cost of more tokens
    and of another type."""
    here = space(machine(2, free_mib=20000), large(), kv_type="f16")
    best, whole = here.best, here.context_plan
    assert best.placement.split_mode == "tensor"
    assert whole.larger is not None
    reasons = {choice.name: choice.reason for choice in best.choices}
    assert reasons["context"] == f"as many as whole layers are given, of the model's native {large().native_context:,}"
    assert reasons["kv_type"] == "asked for"
    speed = best.speed
    assert speed is not None
    said = {float(word) for word in re.findall(r"[\d.]+(?= tok/s| of prefill)", reasons["placement"])}
    assert said == {round(speed.decode_tokens_per_s), round(speed.prefill_tokens_per_s)}
    assert figures(whole, best).isdisjoint(said)


def figures(whole: ContextPlan, best: Plan) -> set[float]:
    """Return the rounded decode speeds that are predicted for splits by whole layers."""
    assert best.context == whole.context
    near = [each.placed for each in (whole, whole.before, whole.larger) if each is not None]
    others = (other.placed for other in whole.others.values())
    return {round(placed.speed.decode_tokens_per_s) for placed in (*near, *others)}


def test_an_exact_cache_is_explained_by_the_mode_and_not_by_what_other_types_carry() -> None:
    best = space(machine(2), large()).best
    assert best.placement.split_mode == "tensor"
    assert next(choice.reason for choice in best.choices if choice.name == "kv_type") == "exact"


def test_a_context_that_ends_where_memory_does_says_so() -> None:
    best = space(machine(2, free_mib=19300), large(), kv_type="f16").best
    assert best.placement.split_mode == "tensor"
    assert best.choices[0].reason.startswith("the most at f16 that fits, of the model's native")
    assert best.placement.shares[0].gpu.free_mib - best.placement.shares[0].memory.total < 256 * 64 * 4096 / MIB


@pytest.mark.thorough
def test_beside_it_whole_layers_take_over_none_of_its_words() -> None:
    bounded = space(machine(2, free_mib=20000), large(), kv_type="f16")
    asked = space(machine(2, free_mib=20000), large(), kv_type="f16", ctx_size="65536")
    assert [said_of_layers(here) for here in (bounded, asked)] == [{"measured beside others"}, {"asked for"}]


def said_of_layers(here: Space) -> set[str]:
    """Return the reasons for the context of each plan that is split by layers."""
    return {plan.choices[0].reason for plan in here.all() if plan.placement.split_mode == "layer"}


def test_what_gains_nothing_stays_on_one_card() -> None:
    best = space(machine(2), model("llama-3.1-8b", "Q4_K_M"), ctx_size="8192").best
    assert [share.gpu.index for share in best.placement.shares] == [0]


def test_the_published_gain_of_two_unequal_cards_is_predicted() -> None:
    """Qwen3.5 27B Q4_K_M on an RTX 3060 and an RTX 4070 Super, 360 and 504 GB/s: 21.2 and 30.1 tok/s
    (ai-maestro.online/dual-gpu-llama-cpp-speedup)."""
    here = space(MACHINES["4070+3060"], model("qwen3.6-27b", "Q4_K_M"), kv_type="f16", ctx_size="4096")
    found = {plan.placement.split_mode: plan for plan in reversed(here.all())}
    layer, tensor = (found[mode].speed for mode in ("layer", "tensor"))
    assert layer is not None
    assert tensor is not None
    assert tensor.decode_tokens_per_s / layer.decode_tokens_per_s == pytest.approx(1.42, rel=0.15)


def test_a_smaller_context_keeps_the_mode() -> None:
    here = space(machine(2), large(), kv_type="f16")
    plan = next(plan for plan in here.all() if plan.placement.split_mode == "tensor")
    smaller = here.at_context(plan, 8192)
    assert smaller is not None
    assert smaller.placement.split_mode == "tensor"
    assert smaller.placement.shares[0].memory.kv < plan.placement.shares[0].memory.kv


def test_equal_cards_in_other_slots_give_the_same_split() -> None:
    of = large()
    forth, back = (space(machine(2), of, ctx_size="8192", devices=order).best for order in ("0,1", "1,0"))
    assert forth.placement.summary() == back.placement.summary()
    assert [share.memory for share in forth.placement.shares] == [share.memory for share in back.placement.shares]


def test_a_split_whose_card_is_gone_is_placed_nowhere() -> None:
    """On the remaining GPUs the plan would be another split under the key of the measured one."""
    of, three = model("qwen3-8b", "Q8_0"), (card(0), card(1), card(2))
    resources = Resources(devices=three, spare_mib=64000.0, dram_gb_s=40.0)
    (before,) = place_tensors(job(of), resources, MODES, [three])
    assert place_same(job(of), resources, before.placement, MODES) == before
    left = replace(resources, devices=three[:2])
    assert place_same(job(of), left, before.placement, MODES) is None
