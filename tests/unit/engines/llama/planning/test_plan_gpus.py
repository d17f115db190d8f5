"""Plans with GPUs: what holds for every machine and model, and choices that a person would question."""

from __future__ import annotations

import itertools
import re
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from appliance.engines.llama.planning.arguments.launch import launch_of
from appliance.engines.llama.planning.arguments.loader_check import Projection, refine
from appliance.engines.llama.planning.memory.memory import MIB
from appliance.engines.llama.planning.placement.placement import Placed, PlacementJob, Resources, place
from appliance.engines.llama.planning.space import Space
from appliance.errors import ConfigError, FatalError, ModelDoesNotFitError
from appliance.image_facts import EngineFacts, ImageFacts
from appliance.model import Model
from appliance.plan import READABLE_TOKENS_PER_S, Device, Plan, as_document, with_launch, with_measured
from appliance.probe import Gpu, Hardware, Speeds
from appliance.settings import resolve_settings
from tests.builders import examples, facts, model, some
from tests.fakes.machines import hardware_of
from tests.golden.machines import MACHINES
from tests.shapes import PUBLISHED

QUANTIZATIONS = {"gpt-oss-120b": "MXFP4", "deepseek-v3": "Q2_K", "qwen3-30b-a3b": "Q3_K_M"}
PAIRS = list(itertools.product(MACHINES, PUBLISHED))


def shape(name: str) -> Model:
    return model(name, QUANTIZATIONS.get(name, "Q4_K_M"))


def space(hardware: Hardware, of: Model, *, engine: EngineFacts | None = None, **flags: str) -> Space:
    image, known = facts(has_cuda=bool(hardware.gpus.gpus))
    return Space(resolve_settings(flags, {}), image, engine or known, hardware, of)


def best(hardware: Hardware, of: Model, *, engine: EngineFacts | None = None, **flags: str) -> Plan:
    return space(hardware, of, engine=engine, **flags).best


def with_gpus(hardware: Hardware, *gpus: Gpu) -> Hardware:
    return replace(hardware, gpus=replace(hardware.gpus, gpus=gpus))


def reason(found: Plan, name: str) -> str:
    return next(choice.reason for choice in found.choices if choice.name == name)


@cache
def space_of(machine: str, name: str) -> Space | None:
    """Return the space without any flags; None if the model does not fit."""
    found = space(MACHINES[machine], shape(name))
    try:
        _ = found.best
    except ModelDoesNotFitError:
        return None
    return found


@pytest.mark.thorough
@pytest.mark.parametrize(("machine", "name"), some(PAIRS))
def test_nothing_is_planned_beyond_what_is_free(machine: str, name: str) -> None:
    hardware, here = MACHINES[machine], space_of(machine, name)
    if here is None:
        return
    found = here.best
    free = {gpu.uuid: gpu.vram_free_mib for gpu in hardware.gpus.gpus}
    on_host = found.memory.total
    for share in found.placement.shares:
        room = free[share.gpu.id]
        on_host += share.memory.total if room is None else 0.0  # unified memory is the host's
        assert room is None or share.memory.total + share.gpu.held_back_mib <= room
    assert on_host <= hardware.memory.usable_mib
    assert found.usable_mib <= hardware.memory.usable_mib
    layers = shape(name).layers + 1
    assert found.placement.gpu_layers + found.placement.cpu_layers == (layers if found.placement.shares else 0)


def gpu(index: int, free_mib: int, gb_s: float) -> Gpu:
    template = MACHINES["2x4090"].gpus.gpus[0]
    return replace(template, index=index, uuid=f"GPU-{index}", vram_free_mib=free_mib, bandwidth_gb_s=gb_s)


def test_the_same_facts_give_the_same_plans() -> None:
    assert repr(space(MACHINES["2x4090"], shape("qwen3-8b")).all()) == repr(
        space(replace(MACHINES["2x4090"]), replace(shape("qwen3-8b"))).all()
    )


