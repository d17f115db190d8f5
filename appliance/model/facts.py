"""What a model is, from the header of its file: the figures that memory and speed are reckoned from.

Keys and their defaults are those of llama.cpp's `llama_model_base::load_hparams`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NoReturn

from appliance.errors import ModelUnreadableError
from appliance.model.gguf import Gguf, Skipped, Tensor

LAYERS_LIMIT = 512  # LLAMA_MAX_LAYERS
EXPERTS_LIMIT = 1024  # LLAMA_MAX_EXPERTS
_UINT32_MAX = (1 << 32) - 1
_POOLING_NONE = 0
# Looked up by row, never multiplied: the CPU backend does not repack them.
_LOOKED_UP = ("token_embd.", "per_layer_token_embd.", "position_embd.", "token_types.")
_REPACK_ROWS = 8  # ggml-cpu/repack.cpp takes matrices whose number of rows is a multiple of this
# Keys below `<arch>.` whose models keep another cache than keys and values of every token in every layer.
_OTHER_CACHES = (
    ("ssm.", "a state-space layer keeps a state"),
    ("wkv.", "RWKV keeps a state"),
    ("kda.", "a linear attention layer keeps a state"),
    ("shortconv.", "a convolution layer keeps a state"),
    ("attention.recurrent_layers", "recurrent layers keep a state"),
    ("attention.kv_lora_rank", "multi-head latent attention keeps a compressed cache"),
    ("attention.indexer.", "sparse attention keeps a second cache"),
    ("attention.compress_ratios", "compressed attention keeps a shorter cache"),
    ("decoder_block_count", "an encoder-decoder model keeps two caches"),
)
_OTHER_ARCHITECTURES = {
    "minimax-01": "its linear attention layers keep a state",
    "t5": "an encoder-decoder model keeps two caches",
}

LayerKind = Literal["full", "sliding", "mla", "recurrent", "none"]


@dataclass(frozen=True, kw_only=True)
class Layer:
    """One layer of a model: what it keeps for every token, and what it weighs.

    A token costs `k_elements` + `v_elements` elements of the cache types in this layer, in the newest `window` tokens
    where that is set. A recurrent layer keeps `state_bytes` (f32) for each sequence, whatever its length.
    """

    kind: LayerKind
    k_elements: int  # of one token; 0: no cache of its own (recurrent, or shared with another layer)
    v_elements: int  # of one token; 0 for MLA, whose one compressed row is counted as K
    window: int | None  # tokens that a sliding layer sees; None: all
    state_bytes: int  # of one sequence
    dense_bytes: int  # its weights without routed experts; shared experts are in here
    expert_bytes: int  # all of its routed experts together
    is_draft: bool = False  # a layer for multi-token prediction: loaded, run only to speculate


CacheKind = Literal["attention", "unsupported"]


@dataclass(frozen=True, kw_only=True)
class Model:
    """Facts of one model.

    For `cache_kind` "attention" the cache of `n` tokens takes at most
    n × sum(kv_heads) × (key_length × bytes of a K value + value_length × bytes of a V value);
    `cache_reason` says when it is an upper bound. For "unsupported" nothing may be reckoned from these fields;
    `cache_reason` says which keys are the cause.
    """

    path: Path  # of a split model its first part, which is what the engine is given
    parts: tuple[Path, ...]  # every file of it, in order
    format: Literal["gguf"]
    architecture: str
    name: str
    size_label: str | None
    file_bytes: int
    header_bytes: int
    weights_bytes: int
    bytes_by_type: tuple[tuple[str, int], ...]  # ggml type and bytes, largest first
    quantization: str  # the type that holds most bytes
    repackable_by_type: tuple[tuple[str, int], ...]  # matrices of a shape that the CPU backend can copy into its own
    layers: int
    embedding_length: int
    feed_forward_length: int  # the largest of all layers, experts not counted where there is a dense one; 0: none
    heads: int  # the largest of all layers
    kv_heads: tuple[int, ...]  # by layer; 0 where a layer does not attend
    key_length: int
    value_length: int
    native_context: int
    vocabulary: int
    experts: int
    experts_used: int
    expert_bytes: int  # of all routed experts together
    sliding_window: int | None  # None: every layer sees the whole context
    output_is_tied: bool  # the token embedding is the output matrix, too
    has_chat_template: bool
    is_embedding_model: bool
    cache_kind: CacheKind
    cache_reason: str | None
    stack: tuple[Layer, ...] = ()  # every layer in order, draft layers last
    embedding_bytes: int = 0  # the token embedding, of which a token reads one row
    output_bytes: int = 0  # output matrix and final norm; a tied embedding is counted here a second time
    expert_shared_bytes: int = 0  # of all shared experts; part of the layers' dense_bytes
    swa_window: int | None = None  # of the sliding layers
    projector: Path | None = None  # a multimodal projector that lies beside the model
    projector_bytes: int = 0


def parse_facts(gguf: Gguf) -> Model:
    """Raises ModelUnreadableError naming the key that is missing or wrong, or why this is no language model."""
    keys = _Keys(gguf)
    _refuse_other_kinds(keys)
    layers = keys.number("block_count", low=1, high=LAYERS_LIMIT)
    embedding_length = keys.number("embedding_length", low=1)
    kind, reason = _cache_kind(keys)
    heads = keys.by_layer("attention.head_count", layers, default=0 if kind == "unsupported" else None)
    kv_heads = keys.by_layer("attention.head_count_kv", layers, default=heads)
    head_length = embedding_length // heads[0] if heads[0] else 0
    if kind == "attention" and not (sum(kv_heads) and _head_length(keys, "key", head_length)):
        keys.fail(
            f"its layers do not attend: heads {max(heads)}, KV heads {max(kv_heads)}, embedding {embedding_length}"
        )
    experts = keys.number("expert_count", default=0, high=EXPERTS_LIMIT)
    return Model(
        path=gguf.path,
        parts=gguf.parts or (gguf.path,),
        format="gguf",
        architecture=keys.architecture,
        name=keys.text("general.name") or gguf.path.stem,
        size_label=keys.text("general.size_label"),
        file_bytes=gguf.file_bytes,
        header_bytes=gguf.header_bytes,
        weights_bytes=sum(tensor.size_bytes for tensor in gguf.tensors),
        bytes_by_type=_bytes_by_type(gguf.tensors),
        quantization=_bytes_by_type(gguf.tensors)[0][0],
        repackable_by_type=_bytes_by_type(_repackable(gguf)),
        layers=layers,
        embedding_length=embedding_length,
        feed_forward_length=_feed_forward_length(keys, layers),
        heads=max(heads),
        kv_heads=kv_heads,
        key_length=_head_length(keys, "key", head_length),
        value_length=_head_length(keys, "value", head_length),
        native_context=keys.number("context_length", low=1),
        vocabulary=_vocabulary(keys, gguf.tensors),
        experts=experts,
        experts_used=max(keys.by_layer("expert_used_count", layers, default=0)) if experts else 0,
        expert_bytes=sum(tensor.size_bytes for tensor in gguf.tensors if "_exps." in tensor.name),
        sliding_window=keys.number("attention.sliding_window", default=0) or None,
        output_is_tied=_is_tied(gguf.tensors),
        has_chat_template="tokenizer.chat_template" in gguf.metadata,
        is_embedding_model=_is_embedding_model(keys),
        cache_kind=kind,
        cache_reason=reason,
    )


class _Keys:
    """The metadata with the architecture's prefix put before each name, and its errors in words."""

    def __init__(self, gguf: Gguf) -> None:
        self._gguf = gguf
        self.architecture = self.text("general.architecture") or ""
        if not self.architecture:
            self.fail("it has no key general.architecture, which every model has")

    def fail(self, reason: str, *, hint: str = "convert the model anew with a current llama.cpp") -> NoReturn:
        message = f"model cannot be used: {self._gguf.path}: {reason}"
        raise ModelUnreadableError(message, hint=hint)

    def has(self, name: str) -> bool:
        return f"{self.architecture}.{name}" in self._gguf.metadata

    def starting_with(self, name: str) -> list[str]:
        prefix = f"{self.architecture}.{name}"
        return [key for key in self._gguf.metadata if key.startswith(prefix)]

    def text(self, key: str) -> str | None:
        value = self._gguf.metadata.get(key)
        return value if isinstance(value, str) else None

    def entries(self, key: str) -> int | None:
        """The length of the array `key`; None when there is no such array."""
        value = self._gguf.metadata.get(key)
        if isinstance(value, Skipped):
            return value.count
        return len(value) if isinstance(value, tuple) else None

    def has_tensors(self) -> bool:
        return any(tensor.size_bytes for tensor in self._gguf.tensors)

    def is_true(self, name: str, *, default: bool) -> bool:
        return bool(self._gguf.metadata.get(f"{self.architecture}.{name}", default))

    def number(self, name: str, *, default: int | None = None, low: int = 0, high: int = _UINT32_MAX) -> int:
        """A whole number within bounds; without a default the key has to be there."""
        key = f"{self.architecture}.{name}"
        value = self._gguf.metadata.get(key, default)
        if value is None:
            self.fail(f"its header has no key {key}")
        if type(value) is not int or not low <= value <= high:
            self.fail(f"its key {key} must be a whole number from {low} to {high}: {value}")
        return value

    def by_layer(self, name: str, layers: int, *, default: int | tuple[int, ...] | None) -> tuple[int, ...]:
        """A number for each layer: the key holds one for all or an array of them."""
        key = f"{self.architecture}.{name}"
        value = self._gguf.metadata.get(key)
        if value is None and isinstance(default, tuple):
            return default
        if not isinstance(value, Skipped | tuple):
            return (self.number(name, default=default if isinstance(default, int) else None),) * layers
        numbers = () if isinstance(value, Skipped) else value
        if len(numbers) != layers or not all(type(number) is int and number >= 0 for number in numbers):
            self.fail(f"its key {key} must hold {layers} whole numbers, one a layer")
        return tuple(int(number) for number in numbers)


