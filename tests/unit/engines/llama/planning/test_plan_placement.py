"""The placement that is found against all that there are, counted one by one."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from appliance.engines.llama.planning.memory.memory import (
    MIB,
    cells,
    compute_mib,
    layer_kv_bytes,
    layers_of,
    mask_bytes,
    output_mib,
)
from appliance.engines.llama.planning.placement.placement import PlacementJob, Resources, place
from appliance.engines.llama.planning.placement.roofline import DEPTH, HOP, Roofline
from appliance.model import Layer, Model
from appliance.plan import Device
from tests.builders import LARGE

LAYERS = 6
EMPTY = Layer(
    kind="full", k_elements=1024, v_elements=1024, window=None, state_bytes=0, dense_bytes=200 * MIB, expert_bytes=0
)


def small(sizes: tuple[int, ...]) -> Model:
    stack = tuple(replace(EMPTY, dense_bytes=size * MIB) for size in sizes)
    return replace(
        LARGE,
        stack=stack,
        layers=len(sizes),
        weights_bytes=sum(layer.dense_bytes for layer in stack) + 150 * MIB,
        embedding_bytes=50 * MIB,
        output_bytes=100 * MIB,
        output_is_tied=False,
    )


def device(index: int, free_mib: float, gb_s: float) -> Device:
    return Device(
        id=str(index),
        name="",
        index=index,
        free_mib=free_mib,
        held_back_mib=0.0,
        bandwidth_gb_s=gb_s,
        upload_gb_s=6.0,
        pinned_gb_s=12.0,
    )


def cheapest_by_counting(work: PlacementJob, devices: tuple[Device, ...], dram_gb_s: float) -> int | None:
    """Return the cost of the cheapest placement: all runs of layers on all devices in order are tried, none on the CPU.
    None if none fits."""
    model, layers = work.model, layers_of(work.model)
    roofline = Roofline(model=model, kv_type="f16", ubatch=work.ubatch, dram_gb_s=dram_gb_s, depth=DEPTH)
    mib = [
        (la.dense_bytes + layer_kv_bytes(la, "f16", work.context, work.ubatch, work.parallel)) / MIB for la in layers
    ]
    mib.append(model.output_bytes / MIB)
    found: list[int] = []
    for ends in itertools.combinations_with_replacement(range(len(mib) + 1), len(devices) - 1):
        runs = list(zip(devices, itertools.pairwise((0, *ends, len(mib))), strict=True))
        used = [(card, run) for card, run in runs if run[1] > run[0]]
        copies = 4 if len(used) > 1 else 1
        masks = (copies - 1) * mask_bytes(model, work.ubatch, work.context, work.parallel) / MIB
        buffer = compute_mib(model, work.ubatch, work.context, work.parallel) + masks
        cost = 0
        for card, (start, end) in used:
            logits = output_mib(model, work.parallel) if end == len(mib) else 0.0
            if sum(mib[start:end]) + buffer + logits > card.free_mib:
                break
            held = layers[start : min(end, len(layers))]
            cost += sum(roofline.job(roofline.on_gpu(layer, card)).job for layer in held)
            cost += roofline.job(roofline.output_on_gpu(card)).job if end == len(mib) else 0
            cost += HOP.job if start else 0
        else:
            found.append(cost)
    return min(found, default=None)


# Some are equal, and some are of one kind with less that is free.
free = st.one_of(st.sampled_from([400, 800, 1600]), st.integers(100, 2500))
cards = st.lists(st.tuples(free, st.sampled_from([300.0, 600.0, 900.0])), min_size=1, max_size=4)


@settings(deadline=None)
@given(cards, st.tuples(*[st.integers(10, 500)] * LAYERS), st.sampled_from([512, 8192]))
def test_no_split_of_the_cards_is_faster_than_the_one_found(
    having: list[tuple[int, float]], sizes: tuple[int, ...], context: int
) -> None:
    devices = tuple(
        sorted((device(i, free, speed) for i, (free, speed) in enumerate(having)), key=lambda d: -d.bandwidth_gb_s)
    )
    work = PlacementJob(model=small(sizes), context=context, kv_type="f16", ubatch=512, parallel=4)
    counted = cheapest_by_counting(work, devices, 32.0)
    placed = place(work, Resources(devices=devices, spare_mib=100000.0, dram_gb_s=32.0))
    assert placed is not None
    if counted is not None:
        assert placed.cost == counted
        assert placed.placement.cpu_layers == 0
    else:
        assert placed.placement.cpu_layers > 0 or not placed.placement.shares


@pytest.mark.parametrize(("others", "used"), [((2500,), ["1"]), ((1200, 1200), ["1", "2"])])
def test_the_fastest_card_need_not_be_of_the_team(others: tuple[int, ...], used: list[str]) -> None:
    """The fastest GPU holds no layer here. The GPUs after it are also tried without it."""
    model = small((300,) * LAYERS)
    devices = (device(0, 100, 900.0), *(device(at, free, 300.0) for at, free in enumerate(others, 1)))
    work = PlacementJob(model=model, context=512, kv_type="f16", ubatch=512, parallel=4)
    placed = place(work, Resources(devices=devices, spare_mib=100000.0, dram_gb_s=32.0))
    assert placed is not None
    assert [share.gpu.id for share in placed.placement.shares] == used
    assert placed.placement.cpu_layers == 0


def test_what_does_not_fit_the_host_either_is_no_plan() -> None:
    work = PlacementJob(model=small((400,) * LAYERS), context=512, kv_type="f16", ubatch=512, parallel=4)
    assert place(work, Resources(devices=(device(0, 300, 900.0),), spare_mib=300.0, dram_gb_s=32.0)) is None


def test_a_sliding_layer_keeps_a_window_for_each_slot_and_one_batch() -> None:
    layer = replace(EMPTY, kind="sliding", window=1024)
    assert cells(layer, 131072, 512, 4) == 4608  # llama-kv-cache-iswa.cpp: pad(1024 x 4 + 512, 256)
    assert cells(layer, 2048, 512, 4) == 2048
    assert cells(EMPTY, 1000, 512, 4) == 1024


@pytest.mark.parametrize("used", [2, 8])
def test_experts_stay_in_host_memory_only_as_far_as_they_must(used: int) -> None:
    stack = tuple(replace(EMPTY, dense_bytes=50 * MIB, expert_bytes=600 * MIB) for _ in range(LAYERS))
    of = replace(small((50,) * LAYERS), stack=stack, experts=8, experts_used=used, expert_length=64)
    of = replace(of, weights_bytes=sum(la.dense_bytes + la.expert_bytes for la in stack) + 150 * MIB)
    work = PlacementJob(model=of, context=512, kv_type="f16", ubatch=512, parallel=4)
    found = []
    for free in (600.0, 1500.0, 2500.0, 5000.0):
        placed = place(work, Resources(devices=(device(0, free, 900.0),), spare_mib=100000.0, dram_gb_s=32.0))
        assert placed is not None
        found.append((placed.placement.cpu_layers, placed.placement.cpu_expert_layers))
    assert [experts for _, experts in found] == sorted((experts for _, experts in found), reverse=True)
    assert found[-1] == (0, 0)
    assert found[1][1] > 0