def test_what_a_gpu_reads_gets_no_more_threads() -> None:
    here = MACHINES["2x4090"]
    found = space(replace(here, cpu=replace(here.cpu, quota=1.5)), shape("qwen3-8b")).best
    assert found.placement.is_whole
    assert (launch_of(found).threads, launch_of(found).threads_batch) == (1, 1)


cards = st.lists(st.tuples(st.integers(2000, 50000), st.sampled_from([200.0, 448.0, 936.0, 1008.0])), max_size=3)
models = st.sampled_from(sorted(set(PUBLISHED) - {"deepseek-v3"}))
hosts = st.sampled_from(["cpu-16g", "2x4090"])
more_memory = st.integers(0, 30000)


def widened(found: list[tuple[int, float]], more_mib: int, at: int) -> list[tuple[int, float]]:
    """Return the GPUs with more memory on one of them, or with one more GPU if `at` is past the last."""
    if at < len(found):
        return [(free + (more_mib if i == at else 0), speed) for i, (free, speed) in enumerate(found)]
    return [*found, (2000 + more_mib, 448.0)]


def window(host: str, having: list[tuple[int, float]], name: str, mode: str = "context") -> tuple[int, float]:
    """Return the context length of the best plan and its decode speed when full; zeros if the model does not fit."""
    hardware = with_gpus(MACHINES[host], *(gpu(i, free, speed) for i, (free, speed) in enumerate(having)))
    image, engine = facts(has_cuda=True)
    try:
        here = Space(resolve_settings({"mode": mode}, {}), image, engine, hardware, shape(name))
        return here.best.context, here.context_plan.full
    except FatalError:
        return 0, 0.0


# Two whole plans an example; the same in each run, so that one planner is judged alike twice.
@pytest.mark.thorough
@settings(deadline=None, max_examples=examples(50), derandomize=True)
@given(hosts, cards, models, more_memory, st.integers(0, 3))
def test_in_mode_context_more_memory_never_gives_a_smaller_window(
    host: str, having: list[tuple[int, float]], name: str, more_mib: int, at: int
) -> None:
    """Exception: only with more memory does a full context decode at reading speed. The mode then takes that context,
    which may be smaller, but not a smaller one than `balanced` takes."""
    before, before_full = window(host, having, name)
    after, after_full = window(host, widened(having, more_mib, at), name)
    if before > after:
        assert before_full < READABLE_TOKENS_PER_S
        is_readable = after_full >= READABLE_TOKENS_PER_S
        assert is_readable or after == window(host, widened(having, more_mib, at), name, mode="balanced")[0]


def device(index: int, free_mib: float, gb_s: float) -> Device:
    return Device(
        id=str(index),
        name=f"GPU {index}",
        index=index,
        free_mib=free_mib,
        held_back_mib=0.0,
        bandwidth_gb_s=gb_s,
        upload_gb_s=6.0,
        pinned_gb_s=12.0,
    )


def fastest(having: list[tuple[int, float]], name: str, context: int, spare_mib: float) -> Placed | None:
    devices = sorted(
        (device(i, free, speed) for i, (free, speed) in enumerate(having)), key=lambda d: -d.bandwidth_gb_s
    )
    work = PlacementJob(model=shape(name), context=context, kv_type="f16", ubatch=512, parallel=4)
    return place(work, Resources(devices=tuple(devices), spare_mib=spare_mib, dram_gb_s=32.0))


@settings(deadline=None)
@given(
    cards, models, st.sampled_from([4096, 32768]), st.sampled_from([8000.0, 120000.0]), more_memory, st.integers(0, 3)
)
def test_what_fits_keeps_fitting_and_is_never_slower_with_more_memory_or_one_more_card(
    having: list[tuple[int, float]], name: str, context: int, spare_mib: float, more_mib: int, at: int
) -> None:
    less = fastest(having, name, context, spare_mib)
    more = fastest(widened(having, more_mib, at), name, context, spare_mib)
    if less is not None:
        assert more is not None
        assert more.cost <= less.cost
        assert more.speed.job_s * 10**12 <= more.cost * 1.03 + 1  # what an even split may give up


