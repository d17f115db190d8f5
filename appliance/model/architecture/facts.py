"""Facts of a model from its file's header: the figures that memory and speed are computed from.

Keys and their defaults are those of llama.cpp's `llama_model_base::load_hparams`.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, NoReturn

from appliance.model.architecture.architectures import ARCHITECTURES, IMAGE_ARCHITECTURES, WITHOUT_ROPE
from appliance.model.architecture.attached import Adapter, Projector
from appliance.model.architecture.stack import (
    LOOKED_UP,
    Heads,
    Layer,
    Weights,
    attends,
    check_projections,
    parse_heads,
    parse_stack,
    parse_weights,
    why_unsupported,
)
from appliance.model.formats.ggml_types import FILE_TYPES
from appliance.model.formats.gguf import TEMPLATE, Gguf, Tensor
from appliance.model.formats.keys import Keys
from appliance.model.formats.parts import plain_name
from appliance.values import dataclass

LAYERS_LIMIT = 512  # LLAMA_MAX_LAYERS
EXPERTS_LIMIT = 1024  # LLAMA_MAX_EXPERTS
CONTEXT_LIMIT = 2**25  # three times the longest published one, of Llama 4 Scout
FACTOR_LIMIT = 4096.0  # for RoPE scaling; no published file is above
POOLINGS = ("none", "mean", "cls", "last", "rank")  # llama.h, llama_pooling_type
_RANKS = ("cls.weight", "cls.output.weight")  # llama-graph.cpp, build_pooling, needs one of them
_MULTIPLE = 32  # kernels with their own weight layout need the number of rows to be a multiple of at most this

# Words in chat templates of models that were trained for it: the list of tools, and reasoning before the answer.
CALLS_TOOLS = re.compile(r"\btools\b")
REASONS = re.compile(r"enable_thinking|reasoning_content|reasoning_effort|</?think>|\bthinking\b")

CacheKind = Literal["attention", "unsupported"]
Positions = Literal["rope", "table", "none"]  # "table": a learned row per position, so there are none beyond the last
Format = Literal["gguf", "safetensors"]


@dataclass(frozen=True, kw_only=True)
class Matrices:
    """All matrices of one kind. CPU kernels may repack these weights into another layout."""

    type_name: str  # ggml's type name
    rows_by: int  # largest power of two, up to 32, that divides the number of rows
    columns_by: int
    is_bank: bool  # True for routed experts, of which a token uses some
    is_tied: bool  # True for the token embedding if it is loaded again as the output
    size_bytes: int


@dataclass(frozen=True, kw_only=True)
class RopeScaling:
    """RoPE scaling of positions, as in the header."""

    kind: str  # linear, yarn, longrope …
    factor: float
    original: int | None  # context length that `factor` multiplies; None: not in the header


@dataclass(frozen=True, kw_only=True)
class Model:
    """Facts of one model.

    If `cache_kind` is "attention", `stack` lists what each layer keeps, and `cache_reason` is None. If it is
    "unsupported", nothing may be computed from it: `stack` is empty, and `cache_reason` names the keys or the
    architecture.
    """

    path: Path  # path for the engine: a file, the first part of a split model, or a safetensors folder
    parts: tuple[Path, ...]  # all files, in order
    format: Format
    architecture: str
    name: str
    file_bytes: int
    header_bytes: int
    weights_bytes: int
    bytes_by_type: tuple[tuple[str, int], ...]  # ggml type and bytes, largest first
    quantization: str  # the type with the most bytes
    matrices: tuple[Matrices, ...]
    layers: int
    embedding_length: int
    feed_forward_length: int  # largest of all layers; experts only if no layer is dense; 0: none
    heads: int  # largest of all layers
    kv_heads: tuple[int, ...]  # by layer; 0 for a layer without attention
    key_length: int
    value_length: int
    native_context: int
    vocabulary: int
    experts: int
    experts_used: int
    expert_bytes: int  # of all routed experts together
    output_is_tied: bool  # True if the token embedding is also the output matrix
    has_chat_template: bool
    is_embedding_model: bool
    cache_kind: CacheKind
    cache_reason: str | None
    stack: tuple[Layer, ...] = ()  # every layer in order, draft layers last
    embedding_bytes: int = 0  # token embedding and other lookup tables: a token reads one row
    output_bytes: int = 0  # output matrix, final norm, the rest; a tied embedding is counted here a second time
    projector: Projector | None = None  # beside the model, or requested
    adapters: tuple[Adapter, ...] = ()  # requested ones
    positions: Positions = "rope"
    can_rank: bool = True  # False if it is known to lack the head that scores
    is_causal: bool = True  # True if a token attends only to tokens before it
    pooling: str | None = None  # one of POOLINGS: how it combines token vectors into one; None: not in the header
    recurrent_length: int = 0  # inner width of recurrent layers
    recurrent_channels: int = 0  # channels of their convolution
    rope_scaling: RopeScaling | None = None
    expert_length: int = 0  # rows of a routed expert's matrices; 0: no experts, or `feed_forward_length`
    called: str | None = None  # display name, if the file's name is a hash in another tool's store
    parameters: int = 0  # elements of all tensors; 0: unknown
    file_type: str | None = None  # quantization of the whole file according to its header: Q4_K_M
    calls_tools: bool = False  # according to its chat template
    reasons: bool = False  # True if it reasons before it answers, according to its chat template
    # Folder models only: all named templates joined, for an engine that must be told the output format. None: it has
    # none.
    chat_template: str | None = field(default=None, compare=False, repr=False)
    # folder models only, from the tokenizer
    added_tokens: frozenset[str] = field(default=frozenset(), compare=False, repr=False)
    tokenizer_files: tuple[str, ...] = ()  # folder models only: files from which a tokenizer can be read
    draft_bytes: int = 0  # folder models only: draft layers, also if `cache_kind` is "unsupported"
    has_kv_scales: bool = False  # folder models only: scales for a quantized KV cache
    # config.json of a folder model, for facts that only one engine needs. It comes from anybody and is not checked. If
    # it has no `quantization_config`, that of the file beside it is added.
    config: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}), compare=False, repr=False)

    @property
    def reads_whole(self) -> bool:
        """True if a text must be computed in one batch, because attention or pooling needs all of it.

        Source: llama.cpp's tools/server/server-context.cpp, can_split.
        """
        can_split = self.pooling == "last" or (self.is_reranker and self.is_causal)
        return self.is_embedding_model and not can_split

    @property
    def is_reranker(self) -> bool:
        """True if the model gives scores: its output vector is a single number."""
        return self.pooling == "rank"

    @property
    def gives(self) -> str:
        """Kind of output, as a word."""
        return "scores" if self.is_reranker else "vectors" if self.is_embedding_model else "text"

    @property
    def label(self) -> str:
        """Usual name of its quantization."""
        return self.file_type or self.quantization

    @property
    def longest_context(self) -> int:
        """Native context length, or the longer one that the file's own RoPE scaling reaches."""
        scaling = self.rope_scaling
        reached = int(scaling.factor * scaling.original) if scaling and scaling.original else 0
        return max(self.native_context, reached)

    @property
    def title(self) -> str:
        """Name for messages: the file's name, or `called` if that is a hash."""
        if self.called:
            return self.called
        return plain_name(self.path) if self.path.parent.name == "snapshots" else self.path.name


