"""Plans after vLLM ran out of memory as it loaded."""

from __future__ import annotations

import pytest

from appliance.plan import Plan, Shortage
from tests.unit.engines.vllm.planning.vllm_spaces import ADA, TURINGS, launch, space

TOTAL_MIB = 24_564  # of the 4090


def wanted_mib(plan: Plan) -> float:
    return (launch(plan).utilization or 0.0) * TOTAL_MIB


def test_memory_that_the_engine_lacked_steps_to_the_number_it_named() -> None:
    here = space(ADA)
    plan = here.best
    less = here.after(plan, Shortage(refused_mib=200.0, context=30720))
    assert less is not None
    assert less.space.best.context == 30720
    assert less.is_smaller(less.space.best, plan)


def test_memory_that_was_refused_is_taken_from_the_cache() -> None:
    here = space(TURINGS, "qwen3.6-27b-awq")
    plan = here.best
    less = here.after(plan, Shortage(refused_mib=512.0, device="cuda:1", free_mib=100.0))
    assert less is not None
    smaller = less.space.best
    assert smaller.placement.shares[0].memory.kv == pytest.approx(plan.placement.shares[0].memory.kv - 412)
    assert launch(smaller).kv_bytes is not None, "else the engine would take all of it again"
    assert (less.missing_mib, less.where) == (412.0, "cuda:1")


@pytest.mark.parametrize("free_mib", [12_000.0, 20_000.0])
def test_a_card_that_lost_memory_since_the_probe_is_asked_for_what_is_free(free_mib: float) -> None:
    """Another appliance may have taken the memory. vLLM ends if less is free than its share, whatever the bytes of its
    cache. 20,000 MiB hold the whole context, so only the share gets smaller."""
    here = space("1x4090")
    plan = here.best
    wanted = wanted_mib(plan)
    less = here.after(plan, Shortage(refused_mib=wanted, device="cuda:0", free_mib=free_mib, is_whole=True))
    assert less is not None
    smaller = less.space.best
    assert wanted_mib(smaller) < free_mib
    assert smaller.context == (plan.context if free_mib == 20_000 else smaller.context) > 0
    assert less.is_smaller(smaller, plan)
    assert (less.missing_mib, less.where) == (pytest.approx(wanted - free_mib), "cuda:0")
    again = less.space.after(smaller, Shortage(refused_mib=free_mib, device="cuda:0", free_mib=11_500, is_whole=True))
    assert again is not None
    assert wanted_mib(again.space.best) < 11_500


def test_the_other_card_keeps_what_it_has_where_one_lost_memory() -> None:
    here = space(TURINGS, "qwen3.6-27b-awq")
    plan = here.best
    less = here.after(plan, Shortage(refused_mib=21_000, device="cuda:1", free_mib=18_000, is_whole=True))
    assert less is not None
    first, second = less.space.best.placement.shares
    before = plan.placement.shares[0].gpu.free_mib
    assert first.gpu.free_mib == before > second.gpu.free_mib
    assert less.is_smaller(less.space.best, plan)


def test_a_share_that_the_user_named_is_not_made_smaller() -> None:
    here = space("1x4090", engine_arg="--gpu-memory-utilization 0.9")
    plan = here.best
    less = here.after(plan, Shortage(refused_mib=22_108, device="cuda:0", free_mib=12_000, is_whole=True))
    assert less is not None
    assert not less.is_smaller(less.space.best, plan)