slots = st.lists(
    st.tuples(st.integers(4000, 24000), st.sampled_from([448.0, 936.0]), st.sampled_from([1, 4, 16])),
    min_size=2,
    max_size=4,
)


@pytest.mark.thorough
@settings(deadline=None, max_examples=examples(50))  # two whole plans an example
@given(st.data(), slots, models)
def test_cards_in_other_slots_give_an_equal_plan(
    data: st.DataObject, having: list[tuple[int, float, int]], name: str
) -> None:
    def planned(order: list[tuple[int, float, int]]) -> tuple[object, ...] | None:
        found = [
            replace(gpu(i, free, speed), pcie_width=width, pcie_width_max=16)
            for i, (free, speed, width) in enumerate(order)
        ]
        try:
            plan = best(with_gpus(MACHINES["2x4090"], *found), shape(name))
        except ModelDoesNotFitError:
            return None
        shares = [(s.layers, s.memory, s.gpu.free_mib, s.gpu.upload_gb_s) for s in plan.placement.shares]
        return (plan.placement.summary(), plan.context, plan.kv_type, plan.speed, shares)

    assert planned(having) == planned(data.draw(st.permutations(having)))


@pytest.mark.thorough
@pytest.mark.parametrize("widths", [(16, 1), (1, 16)])
@pytest.mark.parametrize("order", ["auto", "0,1", "1,0"])
def test_a_card_on_a_single_lane_is_used_and_never_first_where_experts_are_copied(
    widths: tuple[int, int], order: str
) -> None:
    cards = (replace(gpu(i, 24000, 936.0), pcie_width=width, pcie_width_max=16) for i, width in enumerate(widths))
    found = best(with_gpus(MACHINES["2x4090"], *cards), shape("gpt-oss-120b"), devices=order)
    wide = widths.index(16)
    assert [share.gpu.index for share in found.placement.shares] == [wide, 1 - wide]
    is_reordered = order not in ("auto", f"{wide},{1 - wide}")
    said = f"(GPU {wide}) comes before NVIDIA GeForce RTX 4090 (GPU {1 - wide}): what lies in host memory is copied to"
    assert (said in reason(found, "placement")) == is_reordered


def test_an_order_that_costs_nothing_is_kept() -> None:
    for order in ("0,1", "1,0"):
        found = best(MACHINES["2x4090"], shape("qwen3.6-35b-a3b"), devices=order)
        assert ",".join(str(share.gpu.index) for share in found.placement.shares) == order


def test_a_slow_card_is_left_out_where_the_fast_ones_hold_everything_and_it_is_said() -> None:
    found = best(MACHINES["3090+4090+5060"], model("llama-3.1-8b", "Q8_0"), ctx_size="8192")
    assert [share.gpu.name for share in found.placement.shares] == ["NVIDIA GeForce RTX 4090"]
    assert "RTX 5060 (GPU 2) is left out: a job is faster without it: 363 GB/s" in reason(found, "placement")


def test_equal_cards_share_evenly() -> None:
    found = best(MACHINES["2x4090"], shape("qwen3.6-35b-a3b"))
    first, second = (share.memory.total for share in found.placement.shares)
    assert first == pytest.approx(second, rel=0.05)


def test_published_windows_are_reached() -> None:
    laptop = MACHINES["laptop-5060"]
    experts = best(laptop, shape("qwen3-30b-a3b"))
    assert experts.context >= 32768
    assert experts.placement.cpu_expert_layers > 30
    asked = best(laptop, model("llama-3.1-8b", "Q5_K_M"), ctx_size="65536", kv_type="f16")
    assert asked.context == 65536  # 8 GiB of cache: layers on the CPU pay for it
    assert asked.placement.cpu_layers > 8
    assert best(MACHINES["2x4090"], shape("qwen3.6-35b-a3b")).context == 262144
    assert best(MACHINES["2x2080ti-22g"], shape("qwen3.6-27b")).context == 262144


