"""All plans of a start: what holds for every machine of the golden plans, and for memory that changes under a plan."""

from __future__ import annotations

import itertools
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from appliance.engines.llama.planning.arguments.launch import launch_of
from appliance.engines.llama.planning.inputs import SPARE_SHARE
from appliance.engines.llama.planning.memory.memory import MIB
from appliance.engines.llama.planning.placement.roofline import DEPTH
from appliance.engines.llama.planning.space import Space
from appliance.errors import ModelDoesNotFitError
from appliance.model import Model
from appliance.plan import CHAT_TOKENS_IN, LONG_PROMPTS, Plan, with_launch
from appliance.probe import Hardware
from tests.builders import examples, model, some
from tests.golden.machines import MACHINES
from tests.golden.plans import CASES, Case
from tests.shapes import PUBLISHED
from tests.unit.engines.llama.planning.test_plan_gpus import shape, space, space_of, with_gpus

PAIRS = list(itertools.product(MACHINES, PUBLISHED))
FITTING = [case for case in CASES if (case.machine, case.model) != ("2x4090", "deepseek-v3")]
LAPTOP = MACHINES["laptop-5060"]


def with_host(hardware: Hardware, available_mib: int) -> Hardware:
    return replace(hardware, memory=replace(hardware.memory, available_mib=available_mib))


@cache
def laptop_plans() -> tuple[Plan, ...]:
    return tuple(space(LAPTOP, shape("qwen3-30b-a3b")).all())


@pytest.mark.thorough
@pytest.mark.parametrize("case", some(FITTING), ids=lambda case: case.name)
def test_every_plan_fits_each_is_there_once_and_the_prediction_is_the_first(case: Case) -> None:
    hardware = MACHINES[case.machine]
    of = model(case.model, case.quantization)
    flags: dict[str, Any] = {**case.flags}
    here = space(hardware, of, **flags)
    found = here.all()
    assert found[0] == here.best
    assert len({each.key for each in found}) == len(found) > 1
    free = {gpu.uuid: gpu.vram_free_mib for gpu in hardware.gpus.gpus}
    for each in found:
        on_host = each.memory.total
        for share in each.placement.shares:
            room = free[share.gpu.id]
            on_host += share.memory.total if room is None else 0.0  # unified memory is the host's
            assert room is None or share.memory.total + share.gpu.held_back_mib <= room
        assert on_host <= hardware.memory.usable_mib
        assert each.context <= here.native
        assert launch_of(each).ubatch <= launch_of(each).batch
        assert launch_of(each).threads <= hardware.cpu.threads_max
        assert {choice.name: choice.value for choice in each.choices}["load_mode"] == launch_of(each).load_mode


@pytest.mark.parametrize(("machine", "name"), some(PAIRS))
def test_the_parts_of_a_plans_costs_add_up_to_its_predicted_speed(machine: str, name: str) -> None:
    here = space_of(machine, name)
    if here is None:
        return
    best = here.best
    costs = here.costs(best)
    assert best.speed
    decode_ms = costs.gpu_ms + costs.cpu_ms + costs.fixed_ms + (costs.gpu_depth_us + costs.cpu_depth_us) * DEPTH / 1000
    tokens = LONG_PROMPTS["chat"] if best.placement.copies_weights else CHAT_TOKENS_IN
    copied_ms = costs.copy_ms / min(launch_of(best).ubatch, tokens)
    depth_ms = costs.prefill_depth_us * DEPTH / 1000
    prefill_ms = costs.gpu_prefill_ms + costs.cpu_prefill_ms + copied_ms + depth_ms
    # Slopes are straight where windows are not, and a rounded cache makes a CPU's slopes seven times as steep.
    exact = best.kv_type == "f16" or bool(best.placement.shares)
    assert decode_ms == pytest.approx(1000 / best.speed.decode_tokens_per_s, rel=0.02 if exact else 0.04)
    # A sliding window counts as full in costs, which a prompt of 640 tokens does not fill.
    if exact:
        assert prefill_ms == pytest.approx(1000 / best.speed.prefill_tokens_per_s, rel=0.04)
    assert here.now(best) == best


