"""Facts from metadata, with llama.cpp's defaults."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import gguf
import pytest

from appliance.errors import ModelUnreadableError
from appliance.model import Model, read_model
from tests.unit.model.gguf_files import F32, LLAMA, LLAMA_TENSORS, Q8_0, last_layer, write_model


def facts(
    folder: Path, *, without: str = "", tensors: list[Any] | None = None, tokens: int = 100, **more: Any
) -> Model:
    metadata = {key: value for key, value in LLAMA.items() if key != f"llama.{without}"}
    metadata |= {key.replace("__", "."): value for key, value in more.items()}
    return read_model(write_model(folder / "tiny.gguf", metadata=metadata, tensors=tensors, tokens=tokens))


def test_a_plain_model(tmp_path: Path) -> None:
    model = facts(tmp_path, general__name="Tiny")
    assert (model.architecture, model.name, model.format) == ("llama", "Tiny", "gguf")
    assert (model.layers, model.embedding_length, model.feed_forward_length, model.heads) == (2, 64, 128, 8)
    assert (model.kv_heads, model.key_length, model.value_length) == ((2, 2), 8, 8)
    assert (model.native_context, model.vocabulary) == (512, 100)
    assert (model.experts, model.experts_used, model.expert_bytes) == (0, 0, 0)
    assert (model.output_is_tied, model.is_embedding_model) == (False, False)
    assert (model.cache_kind, model.cache_reason) == ("attention", None)
    q8_0 = (64 * 100 * 2 + 64 * 128) // 32 * 34
    assert model.bytes_by_type == (("Q8_0", q8_0), ("F32", 64 * 64 * 4))
    assert (model.weights_bytes, model.quantization) == (q8_0 + 64 * 64 * 4, "Q8_0")
    assert model.file_bytes == model.path.stat().st_size


def test_defaults(tmp_path: Path) -> None:
    model = facts(tmp_path, without="attention.head_count_kv", tokens=0)
    assert model.kv_heads == (8, 8)
    assert model.name == "tiny"
    assert model.vocabulary == 100  # from the embedding's rows


def test_head_lengths_of_their_own(tmp_path: Path) -> None:
    own: dict[str, Any] = {"llama__attention__key_length": 32, "llama__attention__value_length": 16}
    wide = [("blk.0.attn_q.weight", (64, 256), F32), *(each for each in LLAMA_TENSORS if "attn_q" not in each[0])]
    model = facts(tmp_path, tensors=wide, **own)
    assert (model.key_length, model.value_length, model.cache_reason) == (32, 16, None)
    windowed = facts(
        tmp_path, tensors=wide, **own, llama__attention__sliding_window=128, llama__attention__key_length_swa=64
    )
    assert (windowed.key_length, windowed.value_length) == (64, 16)
    assert ({layer.window for layer in windowed.stack}, windowed.cache_reason) == (
        {None},
        None,
    )  # the engine lets no llama slide


def test_numbers_by_layer(tmp_path: Path) -> None:
    model = facts(
        tmp_path,
        llama__attention__head_count_kv=[4, 0],
        llama__attention__head_count=[8, 4],
        llama__feed_forward_length=[64, 256],
    )
    assert (model.kv_heads, model.heads, model.feed_forward_length) == ((4, 0), 8, 256)


def test_experts(tmp_path: Path) -> None:
    bank = [("blk.0.ffn_up_exps.weight", (64, 32, 4), Q8_0), ("blk.0.ffn_gate_inp.weight", (64, 4), F32)]
    model = facts(
        tmp_path,
        tensors=LLAMA_TENSORS + bank,
        llama__expert_count=4,
        llama__expert_used_count=2,
        llama__expert_feed_forward_length=32,
    )
    assert (model.experts, model.experts_used, model.expert_bytes) == (4, 2, 64 * 32 * 4 // 32 * 34)
    banks = [each for each in model.matrices if each.is_bank]
    assert [(each.type_name, each.size_bytes, each.rows_by) for each in banks] == [("Q8_0", model.expert_bytes, 32)]
    (rest,) = [each for each in model.matrices if not each.is_bank and each.rows_by == 32 and each.type_name == "Q8_0"]
    assert rest.size_bytes == 64 * 128 // 32 * 34


def test_more_used_experts_than_there_are_is_no_model(tmp_path: Path) -> None:
    with pytest.raises(ModelUnreadableError, match=r"llama\.expert_used_count must be from 1 to its 4 experts: 1000"):
        facts(tmp_path, llama__expert_count=4, llama__expert_used_count=1000)


K_PROJECTION = ("blk.0.attn_k.weight", (64, 16), Q8_0)
BANK = ("blk.0.ffn_up_exps.weight", (64, 32, 4), Q8_0)


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"llama__block_count": 49}, "its header says 49 layers, but it has no tensors of layer 48"),
        ({"llama__attention__head_count_kv": 4096}, "4096 KV heads of 8 in layer 0, but blk.0.attn_k.weight has 16"),
        ({"llama__attention__key_length": 1 << 20}, "heads of 1048576 in layer 0"),
        (
            {"llama__attention__head_count": 4096, "llama__attention__key_length": 8},
            "4096 heads of 8 in layer 0, but blk.0.attn_q.weight has 64 rows",
        ),
        ({"llama__embedding_length": 100000}, "says 100,000 values a token, but token_embd.weight has 64"),
        ({"llama__context_length": (1 << 32) - 1}, "llama.context_length must be a whole number from 1 to 33554432"),
        ({}, "it has tensors of experts, but its key llama.expert_count is 0"),
        ({"llama__expert_count": 4}, "expert_used_count must be from 1 to its 4 experts: 0"),
        ({"llama__vocab_size": (1 << 32) - 1}, "says 4294967295 tokens, but its embedding has 100 rows"),
    ],
)
def test_a_header_that_lies_about_its_tensors(tmp_path: Path, more: dict[str, Any], words: str) -> None:
    """Each file is one that the engine refuses, or whose buffers fit into no memory."""
    tensors = [*LLAMA_TENSORS, K_PROJECTION, *([BANK] if not more or "llama__expert_count" in more else [])]
    with pytest.raises(ModelUnreadableError, match=re.escape(words)):
        facts(tmp_path, tensors=tensors, tokens=0, **more)


def test_a_table_of_positions_is_as_long_as_the_header_says(tmp_path: Path) -> None:
    tensors = [*LLAMA_TENSORS, ("position_embd.weight", (64, 512), F32)]
    assert facts(tmp_path, tensors=tensors).positions == "table"
    with pytest.raises(ModelUnreadableError, match=r"says 2,048 positions, but position_embd\.weight has 512 rows"):
        facts(tmp_path, tensors=tensors, llama__context_length=2048)


def test_a_tied_output_is_multiplied_with_and_a_mere_lookup_is_not(tmp_path: Path) -> None:
    lookup = [("token_embd.weight", (64, 104), Q8_0)]
    untied = facts(tmp_path, tokens=0, tensors=[*lookup, ("output.weight", (64, 103), Q8_0), last_layer(2)])
    (output,) = untied.matrices
    assert (untied.output_is_tied, output.is_tied, output.rows_by, output.columns_by) == (False, False, 1, 32)
    tied = facts(tmp_path, tokens=0, tensors=[*lookup, last_layer(2)])
    (output,) = tied.matrices
    assert (tied.output_is_tied, output.is_tied, output.rows_by) == (True, True, 8)
    assert output.size_bytes == 64 * 104 // 32 * 34


@pytest.mark.parametrize("more", [{"llama__pooling_type": 1}, {"llama__attention__causal": False}])
def test_an_embedding_model(tmp_path: Path, more: dict[str, Any]) -> None:
    assert facts(tmp_path, **more).is_embedding_model


@pytest.mark.parametrize(
    ("key", "words"),
    [
        ("llama__ssm__conv_kernel", "a state-space layer keeps a state: llama.ssm.conv_kernel"),
        ("llama__wkv__head_size", "RWKV keeps a state: llama.wkv.head_size"),
        ("llama__attention__kv_lora_rank", "a compressed cache: llama.attention.kv_lora_rank"),
        ("llama__attention__indexer__top_k", "a second cache: llama.attention.indexer.top_k"),
    ],
)
def test_a_cache_of_another_kind_is_never_reckoned(tmp_path: Path, key: str, words: str) -> None:
    model = facts(tmp_path, **dict[str, Any]({key: 4}))
    assert model.cache_kind == "unsupported"
    assert words in (model.cache_reason or "")


def test_a_model_without_heads_is_read_when_it_keeps_a_state(tmp_path: Path) -> None:
    model = facts(
        tmp_path, without="attention.head_count", llama__attention__head_count_kv=0, llama__ssm__state_size=16
    )
    assert (model.cache_kind, model.heads, model.kv_heads) == ("unsupported", 0, (0, 0))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"without": "block_count"}, "no key llama.block_count"),
        ({"without": "context_length"}, "no key llama.context_length"),
        ({"without": "embedding_length"}, "no key llama.embedding_length"),
        ({"without": "attention.head_count"}, "no key llama.attention.head_count"),
        ({"llama__block_count": 513}, "llama.block_count must be a whole number from 1 to 512: 513"),
        ({"llama__context_length": 1.5}, "llama.context_length must be a whole number"),
        ({"llama__attention__head_count_kv": [1, 2, 3]}, "llama.attention.head_count_kv must hold 2 whole numbers"),
        ({"llama__attention__head_count_kv": ["1", "2"]}, "llama.attention.head_count_kv must hold 2 whole numbers"),
        ({"llama__attention__head_count_kv": 0}, "its layers do not attend: heads 8, KV heads 0"),
        ({"llama__attention__head_count": 65}, "its layers do not attend"),
        ({"general__type": "adapter"}, "it is an adapter (LoRA), not a model"),
        ({"general__type": "mmproj"}, "it is a multimodal projector"),
        ({"tensors": []}, "it has no tensors"),
    ],
)
def test_what_cannot_be_served_is_refused_by_name(tmp_path: Path, change: dict[str, Any], words: str) -> None:
    with pytest.raises(ModelUnreadableError) as caught:
        facts(tmp_path, **change)
    assert words in caught.value.message
    assert caught.value.hint


def test_a_projector_by_its_architecture(tmp_path: Path) -> None:
    path = write_model(tmp_path / "p.gguf", architecture="clip", metadata={})
    with pytest.raises(ModelUnreadableError, match="multimodal projector"):
        read_model(path)


def test_no_architecture(tmp_path: Path) -> None:
    path = write_model(tmp_path / "p.gguf", architecture="", metadata={})
    with pytest.raises(ModelUnreadableError, match=r"no key general\.architecture"):
        read_model(path)


def test_the_largest_type_names_the_quantization(tmp_path: Path) -> None:
    kind = gguf.GGMLQuantizationType.Q4_K
    model = facts(tmp_path, tensors=[*LLAMA_TENSORS, ("blk.0.ffn_down.weight", (256, 512), kind)])
    assert model.quantization == "Q4_K"


@pytest.mark.parametrize(
    ("template", "calls_tools", "reasons"),
    [
        ("{{ messages }}", False, False),
        ("{%- if tools %}{{ tools | tojson }}{% endif %}" + " " * 30_000, True, False),
        ("{% if enable_thinking is false %}<think></think>{% endif %}", False, True),
        ("{{ reasoning_effort }} {% for tool in tools %}", True, True),
        ("my_tools, rethinking", False, False),
    ],
)
def test_what_the_chat_template_calls(tmp_path: Path, template: str, *, calls_tools: bool, reasons: bool) -> None:
    model = facts(tmp_path, tokenizer__chat_template=template)
    assert (model.calls_tools, model.reasons) == (calls_tools, reasons)


def test_a_template_of_its_own_for_tools(tmp_path: Path) -> None:
    model = facts(tmp_path, tokenizer__chat_template="{{ x }}", tokenizer__chat_template__tool_use="{{ tools }}")
    assert model.calls_tools


def test_parameters_and_the_quantization_of_the_whole_file(tmp_path: Path) -> None:
    model = facts(tmp_path, general__file_type=15)
    assert model.parameters == 64 * 100 + 64 * 64 + 64 * 128 + 64 * 100
    assert (model.file_type, model.label) == ("Q4_K_M", "Q4_K_M")
    unknown = facts(tmp_path, general__file_type=999)
    assert (unknown.file_type, unknown.label) == (None, unknown.quantization)
