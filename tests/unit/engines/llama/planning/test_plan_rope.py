"""Contexts above the model's native length: refused, or reached by YaRN with the flags that the engine needs for it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from appliance.engines.llama.planning.arguments.launch import launch_of
from appliance.engines.llama.planning.memory.rope import Rope
from appliance.engines.llama.planning.space import Space
from appliance.engines.llama.process.server import metadata_arguments
from appliance.errors import ConfigError
from appliance.model import Model, RopeScaling, read_model
from appliance.plan import Plan
from appliance.settings import resolve_settings
from tests.builders import ENGINE, IMAGE, SMALL, machine
from tests.builders import model as published
from tests.shapes.beside import MEAN, write_bert

CARRIED = replace(SMALL, rope_scaling=RopeScaling(kind="yarn", factor=4.0, original=8192))


def best(model: Model = SMALL, **flags: str) -> Plan:
    return Space(resolve_settings(flags, {}), IMAGE, ENGINE, machine(), model).best


def test_a_context_above_native_is_refused_with_the_number() -> None:
    with pytest.raises(ConfigError) as caught:
        best(ctx_size="16384")
    assert caught.value.exit_code == 10
    assert caught.value.message == (
        "context length is above the model's native 8,192: 16,384 (flag --ctx-size); "
        "the engine would give no request more than 8,192"
    )
    assert caught.value.hint == "use --ctx-size 8192, or add --rope-scaling yarn: factor 2, at some loss"


def test_yarn_reaches_it_with_all_that_the_engine_needs() -> None:
    plan = best(ctx_size="16384", rope_scaling="yarn")
    assert launch_of(plan).rope == Rope(architecture="llama", factor=2.0, original=8192, context=16384)
    assert metadata_arguments(plan, ENGINE) == (
        *("--override-kv", "llama.context_length=int:16384", "--rope-scaling", "yarn"),
        *("--rope-scale", "2", "--yarn-orig-ctx", "8192"),
    )
    (said,) = [choice.reason for choice in plan.choices if choice.name == "context"]
    assert said.startswith("asked for; beyond the model's native 8,192 by YaRN, factor 2; short texts lose a little")


def test_a_factor_beyond_what_was_tried_is_said() -> None:
    plan = best(ctx_size="65536", rope_scaling="yarn")
    (said,) = [choice.reason for choice in plan.choices if choice.name == "context"]
    assert "factor 8, more than was tried" in said


def test_what_the_file_carries_is_reached_without_another_scaling() -> None:
    plan = best(CARRIED, ctx_size="32768")
    assert metadata_arguments(plan, ENGINE) == ("--override-kv", "llama.context_length=int:32768")
    with pytest.raises(ConfigError, match="above the model's native 8,192: 33,024"):
        best(CARRIED, ctx_size="33024")
    assert best(CARRIED).context == 8192


def test_yarn_on_a_model_that_has_its_own_is_refused() -> None:
    with pytest.raises(ConfigError, match="model has a RoPE scaling of its own, yarn by 4") as caught:
        best(CARRIED, ctx_size="16384", rope_scaling="yarn")
    assert "reaches 32,768 tokens as it is" in (caught.value.hint or "")


@pytest.mark.parametrize(
    ("model", "why", "longest"),
    [
        (CARRIED, "has a RoPE scaling of its own, yarn by 4", 32768),
        (replace(SMALL, positions="none"), "has no RoPE to scale", 8192),
        (replace(SMALL, positions="table"), "has no RoPE to scale but a learned row for each position", 8192),
    ],
)
def test_yarn_is_neither_advised_nor_taken_where_it_does_nothing(model: Model, why: str, longest: int) -> None:
    with pytest.raises(ConfigError, match=why) as caught:
        best(model, ctx_size="65536", rope_scaling="yarn")
    assert f"{longest:,} tokens as it is" in (caught.value.hint or "")
    with pytest.raises(ConfigError, match="above the model's native 8,192: 65,536") as caught:
        best(model, ctx_size="65536")
    assert caught.value.hint == f"use --ctx-size {longest}"


def test_what_positions_a_model_has(tmp_path: Path) -> None:
    assert read_model(write_bert(tmp_path / "bert.gguf", MEAN)).positions == "table"
    assert published("nemotron-h-8b", "Q4_K_M").positions == "none"
    assert published("phi-4", "Q4_K_M").positions == "rope"


@pytest.mark.parametrize(
    ("flags", "given_words"), [({}, "no context length is set"), ({"ctx_size": "4096"}, "the context length is 4,096")]
)
def test_yarn_without_a_longer_context_is_refused(flags: dict[str, str], given_words: str) -> None:
    with pytest.raises(ConfigError, match=f"above the model's native 8,192, and {given_words}") as caught:
        best(SMALL, rope_scaling="yarn", **flags)
    assert "--ctx-size, as 16384" in (caught.value.hint or "")


@given(st.integers(1, 40_000), st.integers(256, 80_000), st.booleans())
def test_no_plan_promises_more_than_the_engine_gives(native: int, asked: int, is_stretched: bool) -> None:
    """`n_ctx_slot` of the engine: at most the context length of the header, or what overrides it."""
    model = replace(SMALL, native_context=native)
    flags = {"ctx_size": str(asked)} | ({"rope_scaling": "yarn"} if is_stretched else {})
    try:
        plan = best(model, **flags)
    except ConfigError:
        assert asked > native or is_stretched
        return
    rope = launch_of(plan).rope
    assert asked <= plan.context <= (rope.context if rope else native)
    assert (rope is not None) == (plan.context > native)