def test_who_holds_a_card_is_named_and_what_is_free_is_planned() -> None:
    found = best(MACHINES["4090-shared"], model("qwen3-8b", "Q8_0"))
    assert "in use by /usr/bin/python3 (4242) 14,500 MiB" in reason(found, "placement")
    (card,) = MACHINES["4090-shared"].gpus.gpus
    assert (card.vram_free_mib or 0) < 10000
    assert sum(share.memory.total for share in found.placement.shares) <= (card.vram_free_mib or 0) - 1024


def test_a_slice_works_alone() -> None:
    found = best(MACHINES["a100-mig"], model("qwen3-30b-a3b", "Q4_K_M"))
    assert len(found.placement.shares) == 1
    assert "1g.10gb (GPU 0) is left out: a program can use one slice" in reason(found, "placement")


def test_what_the_image_has_no_kernels_for_is_left_out_and_said() -> None:
    image, engine = facts(has_cuda=True)
    only_ada = replace(image, sm=("89",))
    found = Space(resolve_settings({}, {}), only_ada, engine, MACHINES["3090+4090+5060"], shape("gpt-oss-120b")).best
    assert [share.gpu.name for share in found.placement.shares] == ["NVIDIA GeForce RTX 4090"]
    assert "this image has kernels for SM 89 and none for SM 86" in reason(found, "left_out")


def test_code_for_an_older_chip_of_the_same_generation_is_used_on_a_newer_one() -> None:
    image, engine = facts(has_cuda=True)
    for sm, runs in (("86", True), ("80", True), ("75", False), ("89a", True), ("86a", False)):
        of_image = replace(image, sm=(sm,))
        found = Space(resolve_settings({}, {}), of_image, engine, MACHINES["2x4090"], shape("qwen3-8b")).best
        assert bool(found.placement.shares) is runs, sm


def test_a_larger_ubatch_that_fits_no_more_is_not_taken_from_the_profile() -> None:
    laptop = MACHINES["laptop-5060"]
    (card,) = laptop.gpus.gpus
    here = space(laptop, shape("qwen3-30b-a3b"))
    large = next(each for each in here.all() if launch_of(each).ubatch >= 2048)
    measured = with_measured(large, "best measured", [with_launch(here.best, ubatch=512), large])
    same = space(laptop, shape("qwen3-30b-a3b")).now(measured)
    assert isinstance(same, Plan)
    assert replace(same, choices=()) == replace(measured, choices=())
    (share,) = measured.placement.shares
    slack = int(share.gpu.free_mib - share.memory.total)
    for less_mib in (slack, slack + 1, slack + 3000):
        free = (card.vram_free_mib or 0) - less_mib
        now = space(with_gpus(laptop, replace(card, vram_free_mib=free)), shape("qwen3-30b-a3b"))
        found = now.now(measured)
        if less_mib == slack:
            assert isinstance(found, Plan)
            assert found.placement.summary() == measured.placement.summary()
            assert reason(found, "ubatch") == "best measured"
        else:
            room = share.gpu.free_mib - less_mib
            words = f"it needs {share.memory.total:,.0f} MiB of NVIDIA GeForce RTX 5060"
            assert isinstance(found, str)
            assert found.startswith(words)
            assert found.endswith(f"and {room:,.0f} are free")


