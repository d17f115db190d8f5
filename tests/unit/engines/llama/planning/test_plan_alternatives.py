"""What a plan names where it costs much: each alternative is then planned as it says."""

from __future__ import annotations

import re

import pytest

from appliance.plan import Plan
from tests.golden.matrix import Cell


def said(plan: Plan, name: str) -> str | None:
    return next((choice.reason for choice in plan.choices if choice.name == name), None)


def decode(plan: Plan) -> str:
    assert plan.speed is not None
    return f"decode {plan.speed.decode_tokens_per_s:.0f} tok/s"


@pytest.mark.parametrize(
    ("machine", "name", "quantization"),
    [("L8", "llama-3.1-8b", "Q5_K_M"), ("3090d", "qwen3-32b", "Q4_K_M"), ("T4", "mistral-small-24b", "Q4_K_M")],
)
def test_a_smaller_type_of_the_cache_holds_what_is_said(machine: str, name: str, quantization: str) -> None:
    cell = Cell(machine=machine, model=name, quantization=quantization)
    words = said(cell.space().best, "smaller_cache")
    assert words is not None
    told = re.match(r"--kv-type q4_0 would hold ([\d,]+) tokens: (decode \d+ tok/s)", words)
    assert told is not None
    smaller = cell.space(kv_type="q4_0").best
    assert (f"{smaller.context:,}", decode(smaller)) == told.groups()
    assert said(smaller, "smaller_cache") is None


def test_64k_on_8_gb_is_named_with_its_price() -> None:
    cell = Cell(machine="L8", model="llama-3.1-8b", quantization="Q5_K_M")
    words = said(cell.space().best, "smaller_cache")
    assert words is not None
    asked = cell.space(kv_type="q4_0", ctx_size="65536").best
    assert f"with --ctx-size 65536 as well {decode(asked)}" in words


@pytest.mark.parametrize(
    ("machine", "name", "smaller"), [("4090", "llama-3.3-70b", "IQ2_XXS"), ("L8", "phi-4", "Q2_K")]
)
def test_a_slow_plan_names_the_largest_quantization_that_lies_on_the_gpu(machine: str, name: str, smaller: str) -> None:
    cell = Cell(machine=machine, model=name, quantization="Q4_K_M")
    (choice,) = (choice for choice in cell.space().best.choices if choice.name == "smaller_file")
    assert choice.value == smaller
    assert "it lies on the GPUs as a whole and would decode" in choice.reason


@pytest.mark.parametrize(
    ("machine", "name", "quantization"),
    [("H100", "llama-3.1-8b", "Q5_K_M"), ("CPU64", "llama-3.1-8b", "Q5_K_M"), ("4090", "gpt-oss-120b", "MXFP4")],
)
def test_where_nothing_is_lacking_and_without_a_gpu_none_is_named(machine: str, name: str, quantization: str) -> None:
    best = Cell(machine=machine, model=name, quantization=quantization).space().best
    assert [said(best, name) for name in ("smaller_cache", "smaller_file")] == [None, None]