def parse_facts(gguf: Gguf) -> Model:
    """Compute the facts. Raises ModelUnreadableError with the missing or wrong key, or the reason why it is no
    language model."""
    keys = Keys(gguf)
    _refuse_other_kinds(keys)
    layers = keys.number("block_count", low=1, high=LAYERS_LIMIT)
    embedding_length = keys.number("embedding_length", low=1)
    native_context = keys.number("context_length", low=1, high=CONTEXT_LIMIT)
    _check_shapes(keys, gguf.tensors, embedding_length, native_context)
    reason = why_unsupported(keys)
    must_attend = reason is None and attends(keys.architecture)
    heads = _heads(keys, layers, embedding_length, must_attend=must_attend)
    weights = parse_weights(keys, gguf.tensors, layers)
    check_projections(keys, gguf.tensors, heads)
    stack = parse_stack(keys, heads, embedding_length, weights) if reason is None else ()
    experts = _experts(keys, weights)
    return Model(
        path=gguf.path,
        parts=gguf.parts or (gguf.path,),
        format="gguf",
        architecture=keys.architecture,
        name=keys.text("general.name") or gguf.path.stem,
        file_bytes=gguf.file_bytes,
        header_bytes=gguf.header_bytes,
        weights_bytes=sum(tensor.size_bytes for tensor in gguf.tensors),
        bytes_by_type=_bytes_by_type(gguf.tensors),
        quantization=_bytes_by_type(gguf.tensors)[0][0],
        matrices=_matrices(gguf.tensors),
        layers=layers,
        embedding_length=embedding_length,
        feed_forward_length=_feed_forward_length(keys, layers),
        heads=max(heads.heads),
        kv_heads=heads.kv_heads,
        key_length=max(heads.key_length, heads.sliding_key_length),
        value_length=max(heads.value_length, heads.sliding_value_length),
        native_context=native_context,
        vocabulary=_vocabulary(keys, gguf.tensors),
        experts=experts,
        experts_used=_experts_used(keys, layers, experts),
        expert_bytes=sum(weights.expert_bytes),
        output_is_tied=_is_tied(gguf.tensors),
        has_chat_template=TEMPLATE in gguf.metadata,
        is_embedding_model=_is_embedding_model(keys),
        pooling=_pooling(keys),
        positions=_positions(keys, gguf.tensors),
        can_rank=any(tensor.name in _RANKS for tensor in gguf.tensors),
        is_causal=keys.is_true("attention.causal", default=True),
        cache_kind="attention" if reason is None else "unsupported",
        cache_reason=reason,
        stack=stack,
        embedding_bytes=weights.embedding_bytes,
        output_bytes=weights.output_bytes,
        recurrent_length=keys.number("ssm.inner_size", default=0),
        recurrent_channels=_channels(keys),
        rope_scaling=_rope_scaling(keys),
        expert_length=keys.number("expert_feed_forward_length", default=0) if experts else 0,
        parameters=sum(math.prod(tensor.shape) for tensor in gguf.tensors),
        file_type=_file_type(gguf),
        calls_tools=_template_has(gguf, CALLS_TOOLS),
        reasons=_template_has(gguf, REASONS),
    )