@pytest.mark.thorough
@pytest.mark.parametrize("machine", ["laptop-5060", "2x2080ti-22g"])
def test_what_is_measured_beside_the_first_plan_is_explained_by_its_own_values(machine: str) -> None:
    of = shape("qwen3-30b-a3b") if machine == "laptop-5060" else model("llama-3.1-8b", "F16")
    found = space(MACHINES[machine], of).all()
    assert len({each.placement for each in found}) > 1
    for each in found:
        said = {choice.name: choice.value for choice in each.choices}
        assert said["placement"] == each.placement.summary()
        assert said["ubatch"] == str(launch_of(each).ubatch)
        assert said["load_mode"] == launch_of(each).load_mode


def test_numbers_for_gpus_are_no_reason_to_refuse_where_there_is_none() -> None:
    found = best(MACHINES["cpu-16g"], shape("qwen3-8b"), gpu_layers="20", n_cpu_moe="5")
    assert found.context == best(MACHINES["cpu-16g"], shape("qwen3-8b")).context
    refused = {choice.name: choice.reason for choice in found.choices if choice.is_refusal}
    assert refused == {
        "gpu_layers": "20 was asked for, and there is no GPU to use",
        "n_cpu_moe": "5 was asked for, and there is no GPU to use",
    }


def test_experts_that_a_model_has_not_are_no_source_of_its_placement() -> None:
    dense = best(MACHINES["t4"], shape("qwen3-8b"), n_cpu_moe="5")
    said = {choice.name: choice for choice in dense.choices}
    assert said["placement"].source == "memory and bandwidths"
    assert said["n_cpu_moe"].is_refusal
    assert (said["n_cpu_moe"].value, said["n_cpu_moe"].reason) == (
        "0",
        "5 was asked for, and this model has no experts",
    )
    mixture = {choice.name: choice for choice in best(MACHINES["t4"], shape("gpt-oss-20b"), n_cpu_moe="5").choices}
    assert mixture["placement"].source == "flag --n-cpu-moe"
    assert "n_cpu_moe" not in mixture


def test_what_holds_a_card_back_is_named() -> None:
    crippled = with_gpus(
        MACHINES["2x4090"],
        *(replace(card, power_limit_w=200.0, power_limit_default_w=450.0, ecc=True, pcie_width=4, pcie_width_max=16)
          for card in MACHINES["2x4090"].gpus.gpus[:1]),
    )  # fmt: skip
    words = reason(best(crippled, shape("qwen3-8b")), "placement")
    assert "its link has 4 of 16 lanes" in words
    assert "ECC is on: it takes part of the bandwidth" in words
    assert "its power is capped at 200 of 450 W: prefill is predicted with it, decode without" in words
    assert "its link" not in reason(best(MACHINES["h200"], shape("qwen3-8b")), "placement")
    assert "ECC" not in reason(best(MACHINES["h200"], shape("qwen3-8b")), "placement")  # HBM pays nothing for it


def with_one_changed(name: str, **change: Any) -> str:
    """Return the reason for the placement on a machine whose second GPU is changed."""
    cards = MACHINES[name].gpus.gpus
    return reason(
        best(with_gpus(MACHINES[name], cards[0], replace(cards[1], **change), *cards[2:]), shape("qwen3-8b")),
        "placement",
    )


def test_of_cards_with_one_name_the_slowed_one_is_named_by_its_index() -> None:
    words = with_one_changed("2x4090", pcie_width=1, pcie_generation_max=1)
    of_one = (
        "NVIDIA GeForce RTX 4090 (GPU 1): its link has 1 of 16 lanes; its slot has PCIe 1, and the card could use 4"
    )
    assert of_one in words
    assert "(GPU 0): " not in words


@pytest.mark.parametrize("sms", [128, None])
def test_a_power_cap_says_what_is_predicted_with_it(sms: int | None) -> None:
    words = with_one_changed("2x4090", power_limit_w=200.0, power_limit_default_w=450.0, sm_count=sms)
    assert "(GPU 1): its power is capped at 200 of 450 W: prefill is predicted with it, decode without" in words


