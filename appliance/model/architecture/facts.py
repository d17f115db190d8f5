"""What a model is, from the header of its file: the figures that memory and speed are computed from.

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
CONTEXT_LIMIT = 2**25  # three times the longest that was published, of Llama 4 Scout
FACTOR_LIMIT = 4096.0  # of a RoPE scaling: beyond it no file was published
POOLINGS = ("none", "mean", "cls", "last", "rank")  # llama.h, llama_pooling_type
_RANKS = ("cls.weight", "cls.output.weight")  # either is enough for llama-graph.cpp, build_pooling
_MULTIPLE = 32  # no kernel that takes weights in a layout of its own asks for a multiple of more rows than this

# What a chat template calls where the model was trained for it: the list of tools, and a text before the answer.
CALLS_TOOLS = re.compile(r"\btools\b")
REASONS = re.compile(r"enable_thinking|reasoning_content|reasoning_effort|</?think>|\bthinking\b")

CacheKind = Literal["attention", "unsupported"]
Positions = Literal["rope", "table", "none"]  # "table": a learned row for each, and none beyond the last
Format = Literal["gguf", "safetensors"]


@dataclass(frozen=True, kw_only=True)
class Matrices:
    """All matrices of one kind: weights that are multiplied with, which a CPU's kernels may want in another layout."""

    type_name: str  # ggml's
    rows_by: int  # largest power of two up to 32 that divides the number of rows
    columns_by: int
    is_bank: bool  # of experts, of which a token uses some
    is_tied: bool  # the token embedding, which is loaded once more as the output
    size_bytes: int


@dataclass(frozen=True, kw_only=True)
class RopeScaling:
    """Of positions, as the header has it."""

    kind: str  # linear, yarn, longrope …
    factor: float
    original: int | None  # context length that it multiplies; None: the header does not tell


@dataclass(frozen=True, kw_only=True)
class Model:
    """Facts of one model.

    For `cache_kind` "attention" what the model keeps is in `stack`, layer by layer; `cache_reason` is None. For
    "unsupported" nothing may be computed: `stack` is empty, and `cache_reason` says which keys or architecture it is.
    """

    path: Path  # what the engine is given: a file, of a split model its first part, or the folder of safetensors
    parts: tuple[Path, ...]  # every file of it, in order
    format: Format
    architecture: str
    name: str
    file_bytes: int
    header_bytes: int
    weights_bytes: int
    bytes_by_type: tuple[tuple[str, int], ...]  # ggml type and bytes, largest first
    quantization: str  # the type that holds most bytes
    matrices: tuple[Matrices, ...]
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
    output_is_tied: bool  # the token embedding is the output matrix, too
    has_chat_template: bool
    is_embedding_model: bool
    cache_kind: CacheKind
    cache_reason: str | None
    stack: tuple[Layer, ...] = ()  # every layer in order, draft layers last
    embedding_bytes: int = 0  # the token embedding and what else is looked up: a token reads one row
    output_bytes: int = 0  # output matrix, final norm, the rest; a tied embedding is counted here a second time
    projector: Projector | None = None  # that lies beside the model, or was asked for
    adapters: tuple[Adapter, ...] = ()  # that were asked for
    positions: Positions = "rope"
    can_rank: bool = True  # as far as is known: a file without the head that scores cannot
    is_causal: bool = True  # a token attends to those before it alone
    pooling: str | None = None  # one of POOLINGS: how it makes one vector of many; None: the header does not tell
    recurrent_length: int = 0  # inner width of recurrent layers
    recurrent_channels: int = 0  # that their convolution runs over
    rope_scaling: RopeScaling | None = None
    expert_length: int = 0  # rows of a routed expert's matrices; 0: none, or as long as `feed_forward_length`
    called: str | None = None  # where the file's name says nothing: a blob of another tool's folder
    parameters: int = 0  # elements of all tensors; 0: unknown
    file_type: str | None = None  # quantization of the whole file by its header: Q4_K_M
    calls_tools: bool = False  # by its chat template
    reasons: bool = False  # before it answers, by its chat template
    # Of a folder, for an engine that has to be told what the model writes: all named ones together; None: it has none.
    chat_template: str | None = field(default=None, compare=False, repr=False)
    added_tokens: frozenset[str] = field(default=frozenset(), compare=False, repr=False)  # of a folder's tokenizer
    tokenizer_files: tuple[str, ...] = ()  # of a folder: those that any tokenizer is read from
    draft_bytes: int = 0  # of draft layers, also where nothing may be computed of the stack; of a folder alone
    has_kv_scales: bool = False  # for a quantized KV cache, beside the weights of a folder
    # config.json of a folder, for what only one engine wants to know of it: as read from anybody, nothing is checked.
    # `quantization_config` is that of the file beside it where it has none.
    config: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}), compare=False, repr=False)

    @property
    def reads_whole(self) -> bool:
        """A text is computed in one batch or not at all: what it attends to, or is pooled over, is all of it
        (llama.cpp's tools/server/server-context.cpp, can_split)."""
        can_split = self.pooling == "last" or (self.is_reranker and self.is_causal)
        return self.is_embedding_model and not can_split

    @property
    def is_reranker(self) -> bool:
        """It gives scores: a vector of such a model is one number, and good for nothing else."""
        return self.pooling == "rank"

    @property
    def gives(self) -> str:
        """In words."""
        return "scores" if self.is_reranker else "vectors" if self.is_embedding_model else "text"

    @property
    def label(self) -> str:
        """Its quantization as people call it."""
        return self.file_type or self.quantization

    @property
    def longest_context(self) -> int:
        """Native, or what the scaling that the file carries reaches."""
        scaling = self.rope_scaling
        reached = int(scaling.factor * scaling.original) if scaling and scaling.original else 0
        return max(self.native_context, reached)

    @property
    def title(self) -> str:
        """For messages: the file's name, unless that is a hash."""
        if self.called:
            return self.called
        return plain_name(self.path) if self.path.parent.name == "snapshots" else self.path.name


