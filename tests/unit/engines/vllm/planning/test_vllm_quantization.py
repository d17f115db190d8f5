"""Weights that are stored in blocks: what is read of them, and over how many ranks they may be divided."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from appliance.engines.vllm.planning.memory.parallel import tensor_sizes, why_not_tensor
from appliance.engines.vllm.planning.model.chips import weights_kernel
from appliance.engines.vllm.planning.model.quantization import LIMIT, Quantization, quantization_of
from appliance.engines.vllm.planning.model.shape import Shape, shape_of
from appliance.engines.vllm.planning.space import Space
from appliance.errors import ConfigError, ModelUnreadableError, NoKernelError
from appliance.image_facts import Quantization as QuantizationFacts
from appliance.model import Model
from appliance.plan import Plan
from tests.golden.vllm_plans import engine_facts, hardware, inputs
from tests.shapes.folders import folder_model
from tests.unit.engines.vllm.planning.vllm_spaces import CPU, TURINGS, best, cards, launch, reason

BLOCKS = {"quant_method": "fp8", "weight_block_size": [128, 128]}
PACKED = {"format": "pack-quantized", "config_groups": {"group_0": {"weights": {"num_bits": 4, "group_size": 128}}}}


def stored_as(found: object, model: str = "qwen3-8b", **changes: Any) -> Model:
    made = folder_model(model)
    return replace(made, config={**made.config, "quantization_config": found}, **changes)


def of(found: object) -> Quantization:
    return quantization_of({"quantization_config": found}, {})


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        ({"quant_method": "awq", "bits": 4, "group_size": 128}, ("awq", 4, 128, None)),
        ({"quant_method": "gptq", "bits": 4, "group_size": -1}, ("gptq", 4, None, None)),
        (BLOCKS, ("fp8", None, 128, 128)),
        ({"quant_method": "fp8", "weight_block_size": [64, 32]}, ("fp8", None, 32, 64)),
        ({"quant_method": "fp8", "weight_block_size": [128]}, ("fp8", None, None, None)),
        ({"quant_method": "compressed-tensors", **PACKED}, ("compressed-tensors", 4, 128, None)),
        (
            {
                "quant_method": "compressed-tensors",
                "config_groups": {
                    "a": {"weights": {"strategy": "block", "num_bits": 8, "block_structure": [128, 128]}}
                },
            },
            ("compressed-tensors", 8, 128, 128),
        ),
        (
            {
                "quant_method": "compressed-tensors",
                "config_groups": {"a": {"weights": {"group_size": 16}}, "b": {"weights": {"group_size": 128}}},
            },
            ("compressed-tensors", None, 128, None),
        ),
        ({"quantization": {"quant_algo": "NVFP4", "group_size": 16}}, ("modelopt_fp4", None, 16, None)),
        ({}, (None, None, None, None)),
        ("fp8", (None, None, None, None)),
    ],
)
def test_what_is_read_of_blocks(found: object, expected: tuple[Any, ...]) -> None:
    stored = of(found)
    assert (stored.name, stored.bits, stored.group, stored.rows) == expected


@pytest.mark.parametrize(
    ("found", "method"),
    [
        ({"quant_method": "modelopt", "quant_algo": "FP8"}, "modelopt"),
        ({"quantization": {"quant_algo": "FP8_PB_WO"}}, "modelopt"),
        ({"quantization": {"quant_algo": "NVFP4"}}, "modelopt_fp4"),
        ({"quant_method": "modelopt", "quant_algo": "W4A16_NVFP4"}, "modelopt_fp4"),
        ({"quant_method": "modelopt", "quant_algo": "MXFP8"}, "modelopt_mxfp8"),
        ({"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION"}, "modelopt_mixed"),
        ({"quant_method": "AWQ"}, "awq"),
        ({"quant_method": "compressed_tensors"}, "compressed-tensors"),
        ({"quant_method": "auto-round"}, "inc"),
    ],
)
def test_the_method_is_called_as_the_engine_calls_it(found: object, method: str) -> None:
    assert of(found).name == method
    assert method in {each.name for each in known_methods()}


def known_methods() -> tuple[QuantizationFacts, ...]:
    return engine_facts().quantizations


def without_methods(machine: str, model: Model) -> Plan:
    given = inputs(hardware(machine), model, {})
    return Space(replace(given, facts=replace(given.facts, quantizations=()))).best


def test_a_method_that_the_engine_does_not_know_is_30_with_those_it_knows() -> None:
    for machine, model in (("1x4090", "qwen3-8b"), (CPU, "smollm2-135m")):
        with pytest.raises(ModelUnreadableError) as caught:
            best(machine, stored_as({"quant_method": "ternary"}, model))
        assert caught.value.exit_code == 30
        assert "config.json: vLLM 0.33.0 does not know its quantization method: 'ternary'" in caught.value.message
        assert "compressed-tensors, deepseek_v4_fp8" in (caught.value.hint or "")
    assert best("1x4090", folder_model("qwen3-8b-fp8")).context
    unlisted = without_methods("1x4090", stored_as({"quant_method": "ternary"}))
    assert unlisted.context, "facts that list none decide nothing"


def test_the_table_of_kernels_has_the_engine_s_own_chips() -> None:
    looked_up = {each.name: weights_kernel(each.name, 120) for each in known_methods()}
    own = {each.name: each.lowest_sm for each in known_methods()}
    assert {name: str(found.least_sm) for name, found in looked_up.items() if found} == {
        name: own[name] for name, found in looked_up.items() if found
    }
    assert sum(found is not None for found in looked_up.values()) > 15


@pytest.mark.parametrize(
    ("machine", "kernel"), [("a100-80g", "Marlin, weights only"), ("1x4090", "fp8 matrix products")]
)
def test_fp8_of_modelopt_needs_sm_80_and_is_native_from_89(machine: str, kernel: str) -> None:
    model = stored_as({"quantization": {"quant_algo": "FP8"}}, "qwen3-8b-fp8")
    assert f"kernels: {kernel}; it needs SM 80" in reason(best(machine, model), "quantization")
    with pytest.raises(NoKernelError) as caught:
        best(TURINGS, model)
    assert "is modelopt, which needs SM 80, and this is SM 75" in caught.value.message


def test_an_older_key_of_compressed_tensors_is_read() -> None:
    found = quantization_of({"compression_config": {"quant_method": "compressed-tensors", **PACKED}}, {})
    assert (found.name, found.group) == ("compressed-tensors", 128)


@pytest.mark.parametrize(
    ("left_out", "covers"),
    [
        ([], True),
        (["lm_head", "re:.*mlp.gate$"], True),
        (["self_attn"], False),
        (["attn"], False),
        ([""], True),
        (["re:.*self_attn.*"], False),
        (["model.layers.0.self_attn.o_proj"], True),
        ([f"model.layers.{at}.self_attn.o_proj" for at in range(4)], False),
        ([f"model.vision_tower.layers.{at}.self_attn.o_proj" for at in range(27)], True),
    ],
)
def test_modules_that_are_left_out(left_out: list[str], covers: bool) -> None:
    for name in ("ignore", "modules_to_not_convert", "exclude_modules", "ignored_layers"):
        assert of({"quant_method": "fp8", name: left_out}).covers("self_attn", "o_proj", layers=4) is covers


def test_blocks_of_gate_and_up_stay_whole() -> None:
    """Qwen3-30B-A3B in fp8: 768 / 4 = 192 is one block and a half."""
    model = stored_as(BLOCKS, "qwen3-30b-a3b")
    assert tensor_sizes(shape_of(model), 8) == (1, 2)
    four = cards("2x4090", *[{} for _ in range(4)])
    with pytest.raises(ConfigError) as caught:
        best(four, model, engine_arg="--tensor-parallel-size 4")
    assert "experts 768 / 4 = 192 is not divisible by the group of 128" in caught.value.message
    assert caught.value.hint == "this model allows 1, 2"
    plan = best(four, model)
    assert launch(plan).tensor_parallel <= 2
    assert "768 / 4 = 192" in reason(plan, "placement")


def test_groups_of_the_attention_s_output_stay_whole() -> None:
    """12 heads of 64: 768 / 4 = 192 inputs of the output projection."""
    shape = replace(shape_of(stored_as(PACKED)), heads=12, kv_heads=4, output_length=64, query_length=64)
    assert why_not_tensor(shape, 2) is None
    assert why_not_tensor(shape, 4) == "output of attention 768 / 4 = 192 is not divisible by the group of 128"
    plain = replace(shape, quantization=replace(shape.quantization, left_out=("re:.*self_attn.*",)))
    assert why_not_tensor(plain, 4) is None


def test_rows_of_keys_stay_whole() -> None:
    """One KV head of 64 a rank is half a block of 128 rows."""
    shape = replace(shape_of(stored_as(BLOCKS)), kv_heads=8, key_length=64, value_length=64)
    assert why_not_tensor(shape, 4) is None
    assert why_not_tensor(shape, 8) == "keys 512 / 8 = 64 is not divisible by the block of 128 rows"


def test_the_output_of_latent_attention_is_divided_by_its_own_heads() -> None:
    shape = shape_of(stored_as(BLOCKS, "deepseek-v2-lite"))
    assert (shape.output_length, shape.query_length) == (128, 192)
    assert why_not_tensor(shape, 16) is not None


def test_a_shared_expert_counts() -> None:
    """Qwen3-Next's 512 / 8 = 64: `Weight input_size_per_partition = 64 is not divisible by … block_k = 128`."""
    shape = replace(shape_of(stored_as(BLOCKS)), shared_length=512)
    assert why_not_tensor(shape, 4) is None
    assert "shared expert 512 / 8 = 64" in (why_not_tensor(shape, 8) or "")


ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=8) | st.floats(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
)
KEYS = st.sampled_from(
    (
        "quant_method", "quant_algo", "bits", "group_size", "weight_block_size", "config_groups", "ignore",
        "quantization", "weights", "block_structure", "modules_to_not_convert",
    )
)  # fmt: skip


