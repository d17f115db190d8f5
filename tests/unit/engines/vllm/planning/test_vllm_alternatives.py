"""What a plan of vLLM names where it holds less than the model was trained for; how many requests its cache holds."""

from __future__ import annotations

import re

import pytest

from appliance.plan import Plan
from tests.golden.vllm_plans import Case, space


def plan(machine: str, model: str, **flags: str) -> Plan:
    return space(Case(machine=machine, model=model, flags=flags)).best


def said(found: Plan, name: str) -> str | None:
    return next((choice.reason for choice in found.choices if choice.name == name), None)


def test_an_fp8_checkpoint_on_the_larger_card_alone_is_named() -> None:
    found = plan("24+8", "gemma-3-12b", mmproj="off")
    assert len(found.placement.shares) == 2
    words = said(found, "smaller_checkpoint")
    assert words is not None
    assert "alone on GPU 0 (NVIDIA GeForce RTX 3090) it would hold 131,072 tokens and decode" in words
    assert words.endswith("this 25")


@pytest.mark.parametrize(
    ("machine", "model"), [("2x2080ti-22g", "qwen3.6-27b-awq"), ("a100-80g", "qwen3-30b-a3b"), ("t4", "qwen3-8b-fp8")]
)
def test_a_smaller_type_of_the_cache_holds_what_is_said(machine: str, model: str) -> None:
    words = said(plan(machine, model), "smaller_cache")
    assert words is not None
    told = re.match(r"--kv-type (\w+) would hold ([\d,]+) tokens", words)
    assert told is not None
    kind, tokens = told.groups()
    asked = plan(machine, model, kv_type=kind)
    assert asked.context == pytest.approx(int(tokens.replace(",", "")), rel=0.02)


def test_where_nothing_is_lacking_none_is_named() -> None:
    found = plan("h200", "qwen3-30b-a3b")
    assert [said(found, name) for name in ("smaller_checkpoint", "smaller_cache")] == [None, None]


@pytest.mark.parametrize(("workload", "fewer"), [("chat", 128), ("agent", 64), ("document", 32)])
def test_longer_prompts_leave_room_for_fewer_requests(workload: str, fewer: int) -> None:
    assert plan("h200", "qwen3-30b-a3b", workload=workload).parallel == fewer


def test_more_requests_take_no_more_than_a_sliver_of_the_context() -> None:
    few, many = (plan("2x2080ti-22g", "qwen3.6-27b-awq", **flags) for flags in ({"parallel": "4"}, {}))
    assert few.parallel < many.parallel
    assert 0.98 * few.context <= many.context < few.context