def parse_facts(gguf: Gguf) -> Model:
    """Raises ModelUnreadableError naming the key that is missing or wrong, or why this is no language model."""
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
    """What the header tells of rows and columns that tensors have: buffers are computed from it."""
    shapes = {tensor.name: tensor.shape for tensor in tensors if len(tensor.shape) == 2}
    columns, _ = shapes.get("token_embd.weight", (embedding_length, 0))
    if columns != embedding_length:
        keys.fail(f"its header tells of {embedding_length:,} values a token, and token_embd.weight has {columns:,}")
    _, positions = shapes.get("position_embd.weight", (embedding_length, native_context))
    if native_context > positions:
        keys.fail(f"its header tells of {native_context:,} positions, and position_embd.weight has {positions:,} rows")


def _file_type(gguf: Gguf) -> str | None:
    number = gguf.metadata.get("general.file_type")
    return FILE_TYPES.get(number) if isinstance(number, int) else None


def _template_has(gguf: Gguf, words: re.Pattern[str]) -> bool:
    """In the template or in one of the named ones beside it (`tokenizer.chat_template.tool_use`)."""
    texts = (value for key, value in gguf.metadata.items() if key.startswith(TEMPLATE))
    return any(words.search(text) for text in texts if isinstance(text, str))


def _refuse_other_kinds(keys: Keys) -> None:
    kind = keys.text("general.type") or "model"
    if keys.architecture == "clip" or kind == "mmproj":
        keys.fail("it is a multimodal projector", hint="give the language model that lies beside it")
    if kind == "adapter":
        hint = "give the model that it was trained on, and the adapter with --lora"
        keys.fail("it is an adapter (LoRA), and no model", hint=hint)
    if kind != "model":
        keys.fail(f"it is no model but of general.type {kind}", hint="give a language model")
    if keys.architecture not in ARCHITECTURES and not keys.has("block_count"):
        _refuse_foreign(keys)
    if not keys.has_tensors():
        keys.fail("it holds no tensors, only a header or a vocabulary", hint="give a model with weights")


def _refuse_foreign(keys: Keys) -> NoReturn:
    """Of programs for images and sound, which give their files hardly any metadata."""
    what = f"its architecture is {keys.architecture}, which the engine has not"
    if keys.architecture.partition(".")[0].casefold() in IMAGE_ARCHITECTURES:
        what = f"it makes images or films and is no language model: architecture {keys.architecture}"
    elif not keys.has_any():
        what += ", and it has no key of a language model: it may be for images or sound"
    keys.fail(what, hint="give a language model as GGUF; no conversion makes one of this file")


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
        keys.fail(f"it holds tensors of experts, and its key {keys.architecture}.expert_count tells of none")
    return experts


def _experts_used(keys: Keys, layers: int, experts: int) -> int:
    if not experts:
        return 0
    used = max(keys.by_layer("expert_used_count", layers, default=0))
    if not 0 < used <= experts:
        keys.fail(f"its key {keys.architecture}.expert_used_count must be from 1 to its {experts} experts: {used}")
    return used


def _vocabulary(keys: Keys, tensors: tuple[Tensor, ...]) -> int:
    """Of a file without a vocabulary the engine makes up as many tokens as `vocab_size` says: that can be 2^32."""
    tokens = keys.entries("tokenizer.ggml.tokens") or keys.number("vocab_size", default=0)
    embedding = next((tensor for tensor in tensors if tensor.name == "token_embd.weight"), None)
    rows = embedding.shape[1] if embedding is not None and len(embedding.shape) == 2 else 0
    told = keys.number("vocab_size", default=0)
    for known, is_wrong in ((tokens, tokens != rows), (told, told > rows)):
        if known and rows and is_wrong:
            keys.fail(f"its header tells of {known} tokens, and its embedding has {rows} rows")
    return tokens or rows or keys.number("vocab_size", low=1)


def _channels(keys: Keys) -> int:
    """Inner width, and a B and a C, or key and query, for each group."""
    groups, state = keys.number("ssm.group_count", default=0), keys.number("ssm.state_size", default=0)
    return keys.number("ssm.inner_size", default=0) + 2 * groups * state


def _is_tied(tensors: Iterable[Tensor]) -> bool:
    return not any(tensor.name == "output.weight" for tensor in tensors)


def _pooling(keys: Keys) -> str | None:
    return POOLINGS[keys.number("pooling_type", high=len(POOLINGS) - 1)] if keys.has("pooling_type") else None


def _is_embedding_model(keys: Keys) -> bool:
    return _pooling(keys) not in (None, "none") or not keys.is_true("attention.causal", default=True)


def _matrices(tensors: tuple[Tensor, ...]) -> tuple[Matrices, ...]:
    """Of two dimensions, and banks of experts; what is only looked up is none."""
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