@given(st.dictionaries(KEYS, ANYTHING | st.dictionaries(KEYS, ANYTHING, max_size=3), max_size=6))
def test_whatever_a_file_says_is_read_or_left_out(found: dict[str, Any]) -> None:
    stored = of(found)
    assert stored.group is None or 0 < stored.group <= LIMIT
    assert stored.rows is None or 0 < stored.rows <= LIMIT


@given(
    st.integers(1, 16),
    st.sampled_from((32, 64, 128)),
    st.sampled_from((None, 64, 128)),
    st.integers(1, 64).map(lambda n: 64 * n),
    st.sampled_from((4, 8, 12, 16, 32)),
)
def test_no_rank_has_a_part_of_a_block(ranks: int, group: int, rows: int | None, length: int, heads: int) -> None:
    stored = Quantization(name="fp8", group=group, rows=rows)
    shape: Shape = replace(shape_of(folder_model("qwen3-8b")), quantization=stored, feed_forward=length, heads=heads)
    shape = replace(shape, kv_heads=heads // 4, key_length=64, value_length=64, output_length=64, query_length=64)
    if ranks == 1 or why_not_tensor(shape, ranks) is not None:
        return
    assert (length // ranks) % group == (heads // ranks * 64) % group == 0
    if rows:
        assert (length // ranks) % rows == (heads // ranks * 64) % rows == 0