def test_a_plan_needs_what_its_shares_say_of_each_device() -> None:
    here = space(MACHINES["2x4090"], shape("gpt-oss-120b"))
    needs = here.needs(here.best)
    assert [device for device, _, _ in needs] == ["CUDA0", "CUDA1"]
    for (_, need, room), share in zip(needs, here.best.placement.shares, strict=True):
        assert need == share.memory.total < room


def test_fewer_threads_cost_more_on_a_cpu_and_nothing_beyond_the_cores() -> None:
    here = space(MACHINES["cpu-16g"], shape("qwen3-8b"))
    decode, prefill = (
        [getattr(here.costs(with_launch(here.best, threads=count)), name) for count in (1, 2, 4, 8, 16)]
        for name in ("cpu_ms", "cpu_prefill_ms")
    )
    # A core with AVX2 streams 8.1 GB/s, kernels reach 32.8 of this machine's 40.
    gb_s = [min(32.8, 8.1 * count) for count in (1, 2, 4, 8, 16)]
    assert decode == pytest.approx([decode[2] * gb_s[2] / rate for rate in gb_s])
    assert prefill == pytest.approx([8 * prefill[3], 4 * prefill[3], 2 * prefill[3], prefill[3], prefill[3]])


@pytest.mark.parametrize("name", ["qwen3-8b", "gemma-3-12b"])
def test_a_rounded_cache_costs_more_on_a_cpu_and_as_much_on_a_gpu(name: str) -> None:
    """This holds with and without sliding windows: a CPU has no fast kernels for a rounded cache, and no measurement
    shows a gain on a GPU (planning/assumptions.py)."""
    by_machine = []
    for hardware in (MACHINES["cpu-16g"], MACHINES["2x4090"]):
        here = space(hardware, shape(name))
        exact, rounded = (here.costs(replace(here.best, kv_type=kind)) for kind in ("f16", "q8_0"))
        decode, prefill = zip(
            *(
                (costs.cpu_ms + costs.gpu_ms + (costs.cpu_depth_us + costs.gpu_depth_us) * DEPTH / 1000,
                 costs.cpu_prefill_ms + costs.gpu_prefill_ms + costs.prefill_depth_us * DEPTH / 1000)
                for costs in (exact, rounded)
            ),
            strict=True,
        )  # fmt: skip
        by_machine.append((decode[1] / decode[0], prefill[1] / prefill[0]))
    (slower, much_slower), on_gpu = by_machine
    assert min(slower, much_slower) > 1
    assert on_gpu == pytest.approx((1, 1))


def test_what_was_asked_for_is_the_same_in_every_plan() -> None:
    asked: dict[str, Any] = {"ctx_size": "4096", "kv_type": "q8_0", "ubatch": "256", "threads": "3", "n_cpu_moe": "40"}
    for each in space(LAPTOP, shape("qwen3-30b-a3b"), **asked).all():
        assert (each.context, each.kv_type, launch_of(each).ubatch, launch_of(each).threads) == (4096, "q8_0", 256, 3)
        assert each.placement.cpu_expert_layers == 40


def test_a_start_with_the_same_facts_serves_each_plan_as_it_was_measured() -> None:
    now = space(LAPTOP, shape("qwen3-30b-a3b"))
    for each in laptop_plans()[::7]:
        found = now.now(each)
        assert isinstance(found, Plan)
        assert (found.key, found.placement, found.speed) == (each.key, each.placement, each.speed)
        assert launch_of(found).cache_ram_mib >= 128


mib = st.integers(0, 16000)


