"""Cache and weights of each layer, for every kind of cache.

The figures of the small shapes are the real engine's: `tests/process/test_model_engine.py` compares them with its
allocations.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from appliance.errors import ModelUnreadableError
from appliance.model import Model, read_model
from appliance.model.architecture.architectures import ARCHITECTURES
from appliance.model.architecture.facts import parse_facts
from appliance.model.formats.gguf import Gguf, Tensor
from tests.builders import examples
from tests.shapes import PUBLISHED, SMALL, write_gguf
from tests.unit.model.gguf_files import F32, LLAMA, LLAMA_TENSORS, last_layer, write_model

MAMBA2_STATE = 4 * (3 * (512 + 2 * 2 * 64) + 64 * 512)
DELTA_STATE = 4 * (3 * (256 + 2 * 2 * 64) + 64 * 256)


def small(folder: Path, name: str, **changes: Any) -> Model:
    return read_model(write_gguf(folder / "m.gguf", SMALL[name].changed(**changes)))


def kinds(model: Model) -> str:
    """Return one letter per layer: full, sliding, mla, recurrent, none; a capital letter if it has its own cache."""
    return "".join(layer.kind[0].upper() if layer.k_elements else layer.kind[0] for layer in model.stack)


@pytest.mark.parametrize(
    ("name", "expected", "k_elements", "v_elements", "state_bytes"),
    [
        ("gqa", "FFFF", 128, 128, 0),
        ("qk-norm", "FFFF", 128, 128, 0),
        ("moe", "FFFF", 128, 128, 0),
        ("sliding", "SSSSSFSS", 128, 128, 0),
        ("sliding-sinks", "SFSF", 128, 128, 0),
        ("sliding-halves", "SFSF", 128, 128, 0),
        ("sliding-dense-first", "FSSS", 128, 128, 0),
        ("sliding-cohere", "SSSF", 128, 128, 0),
        ("shared-caches", "SSSSF" * 4 + "ssssf", 128, 128, 0),
        ("mla", "MMMM", 160, 0, 0),
        ("mla-expanded", "FFFF", 4 * 96, 4 * 64, 0),
        ("delta-net", "rrrFrrrFF", 128, 128, DELTA_STATE),
        ("delta-net-moe", "rrrFrrrFF", 128, 128, DELTA_STATE),
        ("mamba", "rrrr", 0, 0, 4 * (3 * 512 + 16 * 512)),
        ("mamba2", "rrrr", 0, 0, MAMBA2_STATE),
        ("jamba", "rrFr", 64, 64, 4 * (3 * 512 + 16 * 512)),
        ("falcon-h1", "FFFF", 128, 128, 4 * (3 * (512 + 2 * 64) + 64 * 512)),
        ("granite-hybrid", "rrFr", 128, 128, 4 * (3 * (512 + 2 * 64) + 64 * 512)),
        ("nemotron-h", "rnFn", 128, 128, MAMBA2_STATE),
        ("short-convolution", "rFrF", 64, 64, 4 * 2 * 256),
        ("kda", "rrrM", 160, 0, 4 * 4 * 32 * (3 * 3 + 32)),
        ("lightning", "rrrF", 128, 128, 4 * 64 * 64 * 8),
        ("rwkv", "rrrr", 0, 0, 4 * 256 * (2 + 64)),
    ],
)
def test_what_a_kind_keeps(
    tmp_path: Path, name: str, expected: str, k_elements: int, v_elements: int, state_bytes: int
) -> None:
    model = small(tmp_path, name)
    assert (kinds(model), model.cache_kind, model.cache_reason) == (expected, "attention", None)
    with_cache = [layer for layer in model.stack if layer.k_elements]
    assert {(layer.k_elements, layer.v_elements) for layer in with_cache} <= {(k_elements, v_elements)}
    assert {layer.state_bytes for layer in model.stack} - {0} == ({state_bytes} if state_bytes else set())
    assert all(layer.state_bytes or layer.kind != "recurrent" for layer in model.stack)


def windows(model: Model) -> set[int]:
    return {layer.window for layer in model.stack if layer.window}


def test_only_sliding_layers_have_the_window(tmp_path: Path) -> None:
    model = small(tmp_path, "sliding")
    assert [layer.window for layer in model.stack] == [512] * 5 + [None] + [512] * 2
    assert windows(small(tmp_path, "gqa", attention__sliding_window=512)) == set()
    assert windows(small(tmp_path, "sliding-halves")) == {4096}  # gemma2's own, where the header has none
    assert windows(small(tmp_path, "sliding", attention__sliding_window=None)) == set()
    assert windows(small(tmp_path, "sliding", attention__sliding_window=0)) == set()


def test_a_pattern_in_the_header_wins(tmp_path: Path) -> None:
    every_second = small(tmp_path, "sliding", attention__sliding_window_pattern=2)
    assert kinds(every_second) == "SFSFSFSF"
    listed = small(tmp_path, "sliding", attention__sliding_window_pattern=[1, 0, 0, 1])
    assert kinds(listed) == "SFFSFFFF"  # what the array does not reach sees everything


@pytest.mark.parametrize("name", ["afmoe", "gemma2", "gpt-oss", "cohere2", "cohere2moe", "laguna", "plamo3", "llama4"])
@pytest.mark.parametrize("layers", [1, 5, 24, 64])
def test_patterns_are_those_of_set_swa_pattern(tmp_path: Path, name: str, layers: int) -> None:
    sliding = ARCHITECTURES[name].sliding
    assert sliding is not None
    period = sliding.period or 0
    metadata = {key.replace("llama", name, 1): value for key, value in LLAMA.items()}
    metadata |= {f"{name}.block_count": layers, f"{name}.attention.sliding_window": 128}
    tensors = [*LLAMA_TENSORS[:1], last_layer(layers)]
    model = read_model(write_model(tmp_path / "m.gguf", architecture=name, metadata=metadata, tensors=tensors))
    slides = [
        number % period != 0 if sliding.dense_first else number % period < period - 1 for number in range(layers)
    ]  # llama-hparams.cpp, word for word
    assert [layer.kind == "sliding" for layer in model.stack] == slides
    assert windows(model) == ({8192 if name == "llama4" else 128} if any(slides) else set())


def test_exaone_slides_in_one_size_only(tmp_path: Path) -> None:
    for layers, expected in ((64, {4096}), (30, set())):
        metadata = {key.replace("llama", "exaone4", 1): value for key, value in LLAMA.items()}
        metadata["exaone4.block_count"] = layers
        tensors = [*LLAMA_TENSORS[:1], last_layer(layers)]
        path = write_model(tmp_path / "m.gguf", architecture="exaone4", metadata=metadata, tensors=tensors)
        assert windows(read_model(path)) == expected


def test_draft_layers_come_last(tmp_path: Path) -> None:
    model = small(tmp_path, "mla-with-drafts")
    assert [layer.is_draft for layer in model.stack] == [False] * 4 + [True]
    assert model.stack[4].dense_bytes > model.stack[3].dense_bytes  # eh_proj is in it


def test_recurrent_layers_may_be_listed(tmp_path: Path) -> None:
    given = [1, 1, 0, 0, 0, 0, 0, 0, 0]
    assert kinds(small(tmp_path, "delta-net", attention__recurrent_layers=given)) == "rrFFFFFFF"
    with pytest.raises(ModelUnreadableError, match="must hold 9 booleans"):
        read_model(write_gguf(tmp_path / "m.gguf", SMALL["delta-net"].changed(attention__recurrent_layers=[1, 0])))


@pytest.mark.parametrize("shape", [*SMALL.values(), *PUBLISHED.values()], ids=lambda shape: str(shape.name))
def test_every_byte_is_in_one_place(tmp_path: Path, shape: Any) -> None:
    model = read_model(write_gguf(tmp_path / "m.gguf", shape))
    layers = sum(layer.dense_bytes + layer.expert_bytes for layer in model.stack)
    tied = tied_bytes(model, shape) if model.output_is_tied else 0
    assert model.embedding_bytes + layers + model.output_bytes - tied == model.weights_bytes
    assert sum(layer.expert_bytes for layer in model.stack) == model.expert_bytes
    assert len(model.stack) == model.layers == shape.layers
    assert (model.path.stat().st_blocks * 512 < 4_000_000, model.file_bytes > model.weights_bytes) == (True, True)


def tied_bytes(model: Model, shape: Any) -> int:
    """Return the bytes of token_embd, without the embedding of each layer that gemma3n has in addition."""
    if shape.architecture != "gemma3n":
        return model.embedding_bytes
    return int(shape.vocabulary * shape.get("embedding_length") // 256 * 210)


@pytest.mark.parametrize(
    ("name", "weights_gb", "experts", "cache_elements", "state_mib"),
    [
        ("llama-3.1-8b", 4.92, 0, 32 * 2 * 1024, 0),
        ("qwen3-8b", 5.03, 0, 36 * 2 * 1024, 0),
        ("qwen3-30b-a3b", 18.55, 128, 48 * 2 * 512, 0),
        ("qwen3.6-27b", 16.8, 0, 17 * 2 * 1024, 149.6),
        ("qwen3.6-35b-a3b", 21.6, 256, 11 * 2 * 512, 62.8),
        ("deepseek-v3", 412, 256, 62 * 576, 0),
        ("gemma-3-12b", 7.33, 0, 48 * 2 * 2048, 0),
    ],
)
def test_published_models(
    tmp_path: Path, name: str, weights_gb: float, experts: int, cache_elements: int, state_mib: float
) -> None:
    model = read_model(write_gguf(tmp_path / "m.gguf", PUBLISHED[name]))
    assert model.weights_bytes / 1e9 == pytest.approx(weights_gb, rel=0.01)
    assert model.experts == experts
    assert sum(layer.k_elements + layer.v_elements for layer in model.stack) == cache_elements
    assert sum(layer.state_bytes for layer in model.stack) / 2**20 == pytest.approx(state_mib, abs=0.1)


def test_experts_differ_by_layer(tmp_path: Path) -> None:
    model = small(tmp_path, "mla")
    first, *others = model.stack
    assert (first.expert_bytes, min(layer.expert_bytes for layer in others) > 0) == (0, True)
    q4_k_m = read_model(write_gguf(tmp_path / "m.gguf", PUBLISHED["qwen3-30b-a3b"]))
    assert len({layer.expert_bytes for layer in q4_k_m.stack}) == 2  # some layers' ffn_down has more bits


def test_biases_of_experts_move_with_them(tmp_path: Path) -> None:
    model = read_model(write_gguf(tmp_path / "m.gguf", SMALL["sliding-sinks"], quantization="F16"))
    assert model.stack[0].expert_bytes == 2 * 3 * 256 * 256 * 8 + 4 * 3 * 256 * 8


def test_chunked_and_merged_experts_are_routed_ones_and_shared_ones_dense(tmp_path: Path) -> None:
    names = ("ffn_up_exps", "ffn_down_chexps", "ffn_gate_up_exps", "ffn_up_shexp")
    bank = [(f"blk.0.{name}.weight", (64, 32, 4), LLAMA_TENSORS[0][2]) for name in names]
    norm = [("blk.1.ffn_norm_exps.weight", (64,), F32)]  # arctic's: a norm, which no flag moves
    metadata = {**LLAMA, "llama.expert_count": 4, "llama.expert_used_count": 2}
    model = read_model(write_model(tmp_path / "m.gguf", metadata=metadata, tensors=[*LLAMA_TENSORS, *bank, *norm]))
    each = 64 * 32 * 4 // 32 * 34
    plain = read_model(write_model(tmp_path / "plain.gguf", tensors=LLAMA_TENSORS))
    added = [now.dense_bytes - before.dense_bytes for now, before in zip(model.stack, plain.stack, strict=True)]
    assert [layer.expert_bytes for layer in model.stack] == [3 * each, 0]
    assert added == [each, 4 * 64]


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("deepseek32", "for its indexer"),
        ("deepseek4", "several caches"),
        ("t5", "an encoder-decoder model keeps two caches"),
        ("hrm_text", "its layers run several times"),
        ("gemma4-assistant", "it only drafts for another model"),
        ("not-yet-invented", "this engine has no such architecture"),
    ],
)
def test_what_is_not_known_is_not_reckoned(tmp_path: Path, name: str, words: str) -> None:
    metadata = {key.replace("llama", name, 1): value for key, value in LLAMA.items()}
    model = read_model(write_model(tmp_path / "m.gguf", architecture=name, metadata=metadata, tensors=LLAMA_TENSORS))
    assert (model.cache_kind, model.stack) == ("unsupported", ())
    assert words in (model.cache_reason or "")


def test_draft_layers_of_a_hybrid_that_keeps_their_cache(tmp_path: Path) -> None:
    model = small(tmp_path, "granite-hybrid", nextn_predict_layers=1)
    assert "of its draft layers even without speculative decoding" in (model.cache_reason or "")


def test_models_that_embed_keep_no_cache(tmp_path: Path) -> None:
    metadata = {key.replace("llama", "bert", 1): value for key, value in LLAMA.items()}
    model = read_model(write_model(tmp_path / "m.gguf", architecture="bert", metadata=metadata, tensors=LLAMA_TENSORS))
    assert {(layer.k_elements, layer.v_elements) for layer in model.stack} == {(0, 0)}


@pytest.mark.parametrize(
    ("name", "change", "words"),
    [
        ("sliding-sinks", {"attention__sliding_window": None}, "no key gpt-oss.attention.sliding_window"),
        ("sliding", {"attention__sliding_window_pattern": 1.5}, "sliding_window_pattern"),
        ("mla", {"attention__value_length_mla": None}, "must both be set: 96, 0"),
        ("mla", {"nextn_predict_layers": 5}, "nextn_predict_layers must be a whole number from 0 to 4: 5"),
        ("mamba2", {"ssm__inner_size": None}, "no key mamba2.ssm.inner_size"),
        ("delta-net", {"full_attention_interval": 0}, "full_attention_interval must be a whole number from 1"),
        ("gqa", {"block_count": 2}, "it has tensors of layer 2, but its header says 2 layers"),
    ],
)
def test_headers_that_contradict_themselves(tmp_path: Path, name: str, change: dict[str, Any], words: str) -> None:
    shape = SMALL[name]
    path = write_gguf(tmp_path / "m.gguf", shape)
    lying = write_lying(path, shape, change)
    with pytest.raises(ModelUnreadableError) as caught:
        read_model(lying)
    assert words in caught.value.message


NUMBERS = st.integers(-1, 9) | st.sampled_from([64, 512, 1 << 31, (1 << 32) - 1])
CHANGES = st.fixed_dictionaries(
    {"shape": st.sampled_from([shape for name, shape in SMALL.items() if name != "shared-caches"])},
    optional={
        "block_count": NUMBERS,
        "nextn_predict_layers": NUMBERS,
        "attention.head_count": NUMBERS,
        "attention.head_count_kv": NUMBERS | st.lists(NUMBERS, max_size=9),
        "attention.key_length_mla": NUMBERS,
        "attention.sliding_window": NUMBERS,
        "attention.sliding_window_pattern": NUMBERS | st.lists(st.booleans(), max_size=9),
        "attention.recurrent_layers": st.lists(st.booleans(), max_size=9),
        "full_attention_interval": NUMBERS,
        "feed_forward_length": NUMBERS | st.lists(NUMBERS, max_size=9),
        "ssm.conv_kernel": NUMBERS,
        "shortconv.l_cache": NUMBERS,
    },
)


@given(CHANGES)
@settings(max_examples=examples(200), deadline=None)
def test_any_header_is_reckoned_or_refused(change: dict[str, Any]) -> None:
    shape = change.pop("shape")
    metadata = {f"{shape.architecture}.{key}": fitted(value) for key, value in {**shape.metadata, **change}.items()}
    tensors = (Tensor(name="blk.0.x.weight", type_name="F32", shape=(4,), offset=0, size_bytes=16),)
    gguf = Gguf(
        path=Path("m.gguf"),
        version=3,
        metadata={"general.architecture": shape.architecture, **metadata} | {f"{shape.architecture}.vocab_size": 5},
        tensors=tensors,
        header_bytes=0,
        file_bytes=16,
    )
    try:
        model = parse_facts(gguf)
    except ModelUnreadableError as error:
        assert error.hint  # noqa: PT017 - most of what is drawn is refused, and not all
        return
    assert len(model.stack) == (model.layers if model.cache_kind == "attention" else 0)
    assert all(min(layer.k_elements, layer.v_elements, layer.state_bytes) >= 0 for layer in model.stack)
    assert all((layer.window is not None) == (layer.kind == "sliding") for layer in model.stack)


def fitted(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def write_lying(path: Path, shape: Any, change: dict[str, Any]) -> Path:
    """Write the tensors of the shape with metadata that contradict them."""
    metadata = {f"{shape.architecture}.{key}": value for key, value in shape.metadata.items()}
    for key, value in change.items():
        name = f"{shape.architecture}.{key.replace('__', '.')}"
        metadata.pop(name, None) if value is None else metadata.update({name: value})
    tensors = [(f"blk.{layer}.x.weight", (32, 4), LLAMA_TENSORS[0][2]) for layer in range(shape.layers)]
    return write_model(path, architecture=shape.architecture, metadata=metadata, tensors=tensors)


def test_every_architecture_of_the_engine_is_known() -> None:
    """152 names of LLM_ARCH_NAMES; the projector's and the unknown one are left out."""
    assert len(ARCHITECTURES) == 152
    assert "clip" not in ARCHITECTURES