@pytest.mark.parametrize("sms", [128, None])
def test_a_capped_card_reads_prompts_more_slowly(sms: int | None) -> None:
    """A power cap counts even if the number of multiprocessors is unknown, as in a machine file written by hand."""
    card = replace(MACHINES["2x4090"].gpus.gpus[0], sm_count=sms, power_limit_w=450.0, power_limit_default_w=450.0)
    speeds = [
        best(with_gpus(MACHINES["2x4090"], replace(card, power_limit_w=watts)), shape("qwen3-8b")).speed
        for watts in (450.0, 200.0)
    ]
    assert speeds[0]
    assert speeds[1]
    assert speeds[1].prefill_tokens_per_s < 0.9 * speeds[0].prefill_tokens_per_s


@pytest.mark.parametrize(
    ("dram", "said"),
    [(60.0, "DRAM 60 GB/s measured, of which kernels"), (None, "DRAM 40 GB/s assumed, of which")],
)
def test_a_bandwidth_is_what_was_measured_or_assumed(dram: float | None, said: str) -> None:
    speeds = Speeds(dram_gb_s=dram) if dram else None
    assert said in reason(best(replace(MACHINES["2x4090"], speeds=speeds), shape("qwen3-8b")), "placement")


def test_a_bound_that_begins_above_a_length_says_so() -> None:
    found = best(MACHINES["t4"], shape("qwen3-32b"))
    words = reason(found, "context")
    assert found.context == 32768
    assert "beyond 32,768 a context is judged half full too: more would decode less than 15 tok/s half full" in words


def test_slices_that_are_not_used_are_one_sentence_and_links_are_named() -> None:
    (card,) = hardware_of("mig20").gpus.gpus
    cut = tuple(replace(card, uuid=f"MIG-{at}") for at in range(4))
    words = reason(best(with_gpus(hardware_of("mig20"), *cut), shape("qwen3-8b")), "placement")
    assert words.count("left out") == 1
    assert "3 of NVIDIA A100-SXM4-80GB MIG 1g.20gb (GPU 0) are left out: a program can use one slice" in words
    linked = best(MACHINES["2x2080ti-22g"], model("qwen3.6-35b-a3b", "Q6_K"))
    assert "linked by NVLink" in reason(linked, "placement")
    assert "NVLink" not in reason(best(MACHINES["2x4090"], shape("gpt-oss-120b")), "placement")


def test_a_refusal_says_what_would_be_enough() -> None:
    laptop = MACHINES["laptop-5060"]
    of = model("qwen3-30b-a3b", "Q4_K_M")

    def with_host(mib: int) -> Hardware:
        return replace(laptop, memory=replace(laptop.memory, available_mib=mib))

    with pytest.raises(ModelDoesNotFitError, match=r"; missing are [0-9,]+ MiB of host memory or") as caught:
        best(with_host(11_000), of)
    assert "and 10,670 of 11,000 MiB may be used" in caught.value.message
    assert "3% stay free" in caught.value.message
    more = int(re.findall(r"missing are ([0-9,]+) MiB of host", caught.value.message)[0].replace(",", ""))
    assert best(with_host(11_000 + int(more / 0.97) + 2), of).placement.shares
    with pytest.raises(ModelDoesNotFitError):
        best(with_host(11_000 + more - 100), of)


def test_the_cpu_in_place_of_a_gpu_is_said_at_the_start_unless_it_was_asked_for() -> None:
    cards = MACHINES["2x4090"].gpus.gpus
    full = with_gpus(MACHINES["2x4090"], *(replace(card, vram_free_mib=0) for card in cards))
    assert [c.name for c in best(full, shape("qwen3-8b")).choices if c.is_refusal] == ["placement"]
    assert not [c for c in best(full, shape("qwen3-8b"), gpu_layers="0").choices if c.is_refusal]