def _heads(keys: Keys, layers: int, embedding_length: int, *, must_attend: bool) -> Heads:
    heads = parse_heads(keys, layers, embedding_length, must_attend=must_attend)
    if must_attend and not (sum(heads.kv_heads) and max(heads.key_length, heads.sliding_key_length)):
        keys.fail(
            f"its layers do not attend: heads {max(heads.heads)}, KV heads {max(heads.kv_heads)}, "
            f"embedding {embedding_length}"
        )
    return heads


def _check_shapes(keys: Keys, tensors: Iterable[Tensor], embedding_length: int, native_context: int) -> None:
    """Compare the shapes of tensors with the header's values: buffers are computed from the latter."""
    shapes = {tensor.name: tensor.shape for tensor in tensors if len(tensor.shape) == 2}
    columns, _ = shapes.get("token_embd.weight", (embedding_length, 0))
    if columns != embedding_length:
        keys.fail(f"its header says {embedding_length:,} values a token, but token_embd.weight has {columns:,}")
    _, positions = shapes.get("position_embd.weight", (embedding_length, native_context))
    if native_context > positions:
        keys.fail(f"its header says {native_context:,} positions, but position_embd.weight has {positions:,} rows")


def _file_type(gguf: Gguf) -> str | None:
    number = gguf.metadata.get("general.file_type")
    return FILE_TYPES.get(number) if isinstance(number, int) else None


def _template_has(gguf: Gguf, words: re.Pattern[str]) -> bool:
    """True if the chat template, or a named one such as `tokenizer.chat_template.tool_use`, has the words."""
    texts = (value for key, value in gguf.metadata.items() if key.startswith(TEMPLATE))
    return any(words.search(text) for text in texts if isinstance(text, str))


def _refuse_other_kinds(keys: Keys) -> None:
    kind = keys.text("general.type") or "model"
    if keys.architecture == "clip" or kind == "mmproj":
        keys.fail("it is a multimodal projector", hint="give the language model beside it")
    if kind == "adapter":
        hint = "give the model that it was trained on, and the adapter with --lora"
        keys.fail("it is an adapter (LoRA), not a model", hint=hint)
    if kind != "model":
        keys.fail(f"it is not a model: its general.type is {kind}", hint="give a language model")
    if keys.architecture not in ARCHITECTURES and not keys.has("block_count"):
        _refuse_foreign(keys)
    if not keys.has_tensors():
        keys.fail("it has no tensors, only a header or a vocabulary", hint="give a model with weights")


def _refuse_foreign(keys: Keys) -> NoReturn:
    """Refuse a file of another program, such as one for images or sound; those have hardly any metadata."""
    what = f"its architecture {keys.architecture} is unknown to the engine"
    if keys.architecture.partition(".")[0].casefold() in IMAGE_ARCHITECTURES:
        what = f"it is a model for images or video, not a language model: architecture {keys.architecture}"
    elif not keys.has_any():
        what += ", and it has no keys of a language model: it may be for images or sound"
    keys.fail(what, hint="give a language model as GGUF; this file cannot be converted into one")


