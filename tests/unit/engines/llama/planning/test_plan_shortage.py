"""What is planned after an engine ran out of memory as it loaded."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from appliance.engines.llama.planning.hardware.observed_limits import NO_LIMITS
from appliance.engines.llama.planning.shortage import missing
from appliance.engines.llama.planning.space import Space
from appliance.errors import ModelDoesNotFitError
from appliance.plan import Plan, Shortage
from appliance.probe import Hardware
from appliance.settings import Settings, resolve_settings
from tests.builders import examples, facts, model
from tests.golden.machines import MACHINES

AUTO = resolve_settings({}, {})
CASES = {
    "laptop-5060": ("llama-3.1-8b", "Q5_K_M"),
    "2x4090": ("gpt-oss-120b", "MXFP4"),
    "gb10": ("gpt-oss-120b", "MXFP4"),
    "cpu-16g": ("llama-3.1-8b", "Q4_K_M"),
}


def space_on(machine: str, hardware: Hardware, asked: Settings = AUTO) -> Space:
    image, engine = facts(has_cuda=bool(hardware.gpus.gpus))
    return Space(asked, image, engine, hardware, model(*CASES[machine]))


@cache
def first(machine: str) -> Plan:
    return space_on(machine, MACHINES[machine]).best


def loaded_mib(plan: Plan) -> float:
    """Return the host memory that loading takes, without the caches, which grow with use."""
    return plan.memory.total - plan.memory.cache - plan.memory.checkpoints


@pytest.mark.thorough
@given(data=st.data(), machine=st.sampled_from(sorted(CASES)))
@settings(max_examples=examples(40), deadline=None)
def test_the_next_plan_needs_so_much_less_there_or_none_fits(data: st.DataObject, machine: str) -> None:
    space, before = space_on(machine, MACHINES[machine]), first(machine)
    shares = before.placement.shares
    at = data.draw(st.integers(-1, len(shares) - 1))
    refused = data.draw(st.floats(1.0, 40_000.0))
    shortage = Shortage(refused_mib=refused, device=None if at < 0 else f"CUDA{at}")
    less = space.after(before, shortage)
    assert less is not None
    assert 0 < less.missing_mib <= refused + 1e-6
    assert not less.is_smaller(before, before)
    try:
        after = less.space.best
    except ModelDoesNotFitError:
        return
    assert less.is_smaller(after, before)
    if at >= 0 and machine != "gb10":
        left = shares[at].memory.total - less.missing_mib
        assert sum(s.memory.total for s in after.placement.shares if s.gpu.id == shares[at].gpu.id) <= left
    else:
        unified = [sum(s.memory.total for s in p.placement.shares) * (machine == "gb10") for p in (before, after)]
        assert loaded_mib(after) + unified[1] <= loaded_mib(before) + unified[0] - less.missing_mib + 1280


def test_each_shortage_adds_to_the_ones_before() -> None:
    space, before = space_on("2x4090", MACHINES["2x4090"]), first("2x4090")
    one = space.after(before, Shortage(refused_mib=500.0, device="CUDA1"))
    assert one is not None
    both = one.space.after(one.space.best, Shortage(refused_mib=700.0, device="CUDA0"))
    assert both is not None
    for share, least in zip(before.placement.shares, (700, 500), strict=True):
        held = sum(s.memory.total for s in both.space.best.placement.shares if s.gpu.id == share.gpu.id)
        assert held <= share.memory.total - least + 1


def test_of_two_cards_only_the_one_that_was_named_has_less() -> None:
    hardware, before = MACHINES["2x4090"], first("2x4090")
    one, other = before.placement.shares
    less = missing(hardware, before, Shortage(refused_mib=500.0, device="CUDA1"), NO_LIMITS)
    assert less is not None
    assert less.limits.of_gpu(other.gpu.id) == int(other.memory.total - 500 + other.gpu.held_back_mib)
    assert less.limits.of_gpu(one.gpu.id) == math.inf == less.limits.host_mib
    assert less.where == f"CUDA1 ({other.gpu.name})"


def test_a_plan_with_room_to_spare_steps_down_from_what_it_takes() -> None:
    hardware = MACHINES["laptop-5060"]
    (card,) = hardware.gpus.gpus
    roomy = replace(hardware, gpus=replace(hardware.gpus, gpus=(replace(card, vram_free_mib=80_000),)))
    space = space_on("laptop-5060", roomy)
    less = space.after(space.best, Shortage(refused_mib=300.0, device="CUDA0"))
    assert less is not None
    assert less.is_smaller(less.space.best, space.best)


def test_what_was_free_counts_and_not_the_whole_buffer_that_was_refused() -> None:
    hardware, before = MACHINES["laptop-5060"], first("laptop-5060")
    (share,) = before.placement.shares
    free_mib = share.memory.total - 100
    shortage = Shortage(refused_mib=share.memory.weights, device="CUDA0", free_mib=free_mib)
    less = missing(hardware, before, shortage, NO_LIMITS)
    assert less is not None
    assert less.limits.gpus_mib == ((share.gpu.id, int(free_mib + share.gpu.context_mib)),)
    assert less.missing_mib == pytest.approx(100 + share.gpu.held_back_mib - share.gpu.context_mib)


def test_where_enough_seemed_free_the_refused_buffer_counts() -> None:
    hardware, before = MACHINES["laptop-5060"], first("laptop-5060")
    (share,) = before.placement.shares
    shortage = Shortage(refused_mib=300.0, device="CUDA0", free_mib=share.memory.total + 700)
    less = missing(hardware, before, shortage, NO_LIMITS)
    assert less is not None
    assert less.missing_mib == pytest.approx(300)


def test_a_gpu_that_the_plan_does_not_use_is_no_reason() -> None:
    for machine, device in (("laptop-5060", "CUDA1"), ("cpu-16g", "CUDA0")):
        space = space_on(machine, MACHINES[machine])
        assert space.after(first(machine), Shortage(refused_mib=300.0, device=device)) is None


def test_what_is_asked_for_stays_whatever_is_missing() -> None:
    asked = resolve_settings({"ctx_size": "16384", "kv_type": "f16", "gpu_layers": "33"}, {})
    roomy = replace(
        MACHINES["laptop-5060"],
        gpus=replace(
            MACHINES["laptop-5060"].gpus,
            gpus=tuple(replace(gpu, vram_free_mib=80_000) for gpu in MACHINES["laptop-5060"].gpus.gpus),
        ),
    )
    space = space_on("laptop-5060", roomy, asked)
    less = space.after(space.best, Shortage(refused_mib=300.0, device="CUDA0"))
    assert less is not None
    with pytest.raises(ModelDoesNotFitError):
        _ = less.space.best