def test_weights_that_are_read_from_disk_stay_mapped() -> None:
    small = replace(MACHINES["laptop-5060"], memory=replace(MACHINES["laptop-5060"].memory, available_mib=12_000))
    found = space(small, shape("gpt-oss-120b"), allow_disk="on").all()
    assert found[0].placement.shares
    assert found[0].memory.total > small.memory.usable_mib
    assert {launch_of(each).load_mode for each in found} == {"mmap"}


def test_unified_memory_that_holds_all_layers_but_not_a_second_set_of_buffers_is_used() -> None:
    card = replace(device(0, 9650.0, 270.0), is_unified=True)
    work = PlacementJob(model=shape("qwen3-8b"), context=32768, kv_type="f16", ubatch=512, parallel=4)
    found = place(work, Resources(devices=(card,), spare_mib=9650.0, dram_gb_s=32.0))
    assert found is not None
    assert found.placement.gpu_layers == 37
    assert found.host.total + found.placement.shares[0].memory.total <= 9650.0


def test_unified_memory_is_counted_once() -> None:
    gb10 = MACHINES["gb10"]
    small = replace(gb10, memory=replace(gb10.memory, available_mib=72_000))
    found = best(small, shape("gpt-oss-120b"))
    (share,) = found.placement.shares
    assert found.memory.total + share.memory.total + share.gpu.held_back_mib <= 72_000
    assert found.usable_mib == pytest.approx(72_000 - share.memory.total - share.gpu.held_back_mib)


def test_an_engine_for_the_cpu_plans_no_gpu() -> None:
    image, engine = facts(has_cuda=False)
    found = Space(resolve_settings({}, {}), image, engine, MACHINES["h200"], shape("qwen3-8b")).best
    assert found.placement.shares == ()
    assert dict(found.knobs)["placement"] == "CPU"


@pytest.mark.thorough
def test_a_user_fixes_devices_layers_and_experts() -> None:
    hardware = MACHINES["3090+4090+5060"]
    found = best(hardware, shape("qwen3-8b"), devices="0", ctx_size="4096")
    assert [share.gpu.name for share in found.placement.shares] == ["NVIDIA GeForce RTX 3090"]
    assert best(hardware, shape("qwen3-8b"), devices="none").placement.shares == ()
    assert best(hardware, shape("qwen3-8b"), gpu_layers="0").placement.shares == ()
    assert best(hardware, shape("qwen3-8b"), gpu_layers="20", ctx_size="4096").placement.gpu_layers == 20
    fixed = space(hardware, shape("qwen3-30b-a3b"), n_cpu_moe="17", ctx_size="4096").all()
    assert {each.placement.cpu_expert_layers for each in fixed} == {17}
    assert "flag --n-cpu-moe" in next(c.source for c in fixed[0].choices if c.name == "placement")
    with pytest.raises(ConfigError, match="setting devices names what cannot be used: 7 ") as caught:
        best(hardware, shape("qwen3-8b"), devices="0,7")
    assert "usable GPUs here: 1 (NVIDIA GeForce RTX 4090" in (caught.value.hint or "")


def test_a_type_that_flash_attention_converts_is_never_chosen_and_said_when_asked_for() -> None:
    found = best(MACHINES["laptop-5060"], model("llama-3.1-8b", "Q5_K_M"), kv_type="q5_1")
    choice = next(choice for choice in found.choices if choice.name == "kv_type")
    assert choice.is_refusal
    assert "converts it for every token" in choice.reason
    _, engine = facts(has_cuda=True)
    slow = replace(engine, kv_pairs=(("f16", "f16"),))
    assert best(MACHINES["laptop-5060"], model("llama-3.1-8b", "Q5_K_M"), engine=slow).kv_type == "f16"


def test_a_model_beyond_all_memory_is_refused_with_what_each_card_has() -> None:
    with pytest.raises(ModelDoesNotFitError, match="23,540 MiB on NVIDIA GeForce RTX 4090"):
        best(MACHINES["2x4090"], shape("deepseek-v3"))