def _refuse_other_kinds(keys: _Keys) -> None:
    kind = keys.text("general.type") or "model"
    if keys.architecture == "clip" or kind == "mmproj":
        keys.fail("it is a multimodal projector", hint="give the language model that lies beside it")
    if kind != "model":
        keys.fail(f"it is no model but of general.type {kind}", hint="give a language model")
    if not keys.has_tensors():
        keys.fail("it holds no tensors, only a header or a vocabulary", hint="give a model with weights")


def _cache_kind(keys: _Keys) -> tuple[CacheKind, str | None]:
    for name, words in _OTHER_CACHES:
        found = keys.starting_with(name)
        if found:
            return "unsupported", f"{words}: {', '.join(sorted(found)[:4])}"
    if keys.architecture in _OTHER_ARCHITECTURES:
        return "unsupported", f"{keys.architecture}: {_OTHER_ARCHITECTURES[keys.architecture]}"
    bounds = {
        "attention.sliding_window": "layers with a sliding window keep less",
        "attention.shared_kv_layers": "layers that share a cache are counted each",
        "nextn_predict_layers": "layers that only draft are counted too",
    }
    reasons = [words for name, words in bounds.items() if keys.number(name, default=0)]
    return "attention", f"an upper bound: {', '.join(reasons)}" if reasons else None


