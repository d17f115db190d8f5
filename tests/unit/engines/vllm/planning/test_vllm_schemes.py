"""Schemes of quantization that vLLM ends over, known before a start by config.json and the GPU; tokenizers; lengths."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from appliance.engines.vllm.planning.model.chips import scheme_chips
from appliance.engines.vllm.planning.model.schemes import Scheme, schemes_of
from appliance.errors import ConfigError, ModelUnreadableError, NoKernelError
from appliance.model import Model, read_model
from appliance.plan import Plan
from appliance.probe import Hardware
from tests.shapes.folders import folder_model, write_folder
from tests.unit.engines.vllm.planning.vllm_spaces import ADA, CPU, TURINGS, best, cards, reason

REPORTS = Path(__file__).parents[4] / "data/reports"
BLACKWELL = cards("2x4090", {"sm": "120", "name": "NVIDIA GeForce RTX 5090"})


def reported(name: str) -> Model:
    made = folder_model("qwen3-8b")
    return replace(made, config=json.loads((REPORTS / name / "config.json").read_text()))


def group(weights: Mapping[str, Any], inputs: Mapping[str, Any] | None = None, **more: Any) -> dict[str, Any]:
    return {"targets": ["Linear"], "weights": dict(weights), "input_activations": inputs and dict(inputs), **more}


def compressed(stored: str, *groups: Mapping[str, Any], **more: Any) -> dict[str, Any]:
    named = {f"group_{at}": each for at, each in enumerate(groups)}
    return {"quant_method": "compressed-tensors", "format": stored, "config_groups": named, **more}


def of(found: dict[str, Any], model: str = "qwen3-8b") -> Model:
    made = folder_model(model)
    return replace(made, config={**made.config, "quantization_config": found})


INT8 = {"num_bits": 8, "type": "int", "strategy": "channel"}
INT4 = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 128}
FP8 = {"num_bits": 8, "type": "float", "strategy": "channel"}
NVFP4 = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16}
MX = {"type": "float", "strategy": "group", "group_size": 32}
BY_TOKEN = {"strategy": "token", "dynamic": True}
INT8_TOKENS, FP8_TOKENS = {**BY_TOKEN, "type": "int"}, {**BY_TOKEN, "type": "float"}
W8A8 = compressed("int-quantized", group(INT8, INT8_TOKENS))
QUARK_INT8 = {
    "quant_method": "quark",
    "global_quant_config": {"weight": {"dtype": "int8"}, "input_tensors": [{"dtype": "int8"}]},
}
QUARK_FP8 = {
    "quant_method": "quark",
    "global_quant_config": {"weight": {"dtype": "fp8_e4m3"}, "input_tensors": {"dtype": "fp8_e4m3"}},
}


@pytest.mark.parametrize(
    ("found", "name"),
    [
        (W8A8, "W8A8 int8"),
        (compressed("int-quantized", group(INT8, {"strategy": "tensor"})), "W8A8 int8"),
        (compressed("int-quantized", group({}, {**BY_TOKEN})), "W8A8 int8"),  # the package's defaults
        (compressed("int-quantized", group(INT4, INT8_TOKENS)), "W4A8 int8"),
        (compressed("pack-quantized", group(INT4)), "W4A16"),
        (compressed("pack-quantized", group({"num_bits": 4, "group_size": -1})), "W4A16"),
        (compressed("pack-quantized", group(INT4, INT8_TOKENS)), "W4A8 int"),
        (compressed("pack-quantized", group(INT4, FP8_TOKENS)), "W4A8 fp8"),
        (compressed("float-quantized", group(FP8, FP8_TOKENS)), "W8A8 fp8"),
        (compressed("naive-quantized", group({**FP8, "strategy": "tensor"})), "W8A16 fp8"),
        (compressed("nvfp4-pack-quantized", group(NVFP4, {**NVFP4, "dynamic": "local"})), "NVFP4"),
        (compressed("nvfp4-pack-quantized", group(NVFP4)), "NVFP4"),
        (compressed("mxfp4-pack-quantized", group({**MX, "num_bits": 4})), "MXFP4"),
        (compressed("mxfp8-quantized", group({**MX, "scale_dtype": "torch.uint8"})), "MXFP8"),
        (compressed("mixed-precision", group(FP8, FP8_TOKENS, format="float-quantized")), "W8A8 fp8"),
        (QUARK_INT8, "W8A8 int8"),
        (QUARK_FP8, "Quark fp8"),
    ],
)
def test_a_scheme_is_told_as_the_engine_tells_it(found: dict[str, Any], name: str) -> None:
    assert schemes_of(found, found["quant_method"]) == (Scheme(name=name),)
    assert scheme_chips(name) is not None or name == "W4A8 int8", "the only one that no GPU of ours was looked up for"


@pytest.mark.parametrize(
    ("found", "machine", "words"),
    [
        (W8A8, BLACKWELL, "W8A8 int8, which vLLM computes on SM 75 to below 100, and this is SM 120"),
        (QUARK_INT8, BLACKWELL, "is quark of the scheme W8A8 int8"),
        (compressed("pack-quantized", group(INT4, FP8_TOKENS)), ADA, "W4A8 fp8, which vLLM computes on SM 90 alone"),
        (
            compressed("mxfp4-pack-quantized", group({**MX, "num_bits": 4})),
            TURINGS,
            "MXFP4, which vLLM computes on SM 80",
        ),
        (QUARK_FP8, TURINGS, "Quark fp8, which vLLM computes on SM 89 or newer, and this is SM 75"),
    ],
)
def test_a_scheme_that_a_gpu_does_not_compute_is_20(found: dict[str, Any], machine: str | Hardware, words: str) -> None:
    with pytest.raises(NoKernelError) as caught:
        best(machine, of(found))
    assert caught.value.exit_code == 20
    assert words in caught.value.message
    others = (caught.value.hint or "").partition(", or in 16 bits")[0]
    assert found["quant_method"] not in others


@pytest.mark.parametrize(
    ("found", "machine"),
    [
        (W8A8, ADA),
        (W8A8, CPU),
        (compressed("pack-quantized", group(INT4, FP8_TOKENS)), "h200"),
        (compressed("float-quantized", group(FP8, FP8_TOKENS)), TURINGS),
        (compressed("pack-quantized", group(INT4)), BLACKWELL),
        (compressed("int-quantized", group(INT8, INT8_TOKENS), ignore=["re:.*self_attn.*", "re:.*mlp.*"]), BLACKWELL),
        (compressed("int-quantized", {**group(INT8, INT8_TOKENS), "targets": ["Qwen3Attention"]}), BLACKWELL),
    ],
)
def test_what_a_gpu_computes_is_planned(found: dict[str, Any], machine: str | Hardware) -> None:
    assert best(machine, of(found, "smollm2-135m")).context


def test_one_card_of_another_kind_is_enough() -> None:
    """The weakest card decides on what is old, the newest on what is no longer computed."""
    mixed = cards("2x4090", {}, {"sm": "120", "name": "NVIDIA GeForce RTX 5090"})
    with pytest.raises(NoKernelError, match="this is SM 120"):
        best(mixed, of(W8A8))


def test_the_reported_folder_is_20_and_other_kernels_can_be_asked_for() -> None:
    model = reported("safetensors-w8a8-int8-on-sm120")
    with pytest.raises(NoKernelError) as caught:
        best(BLACKWELL, model)
    assert 'engine-arg "--linear-backend triton"' in (caught.value.hint or "")
    assert best(BLACKWELL, model, engine_arg="--linear-backend triton").context
    assert "(W8A8 int8); it needs SM 75" in reason(best(ADA, model), "quantization")


def test_experts_have_kernels_of_their_own() -> None:
    of_experts = {**group(INT8, INT8_TOKENS), "targets": ["re:.*mlp.experts.*"]}
    found = compressed("int-quantized", of_experts)
    assert schemes_of(found, "compressed-tensors")[0].is_of_experts
    ignoring = compressed("int-quantized", group(INT8, INT8_TOKENS), ignore=["re:.*self_attn.*"])
    for each in (found, ignoring):
        assert best("h200", of(each, "qwen3-30b-a3b")).context
        assert best(cards("2x4090", *[{"sm": "120"}] * 4), of(each, "qwen3-30b-a3b")).context
    with pytest.raises(NoKernelError):
        best(cards("2x4090", *[{"sm": "120"}] * 4), of(W8A8, "qwen3-30b-a3b"))


@pytest.mark.parametrize(
    ("found", "words"),
    [
        (compressed("pack-quantized", group({**INT4, "actorder": "group"})), "the order of groups (actorder)"),
        (compressed("pack-quantized", group(INT4), sparsity_config={"targets": ["Linear"]}), "it is sparse"),
        (compressed("nvfp4-pack-quantized", group(NVFP4, FP8_TOKENS)), "its weights are NVFP4 and its activations"),
        (compressed("dense", group(INT4)), "vLLM has no scheme for weights and activations of this kind in the format"),
        (compressed("int-quantized", group({**INT8, "symmetric": False}, INT8_TOKENS)), "vLLM has no scheme"),
        ({"quant_method": "awq", "bits": 8, "group_size": 128, "zero_point": True}, "8 bits, and vLLM reads AWQ of 4"),
        ({"quant_method": "gptq", "bits": 3, "group_size": 128, "sym": True}, "GPTQ of 3 bits"),
        ({"quant_method": "gptq", "bits": 4, "group_size": 128, "sym": False}, "asymmetric GPTQ of 4 bits"),
        ({"quant_method": "auto-round", "bits": 1}, "1 bits, and vLLM reads AutoRound of 2 to 8"),
        ({"quant_method": "fp8", "activation_scheme": "token"}, "activation_scheme is 'token'"),
        ({"quant_method": "fp8", "activation_scheme": "static", "weight_block_size": [128, 128]}, "static"),
        ({"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128]}, "1 dimensions"),
        ({"quant_method": "modelopt", "quant_algo": "W4A8_AWQ"}, "quant_algo is 'W4A8_AWQ'"),
    ],
)
def test_what_the_engine_ends_over_on_any_gpu_is_30(found: dict[str, Any], words: str) -> None:
    with pytest.raises(ModelUnreadableError) as caught:
        best("h200", of(found))
    assert caught.value.exit_code == 30
    assert words in caught.value.message
    assert caught.value.hint


@pytest.mark.parametrize(
    "groups", [None, [], {"a": None}, {"a": {"weights": {"num_bits": "x"}}}, {"a": {"weights": {}}}]
)
def test_a_config_that_lies_raises_nothing_else(groups: object) -> None:
    found = {"quant_method": "compressed-tensors", "config_groups": groups, "format": 7, "sparsity_config": 1}
    assert all(isinstance(each, Scheme) for each in schemes_of(found, "compressed-tensors"))
    assert schemes_of({"quant_method": "quark", "global_quant_config": []}, "quark") == ()


def test_mxfp8_of_modelopt_is_computed_in_bfloat16_alone() -> None:
    model = of({"quant_method": "modelopt", "quant_algo": "MXFP8"})
    half = replace(model, config={**model.config, "torch_dtype": "float16"})
    assert "in bfloat16 alone" in reason(best("h200", half), "dtype")
    with pytest.raises(ConfigError, match="modelopt_mxfp8 has not: 'half'"):
        best("h200", model, engine_arg="--dtype half")


def read(folder: Path) -> Plan:
    return best(CPU, read_model(folder, serves="safetensors"))


def test_a_folder_without_any_tokenizer_is_30(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "m", "smollm2-135m")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).unlink()
    with pytest.raises(ModelUnreadableError) as caught:
        read(folder)
    assert "it has no tokenizer: no tokenizer.json, tokenizer.model, vocab.json" in caught.value.message
    assert "interrupted" in (caught.value.hint or "")
    for name in ("tokenizer.model", "tekken.json", "vocab.json", "qwen.tiktoken", "tokenizer.model.v3"):
        (folder / name).write_text("{}")
        assert read(folder).context
        (folder / name).unlink()
    (folder / "tokenizer_config.json").write_text("{}")
    assert "the folder has no vocabulary" in reason(read(folder), "tokenizer")


def test_yarn_of_config_json_is_reached_by_its_own_key() -> None:
    """The hint names the key of config.json, not a flag that would then be refused."""
    model = reported("safetensors-yarn-written-into-config")
    with pytest.raises(ConfigError) as caught:
        best(ADA, model, ctx_size="131072")
    assert caught.value.exit_code == 10
    hint = caught.value.hint or ""
    assert "write max_position_embeddings 131072 into" in hint
    assert "--rope-scaling" not in hint
    with pytest.raises(ConfigError) as asked:
        best(ADA, model, ctx_size="131072", rope_scaling="yarn")
    assert "131,072 with max_position_embeddings 131072" in (asked.value.hint or "")
    said = reason(best("h200", model), "rope_scaling")
    assert said.startswith("config.json has YaRN of factor 4 over 32,768, which is 131,072")
    mended = replace(model, native_context=131072)
    assert best("h200", mended, ctx_size="131072").context == 131072
    assert not [each for each in best("h200", mended).choices if each.name == "rope_scaling"]


def test_other_scalings_reach_what_the_engine_makes_of_them() -> None:
    model = folder_model("qwen3-8b")
    linear = replace(model, config={**model.config, "rope_scaling": {"type": "linear", "factor": 2.0}})
    assert best("h200", linear, ctx_size="81920").context == 81920
    with pytest.raises(ConfigError) as caught:
        best("h200", linear, ctx_size="81921")
    assert "use --ctx-size 81920: the model has a RoPE scaling of its own, linear" in (caught.value.hint or "")
    llama3 = replace(model, config={**model.config, "rope_scaling": {"rope_type": "llama3", "factor": 8.0}})
    with pytest.raises(ConfigError, match="above the model's native 40,960: 81,920"):
        best("h200", llama3, ctx_size="81920")