@settings(max_examples=examples(60))
@given(st.integers(0, 10**6), mib, st.integers(2000, 60000))
@example(531, 7801, 9812)  # to the last MiB: then no prompt is kept
def test_in_the_memory_that_is_free_now_a_plan_fits_as_it_was_or_says_what_it_lacks(
    which: int, vram_mib: int, host_mib: int
) -> None:
    plans = laptop_plans()
    measured = plans[which % len(plans)]
    (card,) = LAPTOP.gpus.gpus
    hardware = with_host(with_gpus(LAPTOP, replace(card, vram_free_mib=vram_mib)), host_mib)
    found = space(hardware, shape("qwen3-30b-a3b")).now(measured)
    (before,) = measured.placement.shares
    room = max(0, vram_mib - before.gpu.held_back_mib)
    if isinstance(found, str):
        lacks_vram = f"it needs {before.memory.total:,.0f} MiB of {card.name}, and {room:,.0f} are free"
        assert found == lacks_vram or "MiB of host memory without caches, and" in found
        assert (before.memory.total > room) is (found == lacks_vram)
        return
    (share,) = found.placement.shares
    assert replace(share, gpu=before.gpu) == before
    assert found.key == measured.key
    assert share.memory.total <= share.gpu.free_mib == room
    assert found.memory.total <= found.usable_mib == hardware.memory.usable_mib
    left = found.usable_mib * (1 - SPARE_SHARE) - found.memory.total + found.memory.cache
    assert launch_of(found).cache_ram_mib >= min(128, int(left / 2))


def test_the_more_is_free_the_larger_is_the_cache_of_prompts_and_the_layers_stay() -> None:
    measured = space(with_host(LAPTOP, 24000), shape("qwen3-30b-a3b")).best
    sizes = []
    for available_mib in (20000, 24000, 30000):
        found = space(with_host(LAPTOP, available_mib), shape("qwen3-30b-a3b")).now(measured)
        assert isinstance(found, Plan)
        assert found.placement == measured.placement
        assert found.context == measured.context
        sizes.append(launch_of(found).cache_ram_mib)
    assert sizes == sorted(set(sizes))


def test_a_gpu_that_is_gone_is_named_and_one_of_the_same_kind_takes_its_place() -> None:
    hardware = MACHINES["2x4090"]
    measured = space(hardware, shape("gpt-oss-120b")).best
    one, other = hardware.gpus.gpus
    alone = space(with_gpus(hardware, one), shape("qwen3-8b"))
    assert alone.now(measured) == f"a GPU that it used is not there: {one.name}, {other.name}"
    moved = space(with_gpus(hardware, replace(one, uuid="GPU-a"), replace(other, uuid="GPU-b")), shape("gpt-oss-120b"))
    found = moved.now(measured)
    assert isinstance(found, Plan)
    assert {share.gpu.id for share in found.placement.shares} == {"GPU-a", "GPU-b"}
    assert [share.memory for share in found.placement.shares] == [share.memory for share in measured.placement.shares]
    assert found.key == measured.key


def test_the_same_card_is_taken_also_when_its_number_changed() -> None:
    hardware = MACHINES["2x4090"]
    one, other = hardware.gpus.gpus
    swapped = with_gpus(hardware, replace(other, index=0), replace(one, index=1))
    measured = space(hardware, shape("gpt-oss-120b")).best
    found = space(swapped, shape("gpt-oss-120b")).now(measured)
    assert isinstance(found, Plan)
    assert [share.gpu.id for share in found.placement.shares] == [share.gpu.id for share in measured.placement.shares]