def _head_length(keys: _Keys, which: Literal["key", "value"], default: int) -> int:
    """The largest of all layers: those with a sliding window may have heads of their own length."""
    length = keys.number(f"attention.{which}_length", default=default)
    return max(length, keys.number(f"attention.{which}_length_swa", default=length))


def _feed_forward_length(keys: _Keys, layers: int) -> int:
    if keys.has("feed_forward_length"):
        return max(keys.by_layer("feed_forward_length", layers, default=None))
    return keys.number("expert_feed_forward_length", default=0)


def _vocabulary(keys: _Keys, tensors: tuple[Tensor, ...]) -> int:
    tokens = keys.entries("tokenizer.ggml.tokens")
    if tokens:
        return tokens
    embedding = next((tensor for tensor in tensors if tensor.name == "token_embd.weight"), None)
    if embedding is not None and len(embedding.shape) == 2:
        return embedding.shape[1]
    return keys.number("vocab_size", low=1)


def _is_tied(tensors: Iterable[Tensor]) -> bool:
    return not any(tensor.name == "output.weight" for tensor in tensors)


def _is_embedding_model(keys: _Keys) -> bool:
    return keys.number("pooling_type", default=_POOLING_NONE) != _POOLING_NONE or not keys.is_true(
        "attention.causal", default=True
    )


def _repackable(gguf: Gguf) -> list[Tensor]:
    """Matrices, and banks of experts, that are multiplied with; a tied embedding is loaded once more as the output."""
    is_tied = _is_tied(gguf.tensors)
    return [
        tensor
        for tensor in gguf.tensors
        if len(tensor.shape) == (3 if "_exps." in tensor.name else 2)
        and tensor.shape[1] % _REPACK_ROWS == 0
        and (not tensor.name.startswith(_LOOKED_UP) or (is_tied and tensor.name == "token_embd.weight"))
    ]


def _bytes_by_type(tensors: Iterable[Tensor]) -> tuple[tuple[str, int], ...]:
    sums: defaultdict[str, int] = defaultdict(int)
    for tensor in tensors:
        sums[tensor.type_name] += tensor.size_bytes
    return tuple(sorted(sums.items(), key=lambda item: (-item[1], item[0])))