def test_what_the_loader_reckons_is_taken_in_and_what_does_not_fit_is_dropped() -> None:
    found = space(MACHINES["2x4090"], shape("qwen3.6-35b-a3b")).all()[:5]
    fits = Projection(devices=((9000.0, 2600.0, 2900.0), (10000.0, 2700.0, 5000.0)), host=(0.0, 0.0, 100.0))
    too_much = Projection(devices=((30000.0, 2600.0, 900.0), (10000.0, 2700.0, 900.0)), host=(0.0, 0.0, 100.0))
    refined = refine(found, (fits, too_much, *(None for _ in found[2:])))
    assert len(refined) == len(found) - 1
    first, second = refined[0].placement.shares
    assert first.memory.weights == 9000.0
    assert first.memory.kv + first.memory.state == pytest.approx(2600.0)
    assert first.memory.compute == 2900.0  # more than the formula says is believed
    logits = 4 * 248_320 * (launch_of(found[0]).ubatch - found[0].parallel) / MIB  # of a whole batch: not made
    assert second.memory.compute == pytest.approx(5000.0 - logits)
    assert refined[0].memory.compute == found[0].memory.compute > 100.0  # and so is the formula where it says more
    assert refined[1:] == found[2:]
    assert refine(found, (Projection(devices=(), host=fits.host), *(None for _ in found[1:]))) == found


def test_what_is_counted_for_gpus_is_in_the_document() -> None:
    document = as_document(best(MACHINES["2x4090"], shape("qwen3.6-35b-a3b")))
    assert [share["memory"]["total"] > 1000 for share in document["placement"]["shares"]] == [True, True]


def test_image_facts_of_a_cuda_cell_are_enough_to_plan_gpus() -> None:
    _, engine = facts(has_cuda=False)
    image = ImageFacts(
        build_id="b", cell="llama-cu130-sm89", engine="llama", engine_version="", engine_build=1, engine_commit="",
        cuda="13.0", sm=("89",),
    )  # fmt: skip
    found = Space(resolve_settings({}, {}), image, engine, MACHINES["2x4090"], shape("qwen3-8b")).best
    assert found.placement.shares


def in_narrow_slot(at: int) -> Hardware:
    """Return a machine of two equal GPUs; the one at `at` has a single lane."""
    machine = MACHINES["2x4090"]
    gpus = tuple(
        replace(gpu, pcie_width=1 if index == at else 16, pcie_width_max=16)
        for index, gpu in enumerate(machine.gpus.gpus)
    )
    return replace(machine, gpus=replace(machine.gpus, gpus=gpus))


def test_the_slot_of_a_card_with_a_narrow_link_changes_nothing() -> None:
    """Host weights are copied to the first card: the one with the wide link, wherever it sits."""
    left, right = (best(in_narrow_slot(at), model("gpt-oss-120b", "MXFP4")) for at in (0, 1))
    assert [share.gpu.index for share in left.placement.shares] == [1, 0]
    assert [share.gpu.index for share in right.placement.shares] == [0, 1]
    assert [share.layers for share in left.placement.shares] == [share.layers for share in right.placement.shares]
    assert (left.speed, left.context, left.memory) == (right.speed, right.context, right.memory)


def test_devices_keep_the_order_that_was_asked_for_or_say_why_not() -> None:
    machine = MACHINES["2x4090"]
    asked = best(machine, model("llama-3.1-8b", "F16"), devices="1,0", ctx_size="131072", kv_type="f16")
    assert [share.gpu.index for share in asked.placement.shares] == [1, 0]
    moved = best(in_narrow_slot(0), model("gpt-oss-120b", "MXFP4"), devices="0,1")
    (said,) = [choice.reason for choice in moved.choices if choice.name == "placement"]
    assert "(GPU 1) comes before NVIDIA GeForce RTX 4090 (GPU 0): what lies in host memory is copied" in said