@pytest.mark.thorough
@pytest.mark.parametrize("load_mode", ["mmap", "none"])
@pytest.mark.parametrize("machine", ["cpu-16g", "laptop-5060"])
def test_with_a_smaller_window_everything_else_stays(machine: str, load_mode: str) -> None:
    here = space(MACHINES[machine], shape("qwen3-8b" if machine == "cpu-16g" else "qwen3-30b-a3b"))
    threads = launch_of(here.best).threads
    loaded = (p for p in here.all() if launch_of(p).load_mode == load_mode)
    each = next(p for p in loaded if launch_of(p).threads != threads)
    found = here.at_context(each, 8192)
    assert found is not None
    assert found.context == 8192 < each.context
    assert found.kv_type == each.kv_type
    for name in ("threads", "threads_batch", "ubatch", "load_mode"):
        assert getattr(found.launch, name) == getattr(each.launch, name), name
    assert found.placement.gpu_layers == each.placement.gpu_layers
    assert found.placement.cpu_expert_layers == each.placement.cpu_expert_layers
    assert found.predicted_mib < each.predicted_mib
    assert here.now(found) == found


def test_a_window_that_cannot_be_placed_is_none() -> None:
    here = space(LAPTOP, shape("qwen3-30b-a3b"))
    assert here.at_context(here.best, 16 * 2**20) is None


hosts = st.sampled_from(["cpu-16g", "laptop-5060", "2x4090", "24+8", "gb10"])
names = st.sampled_from(["qwen3-8b", "qwen3-30b-a3b", "qwen3.6-27b"])


@settings(max_examples=examples(12))  # thousands of plans each
@given(hosts, names, st.integers(6000, 64000), st.sampled_from(["speed", "balanced", "context"]))
def test_on_any_machine_all_plans_fit_and_windows_are_usable(host: str, name: str, host_mib: int, mode: str) -> None:
    hardware = with_host(MACHINES[host], min(host_mib, MACHINES[host].memory.total_mib))
    try:
        here: Space = space(hardware, shape(name), mode=mode)
        found = here.all()
    except ModelDoesNotFitError:
        return
    assert found[0] == here.best
    assert len({each.key for each in found}) == len(found)
    smallest = min(8192, here.native, here.best.context)
    for each in found:
        assert each.memory.total <= hardware.memory.usable_mib
        assert smallest <= each.context <= here.native
        assert launch_of(each).ubatch <= launch_of(each).batch
        for share in each.placement.shares:
            assert share.memory.total <= share.gpu.free_mib


def test_a_type_of_the_cache_that_carries_less_than_any_mode_would_serve_is_left_out() -> None:
    here = space(with_host(MACHINES["cpu-16g"], 6000), shape("qwen3-8b"))
    assert (here.best.kv_type, here.best.context) == ("q8_0", 8192)  # f16 carries 5,120
    assert {(each.kv_type, each.context) for each in here.all()} == {("q8_0", 8192)}


def test_what_is_optional_goes_before_a_model_is_refused() -> None:
    of = shape("gemma-3-12b")
    roomy, short = (space(with_host(MACHINES["cpu-16g"], mib), of).best for mib in (14_000, 8_000))
    assert roomy.memory.cache >= 128
    assert roomy.memory.checkpoints > 0
    assert short.memory.cache < 128
    assert launch_of(short).checkpoints == 0
    assert short.memory.total <= 0.97 * 8_000
    assert not _is_served(of, 7_000)  # its weights alone are 6,956


@pytest.mark.thorough
def test_slots_go_last_and_only_those_that_nobody_asked_for() -> None:
    of = shape("qwen3.6-27b")  # states of recurrent layers for each slot
    weights = of.weights_bytes / MIB
    least = next(mib for mib in range(int(weights), 40_000, 25) if _is_served(of, mib))
    short = space(with_host(MACHINES["cpu-16g"], least), of).best
    assert short.parallel == 1
    assert next(choice for choice in short.choices if choice.name == "parallel").source.startswith("memory")
    assert not _is_served(of, least, parallel="4")


def _is_served(of: Model, mib: int, parallel: str = "") -> bool:
    flags = {"parallel": parallel} if parallel else {}
    hardware = with_host(MACHINES["cpu-16g"], mib)
    try:
        return bool(space(hardware, of, engine=None, **flags).best)
    except ModelDoesNotFitError:
        return False
