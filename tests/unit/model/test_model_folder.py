"""Facts from config.json and safetensors headers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from appliance.errors import ModelUnreadableError
from appliance.model import Model, digest, read_model
from appliance.model.architecture.folder import read_folder
from tests.builders import examples
from tests.shapes.beside import write_projector
from tests.unit.model.gguf_files import write_model
from tests.unit.model.safetensors_files import CONFIG, DENSE, Tensors, read_or_words, write_folder, write_shards

SAME_FOLDER = settings(
    max_examples=examples(100), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
MOE: Tensors = {
    **DENSE,
    "model.layers.0.mlp.experts.0.up_proj.weight": ("BF16", (32, 64)),
    "model.layers.0.mlp.experts.1.up_proj.weight": ("BF16", (32, 64)),
    "model.layers.0.mlp.shared_experts.up_proj.weight": ("BF16", (32, 64)),
    "model.layers.0.mlp.gate.weight": ("BF16", (2, 64)),
    "model.layers.1.mlp.experts.gate_up_proj": ("BF16", (2, 64, 64)),
}


def facts(folder: Path, tensors: Tensors = DENSE, **more: Any) -> Model:
    return read_model(write_folder(folder / "m", tensors, **more), serves="safetensors")


def refusal(folder: Path, tensors: Tensors = DENSE, **more: Any) -> str:
    with pytest.raises(ModelUnreadableError) as caught:
        facts(folder, tensors, **more)
    assert caught.value.exit_code == 30
    assert caught.value.hint
    return caught.value.message


def test_a_plain_model(tmp_path: Path) -> None:
    model = facts(tmp_path)
    assert (model.format, model.architecture, model.name) == ("safetensors", "LlamaForCausalLM", "m")
    assert (model.layers, model.embedding_length, model.feed_forward_length, model.heads) == (2, 64, 128, 8)
    assert (model.kv_heads, model.key_length, model.native_context, model.vocabulary) == ((2, 2), 8, 512, 100)
    assert [(layer.kind, layer.k_elements, layer.v_elements) for layer in model.stack] == [("full", 16, 16)] * 2
    assert [layer.dense_bytes for layer in model.stack] == [2 * (64 * 64 + 128 * 64), 2 * 64 * 64 + 4 * 64]
    assert (model.embedding_bytes, model.output_bytes) == (2 * 6400, 2 * (6400 + 64))
    assert (model.output_is_tied, model.quantization) == (False, "BF16")
    assert model.bytes_by_type[-1] == ("F32", 256)
    assert (model.cache_kind, model.cache_reason, model.calls_tools) == ("attention", None, False)


def test_parts_and_their_digest(tmp_path: Path) -> None:
    model = read_folder(write_shards(tmp_path / "m"))
    assert len(model.parts) == 2
    assert model.file_bytes == sum(part.stat().st_size for part in model.parts)
    before = digest(model.parts, model.header_bytes)
    data = bytearray(model.parts[1].read_bytes())
    data[-1] ^= 1
    model.parts[1].write_bytes(data)
    assert digest(model.parts, model.header_bytes).key != before.key


def test_experts(tmp_path: Path) -> None:
    model = facts(tmp_path, MOE, num_experts=2, num_experts_per_tok=1)
    assert (model.experts, model.experts_used) == (2, 1)
    assert [layer.expert_bytes for layer in model.stack] == [2 * 2 * 32 * 64, 2 * 2 * 64 * 64]
    assert model.expert_bytes == 2 * 2 * 32 * 64 + 2 * 2 * 64 * 64
    layers = sum(layer.dense_bytes + layer.expert_bytes for layer in model.stack)
    assert model.weights_bytes == layers + model.embedding_bytes + model.output_bytes


def test_latents(tmp_path: Path) -> None:
    latent: dict[str, Any] = {
        "model_type": "deepseek_v3",
        "kv_lora_rank": 512,
        "qk_rope_head_dim": 64,
        "num_key_value_heads": 8,
    }
    model = facts(tmp_path, **latent)
    assert {(layer.kind, layer.k_elements, layer.v_elements) for layer in model.stack} == {("mla", 576, 0)}
    assert "latent attention" in (facts(tmp_path, **latent | {"model_type": "minicpm3"}).cache_reason or "")


def test_sliding_windows(tmp_path: Path) -> None:
    kinds = ["sliding_attention", "full_attention"]
    model = facts(tmp_path, sliding_window=128, layer_types=kinds)
    assert [(layer.kind, layer.window) for layer in model.stack] == [("sliding", 128), ("full", None)]
    unused = facts(tmp_path, sliding_window=128, use_sliding_window=False)
    assert {layer.window for layer in unused.stack} == {None}
    assert facts(tmp_path, sliding_window=None).cache_reason is None
    assert [layer.kind for layer in facts(tmp_path, sliding_window=9, sliding_window_pattern=2).stack] == [
        "sliding",
        "full",
    ]
    all_slide = facts(tmp_path, sliding_window=128, model_type="mistral")
    assert {(layer.kind, layer.window) for layer in all_slide.stack} == {("sliding", 128)}
    assert {layer.kind for layer in facts(tmp_path, sliding_window=None, model_type="mistral").stack} == {"full"}
    unsaid = facts(tmp_path, sliding_window=128)
    assert (unsaid.cache_kind, unsaid.stack) == ("unsupported", ())
    assert "does not say which layers use it" in (unsaid.cache_reason or "")
    assert "must name 2 layers, but names 1" in refusal(tmp_path, sliding_window=128, layer_types=kinds[:1])


def test_draft_layers(tmp_path: Path) -> None:
    numbered = {**DENSE, "model.layers.2.eh_proj.weight": ("BF16", (64, 128))}
    model = facts(tmp_path, numbered, num_nextn_predict_layers=1)
    assert [layer.is_draft for layer in model.stack] == [False, False, True]
    assert (model.layers, model.stack[2].dense_bytes) == (3, 2 * 64 * 128)
    apart = {
        **DENSE,
        "mtp.fc.weight": ("BF16", (64, 128)),
        "mtp.layers.0.self_attn.q_proj.weight": ("BF16", (64, 64)),
    }
    assert facts(tmp_path, apart, mtp_num_hidden_layers=1).stack[2].dense_bytes == 2 * (64 * 128 + 64 * 64)
    assert facts(tmp_path, num_nextn_predict_layers=1).layers == 2  # told of, and left out of this copy
    assert "its weights have layer 3" in refusal(tmp_path, {**DENSE, "model.layers.3.x.weight": ("F32", (4,))})


def test_the_language_part_of_a_multimodal_model(tmp_path: Path) -> None:
    tensors = {name.replace("model.", "model.language_model.", 1): tensor for name, tensor in DENSE.items()}
    tensors["model.visual.blocks.7.attn.weight"] = ("BF16", (64, 64))
    text = {key: value for key, value in CONFIG.items() if key != "architectures"}
    config = {"architectures": ["Qwen3VLForConditionalGeneration"], "text_config": text, "vision_config": {}}
    model = facts(tmp_path, tensors, config=config)
    assert (model.layers, model.architecture) == (2, "Qwen3VLForConditionalGeneration")
    assert model.output_bytes == 2 * (6400 + 64 + 64 * 64)


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"linear_num_value_heads": 48}, "linear attention keeps a state"),
        ({"index_topk": 2048}, "for its indexer"),
        ({"layer_types": ["linear_attention", "full_attention"]}, "a kind whose cache is unknown: linear_attention"),
        ({"mamba_d_state": 128}, "a state-space layer keeps a state"),
        ({"is_encoder_decoder": True}, "an encoder-decoder model"),
        ({"num_kv_shared_layers": 5}, "share a cache"),
    ],
)
def test_what_is_not_known_is_not_reckoned(tmp_path: Path, more: dict[str, Any], words: str) -> None:
    model = facts(tmp_path, **more)
    assert (model.cache_kind, model.stack) == ("unsupported", ())
    assert words in (model.cache_reason or "")


@pytest.mark.parametrize(
    ("quantization", "words"),
    [
        ({"quant_method": "awq", "bits": 4, "group_size": 128}, "awq 4-bit"),
        ({"quant_method": "gptq", "bits": 8}, "gptq 8-bit"),
        ({"quant_method": "fp8", "fmt": "e4m3"}, "fp8"),
        ({"quant_method": "mxfp4"}, "mxfp4"),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, "modelopt NVFP4"),
        ({"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "FP8"}}, "modelopt FP8"),
        (
            {
                "quant_method": "compressed-tensors",
                "format": "nvfp4-pack-quantized",
                "config_groups": {"a": {"weights": {"num_bits": 4}}, "b": {"weights": {"num_bits": 8}}},
            },
            "compressed-tensors nvfp4-pack-quantized 4-bit",
        ),
        ({"group_size": 128}, "unknown"),
        ({}, "BF16"),
    ],
)
def test_quantization(tmp_path: Path, quantization: dict[str, Any], words: str) -> None:
    assert facts(tmp_path, quantization_config=quantization).quantization == words


def test_quantization_in_a_file_of_its_own(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "m")
    (folder / "hf_quant_config.json").write_text('{"quantization": {"quant_algo": "NVFP4"}}')
    found = read_folder(folder)
    assert found.quantization == "modelopt NVFP4"
    assert found.config["quantization_config"] == {"quantization": {"quant_algo": "NVFP4"}}


def test_quantization_of_config_json_wins_over_the_file_beside(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "m", quantization_config={"quant_method": "fp8"})
    (folder / "hf_quant_config.json").write_text('{"quantization": {"quant_algo": "NVFP4"}}')
    found = read_folder(folder)
    assert found.quantization == "fp8"
    assert found.config["quantization_config"] == {"quant_method": "fp8"}


@pytest.mark.parametrize(
    ("name", "has"),
    [
        ("model.layers.0.self_attn.k_scale", True),
        ("model.layers.0.self_attn.k_proj.k_scale", True),
        ("model.layers.0.self_attn.v_proj.output_scale", True),
        ("model.layers.0.self_attn.attn.kv_scale", True),
        ("model.layers.0.self_attn.k_proj.weight_scale", False),
        ("model.layers.0.self_attn.k_proj.input_scale", False),
    ],
)
def test_scales_of_a_cache(tmp_path: Path, name: str, has: bool) -> None:
    found = read_folder(write_folder(tmp_path / "m", {**DENSE, name: ("F32", (1,))}))
    assert found.has_kv_scales is has


def test_a_chat_template(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "m")
    (folder / "tokenizer_config.json").write_text('{"chat_template": "{{ tools }}"}')
    assert read_folder(folder).has_chat_template
    assert read_folder(folder).calls_tools
    (folder / "tokenizer_config.json").write_text("{}")
    assert not read_folder(folder).calls_tools
    (folder / "chat_template.jinja").write_text("{{ tools }}")
    assert read_folder(folder).has_chat_template
    assert read_folder(folder).calls_tools


def test_an_image_of_the_other_engine_refuses_it_and_names_the_right_ones(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "m", quantization_config={"quant_method": "awq", "bits": 4})
    with pytest.raises(ModelUnreadableError) as caught:
        read_model(folder)
    assert caught.value.message.endswith(f"{folder}: safetensors (awq 4-bit)")
    assert caught.value.hint == (
        "take the model as a GGUF file, which may be unquantized. Converting the folder needs torch and transformers, "
        "which this image does not have: run convert_hf_to_gguf.py of llama.cpp elsewhere and put its file on the "
        "volume, or serve the folder with one of the images whose name begins vllm-"
    )


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"architectures": ...}, "it has no architectures"),
        ({"architectures": ["\x1b[2J"]}, "it has no architectures"),
        ({"num_hidden_layers": ...}, "it has no num_hidden_layers"),
        ({"num_hidden_layers": 10**9}, "its num_hidden_layers must be a whole number from 1 to 512"),
        ({"num_hidden_layers": "2"}, "its num_hidden_layers must be a whole number"),
        ({"num_hidden_layers": 3}, "its weights lack layer 2 of 3"),
        ({"num_hidden_layers": 1}, "its weights have layer 1, but config.json has 1 and"),
        ({"hidden_size": 0}, "its hidden_size must be a whole number from 1"),
        ({"vocab_size": True}, "its vocab_size must be a whole number"),
        ({"max_position_embeddings": None}, "it has no max_position_embeddings"),
        ({"num_attention_heads": 0, "num_key_value_heads": 0}, "its layers have no attention"),
        ({"text_config": [1]}, "its text_config is not an object"),
        ({"quantization_config": "awq"}, "its quantization_config is not an object"),
        ({"layer_types": 5}, "its layer_types must be a list of names"),
    ],
)
def test_a_config_that_lies(tmp_path: Path, change: dict[str, Any], words: str) -> None:
    assert words in refusal(tmp_path, **change)


@pytest.mark.parametrize("text", ["", "[]", "5", '{"a": ' * 100_000, "[" * 100_000, '{"a": 1, "a": 2}', "\x00", "NaN"])
def test_a_config_that_is_none(tmp_path: Path, text: str) -> None:
    folder = write_folder(tmp_path / "m")
    (folder / "config.json").write_text(text)
    with pytest.raises(ModelUnreadableError, match=r"config\.json"):
        read_folder(folder)


VALUES: st.SearchStrategy[Any] = (
    st.none() | st.booleans() | st.integers(-5, 1 << 40) | st.floats() | st.text(max_size=5) | st.just([])
)
KEYS = st.sampled_from(
    [*CONFIG, "sliding_window", "layer_types", "text_config", "quantization_config", "kv_lora_rank", "num_experts"]
)


@given(st.dictionaries(KEYS, VALUES | st.lists(VALUES, max_size=3) | st.dictionaries(KEYS, VALUES, max_size=3)))
@SAME_FOLDER
def test_any_config_is_read_or_refused_in_words(tmp_path: Path, change: dict[str, Any]) -> None:
    folder = tmp_path / "m"
    if not folder.exists():
        write_folder(folder)
    (folder / "config.json").write_text(json.dumps({**CONFIG, **change}))
    model = read_or_words(folder, read_folder)
    if isinstance(model, Model):
        assert len(model.stack) == (model.layers if model.cache_kind == "attention" else 0)


def test_a_projector_beside_the_model_is_found(tmp_path: Path) -> None:
    model = write_model(tmp_path / "m.gguf")
    assert read_model(model).projector is None
    beside = write_projector(tmp_path / "mmproj-m.gguf", 64)
    assert (found := read_model(model).projector)
    assert found.path == beside
    beside.write_bytes(b"GGUF and nothing else")
    assert read_model(model).projector is None
    write_model(beside)
    assert read_model(model).projector is None  # a language model of that name


@pytest.mark.parametrize("file", ["chat_template.jinja", "tokenizer_config.json"])
def test_what_its_chat_template_calls(tmp_path: Path, file: str) -> None:
    folder = write_folder(tmp_path / "m")
    assert (read_folder(folder).calls_tools, read_folder(folder).reasons) == (False, False)
    template = "{{ tools }} <think>"
    text = template if file.endswith(".jinja") else json.dumps({"chat_template": [{"name": "x", "template": template}]})
    (folder / file).write_text(text)
    assert (read_folder(folder).calls_tools, read_folder(folder).reasons) == (True, True)


@pytest.mark.parametrize(
    ("file", "text", "template"),
    [
        ("chat_template.jinja", "{{ a }}", "{{ a }}"),
        ("chat_template.json", r'{"chat_template": "<\uff5cAssistant\uff5c>"}', "<｜Assistant｜>"),
        ("tokenizer_config.json", r'{"chat_template": "\"a\"\n"}', '"a"\n'),
        (
            "tokenizer_config.json",
            '{"chat_template": [{"name": "default", "template": "a"}, {"template": "b"}, 5]}',
            "a\nb",
        ),
        ("tokenizer_config.json", '{"chat_template": [5]}', None),
        ("tokenizer_config.json", '{"chat_template": 5}', None),
        ("chat_template.json", "[1]", None),
    ],
)
def test_a_template_is_read_as_the_model_s_text(tmp_path: Path, file: str, text: str, template: str | None) -> None:
    folder = write_folder(tmp_path / "m")
    (folder / file).write_text(text)
    assert read_folder(folder).chat_template == template


THINKS = [{"content": "<think>", "id": 1}, {"content": "</think>", "id": 2}]


@pytest.mark.thorough
def test_tokens_beside_the_vocabulary(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "m")
    assert read_folder(folder).added_tokens == frozenset()
    (folder / "tokenizer_config.json").write_text('{"added_tokens_decoder": {"7": {"content": "<old>"}}}')
    assert read_folder(folder).added_tokens == {"<old>"}
    vocabulary = {f"word {at}": at for at in range(200_000)}
    tokenizer = {"version": "1.0", "added_tokens": THINKS, "model": {"vocab": vocabulary}}
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer, indent=2))
    assert read_folder(folder).added_tokens == {"<think>", "</think>"}


@given(st.binary(max_size=60))
@SAME_FOLDER
def test_any_tokenizer_leaves_a_model_or_is_named(tmp_path: Path, text: bytes) -> None:
    folder = tmp_path / "m"
    if not folder.exists():
        write_folder(folder)
    (folder / "tokenizer.json").write_bytes(b'{"added_tokens": ' + text)
    (folder / "tokenizer_config.json").write_bytes(b'{"added_tokens_decoder": ' + text)
    try:
        found = read_folder(folder).added_tokens
    except ModelUnreadableError as error:
        found, said = frozenset(), error.message
    else:
        said = "tokenizer"
    assert all(isinstance(token, str) for token in found)
    assert "tokenizer" in said


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("tokenizer_config.json", "{", "it is not JSON"),
        ("tokenizer_config.json", "", "it is not JSON"),
        ("tokenizer_config.json", "[]", "it is not a JSON object"),
        ("tokenizer.json", '{"version": "1.0", "model": {"vocab": {"a": 0', "it was cut off"),
        ("tokenizer.json", "", "it was cut off"),
    ],
)
def test_a_tokenizer_that_the_engine_would_end_over_is_30(name: str, text: str, words: str, tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "m")
    (folder / name).write_text(text)
    with pytest.raises(ModelUnreadableError) as caught:
        read_folder(folder)
    assert f"{folder / name}: {words}" in caught.value.message


def test_a_tokenizer_may_end_in_line_breaks_and_name_a_thing_twice(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "m")
    (folder / "tokenizer.json").write_text('{"version": "1.0"}\n\n')
    (folder / "tokenizer_config.json").write_text('{"chat_template": "a", "chat_template": "{{ tools }}"}')
    assert not read_folder(folder).calls_tools, "what is said twice is not read here, and is no error"