def _rope_scaling(keys: Keys) -> RopeScaling | None:
    kind = keys.text(f"{keys.architecture}.rope.scaling.type")
    if kind in (None, "none"):
        return None
    factor = keys.real("rope.scaling.factor", default=1.0, low=1.0, high=FACTOR_LIMIT)
    has_original = keys.has("rope.scaling.original_context_length")
    original = keys.number("rope.scaling.original_context_length", low=1) if has_original else None
    return RopeScaling(kind=kind, factor=factor, original=original)


def _positions(keys: Keys, tensors: Iterable[Tensor]) -> Positions:
    if any(tensor.name == "position_embd.weight" for tensor in tensors):
        return "table"
    return "none" if keys.architecture in WITHOUT_ROPE else "rope"


def _feed_forward_length(keys: Keys, layers: int) -> int:
    if keys.has("feed_forward_length"):
        return max(keys.by_layer("feed_forward_length", layers, default=None))
    return keys.number("expert_feed_forward_length", default=0)


def _experts(keys: Keys, weights: Weights) -> int:
    experts = keys.number("expert_count", default=0, high=EXPERTS_LIMIT)
    if not experts and any(weights.expert_bytes):
        keys.fail(f"it has tensors of experts, but its key {keys.architecture}.expert_count is 0")
    return experts


def _experts_used(keys: Keys, layers: int, experts: int) -> int:
    if not experts:
        return 0
    used = max(keys.by_layer("expert_used_count", layers, default=0))
    if not 0 < used <= experts:
        keys.fail(f"its key {keys.architecture}.expert_used_count must be from 1 to its {experts} experts: {used}")
    return used


def _vocabulary(keys: Keys, tensors: tuple[Tensor, ...]) -> int:
    """Number of tokens. Raises ModelUnreadableError if it exceeds the embedding: without a vocabulary, the engine
    creates as many tokens as `vocab_size` says, up to 2^32."""
    tokens = keys.entries("tokenizer.ggml.tokens") or keys.number("vocab_size", default=0)
    embedding = next((tensor for tensor in tensors if tensor.name == "token_embd.weight"), None)
    rows = embedding.shape[1] if embedding is not None and len(embedding.shape) == 2 else 0
    told = keys.number("vocab_size", default=0)
    for known, is_wrong in ((tokens, tokens != rows), (told, told > rows)):
        if known and rows and is_wrong:
            keys.fail(f"its header says {known} tokens, but its embedding has {rows} rows")
    return tokens or rows or keys.number("vocab_size", low=1)


def _channels(keys: Keys) -> int:
    """Convolution channels: inner width, plus B and C (or key and query) of each group."""
    groups, state = keys.number("ssm.group_count", default=0), keys.number("ssm.state_size", default=0)
    return keys.number("ssm.inner_size", default=0) + 2 * groups * state


def _is_tied(tensors: Iterable[Tensor]) -> bool:
    return not any(tensor.name == "output.weight" for tensor in tensors)


def _pooling(keys: Keys) -> str | None:
    return POOLINGS[keys.number("pooling_type", high=len(POOLINGS) - 1)] if keys.has("pooling_type") else None


def _is_embedding_model(keys: Keys) -> bool:
    return _pooling(keys) not in (None, "none") or not keys.is_true("attention.causal", default=True)


def _matrices(tensors: tuple[Tensor, ...]) -> tuple[Matrices, ...]:
    """Sum up two-dimensional matrices and banks of experts by kind; lookup tables are left out."""
    has_tied = _is_tied(tensors)
    sums: defaultdict[Matrices, int] = defaultdict(int)
    for tensor in tensors:
        is_bank = "_exps." in tensor.name
        is_tied = has_tied and tensor.name == "token_embd.weight"
        if len(tensor.shape) != (3 if is_bank else 2) or (tensor.name.startswith(LOOKED_UP) and not is_tied):
            continue
        kind = Matrices(
            type_name=tensor.type_name,
            rows_by=math.gcd(tensor.shape[1], _MULTIPLE),
            columns_by=math.gcd(tensor.shape[0], _MULTIPLE),
            is_bank=is_bank,
            is_tied=is_tied,
            size_bytes=0,
        )
        sums[kind] += tensor.size_bytes
    return tuple(replace(kind, size_bytes=size) for kind, size in sums.items())


def _bytes_by_type(tensors: Iterable[Tensor]) -> tuple[tuple[str, int], ...]:
    sums: defaultdict[str, int] = defaultdict(int)
    for tensor in tensors:
        sums[tensor.type_name] += tensor.size_bytes
    return tuple(sorted(sums.items(), key=lambda item: (-item[1], item[0])))
