"""Every layer of a GGUF model: what it keeps per token or sequence, and the size of its weights.

The formulas are llama.cpp's: `n_embd_k_gqa`, `n_embd_v_gqa`, `n_embd_r`, `n_embd_s`, `set_swa_pattern` and `has_kv`
of src/llama-hparams.cpp, and the layer filters of `llama_model::create_memory`. Differences between architectures
are data in `architectures.py`.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable
from typing import Literal

from appliance.model.architecture.architectures import ARCHITECTURES, Architecture, Recurrent, Sliding
from appliance.model.formats.gguf import Tensor
from appliance.model.formats.keys import Keys
from appliance.values import dataclass

LayerKind = Literal["full", "sliding", "mla", "recurrent", "none"]

# What -ncmoe and --cpu-moe move: LLM_FFN_EXPS_REGEX of common/common.h; it includes biases and scales of experts.
_EXPERTS = re.compile(r"\.ffn_(up|down|gate|gate_up)_(ch|)exps")
_BLOCK = re.compile(r"blk\.(\d+)\.")
_K_PROJECTION = re.compile(r"blk\.(\d+)\.attn_k\.weight")
_Q_PROJECTION = re.compile(r"blk\.(\d+)\.attn_q\.weight")
# Looked up by row, never multiplied; the engine keeps them in host memory.
LOOKED_UP = ("token_embd.", "per_layer_token_embd.", "position_embd.", "token_types.")
# Keys below `<arch>.` that show a special cache, which only some architectures have, with a description of it.
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
_STATE_KEYS = {
    "ssm": ("ssm.",),
    "ssm ungrouped": ("ssm.",),
    "wkv": ("wkv.",),
    "shortconv": ("shortconv.",),
    "kda": ("kda.", "ssm."),
    "lightning": (),
}


@dataclass(frozen=True, kw_only=True)
class Layer:
    """One layer of a model: what it keeps for every token, and the size of its weights.

    A token costs `k_elements` + `v_elements` elements of the cache types in this layer. A sliding layer's cache has
    min(context, `window` × (sequences of a unified cache, else 1) + ubatch) cells, rounded up to 256, unless the
    engine runs with --swa-full (llama-kv-cache-iswa.cpp). Its attention covers the newest `window` tokens.
    `state_bytes` (f32) are kept for each sequence, whatever its length, and once more for each token that
    speculative decoding may take back.
    """

    kind: LayerKind
    k_elements: int  # per token; 0: no cache of its own (recurrent, or shared with another layer)
    v_elements: int  # per token; 0 for MLA, whose one compressed row counts as K
    window: int | None  # tokens that a sliding layer attends to; None: all
    state_bytes: int  # per sequence; only falcon-h1 has it together with a cache
    dense_bytes: int  # weights without routed experts; shared experts included
    expert_bytes: int  # all routed experts together
    is_draft: bool = False  # multi-token prediction: loaded, with a cache, only if the engine speculates with it


@dataclass(frozen=True, kw_only=True)
class Heads:
    """Attention heads; tuples are by layer, lengths are elements of one head."""

    heads: tuple[int, ...]
    kv_heads: tuple[int, ...]
    key_length: int
    value_length: int
    sliding_key_length: int
    sliding_value_length: int


@dataclass(frozen=True, kw_only=True)
class Weights:
    embedding_bytes: int
    output_bytes: int
    dense_bytes: tuple[int, ...]
    expert_bytes: tuple[int, ...]


def parse_heads(keys: Keys, layers: int, embedding_length: int, *, must_attend: bool) -> Heads:
    heads = keys.by_layer("attention.head_count", layers, default=None if must_attend else 0)
    default = embedding_length // heads[0] if heads[0] else 0
    # If the first layer has no heads, the engine ignores the lengths in the header.
    key = keys.number("attention.key_length", default=default) if heads[0] else 0
    value = keys.number("attention.value_length", default=default) if heads[0] else 0
    return Heads(
        heads=heads,
        kv_heads=keys.by_layer("attention.head_count_kv", layers, default=heads),
        key_length=key,
        value_length=value,
        sliding_key_length=keys.number("attention.key_length_swa", default=key),
        sliding_value_length=keys.number("attention.value_length_swa", default=value),
    )


def why_unsupported(keys: Keys) -> str | None:
    """Return why this model's cache cannot be computed; None if `parse_stack` can compute it."""
    architecture = ARCHITECTURES.get(keys.architecture)
    if architecture is None:
        return f"{keys.architecture}: this engine has no such architecture"
    if architecture.unsupported:
        return f"{keys.architecture}: {architecture.unsupported}"
    known = _known_keys(architecture)
    for name, words in _OTHER_CACHES:
        found = keys.starting_with(name)
        if found and name not in known:
            return f"{words}: {', '.join(sorted(found)[:4])}"
    if keys.number("nextn_predict_layers", default=0) and _keeps_drafts(architecture):
        return f"{keys.architecture}: the engine keeps the cache of its draft layers even without speculative decoding"
    return None


def attends(architecture: str) -> bool:
    """True if a model of this architecture must have attention heads."""
    known = ARCHITECTURES.get(architecture)
    return known is None or not (known.recurrent and known.recurrent.rule == "every layer")


def parse_weights(keys: Keys, tensors: Iterable[Tensor], layers: int) -> Weights:
    """Bytes by layer and outside the layers; a tied embedding counts a second time as the output."""
    dense, experts = [0] * layers, [0] * layers
    sums: defaultdict[str, int] = defaultdict(int)
    for tensor in tensors:
        block = _BLOCK.match(tensor.name)
        if not block:
            sums["embedding" if tensor.name.startswith(LOOKED_UP) else "output"] += tensor.size_bytes
            sums[tensor.name] += tensor.size_bytes
            continue
        if int(block[1]) >= layers:
            keys.fail(f"it has tensors of layer {block[1]}, but its header says {layers} layers")
        (experts if _EXPERTS.search(tensor.name) else dense)[int(block[1])] += tensor.size_bytes
    if layers > 1 and not dense[-1] + experts[-1]:
        keys.fail(f"its header says {layers} layers, but it has no tensors of layer {layers - 1}")
    tied = 0 if "output.weight" in sums else sums["token_embd.weight"]
    return Weights(
        embedding_bytes=sums["embedding"],
        output_bytes=sums["output"] + tied,
        dense_bytes=tuple(dense),
        expert_bytes=tuple(experts),
    )


def check_projections(keys: Keys, tensors: Iterable[Tensor], heads: Heads) -> None:
    """Check that no cache row is longer than the layer's K projection gives: a wrong header could mean terabytes of
    cache."""
    known = ARCHITECTURES.get(keys.architecture)
    kinds = [(_K_PROJECTION, heads.kv_heads, "KV heads")]
    # with latents, the lengths are those of the compressed row and not of a query
    if known is None or known.latents is None:
        kinds.append((_Q_PROJECTION, heads.heads, "heads"))
    shortest = min(heads.key_length, heads.sliding_key_length)
    for tensor in tensors:
        for pattern, counts, words in kinds:
            found = pattern.fullmatch(tensor.name)
            if found and len(tensor.shape) == 2 and counts[int(found[1])] * shortest > tensor.shape[1]:
                keys.fail(
                    f"its header says {counts[int(found[1])]} {words} of {shortest} in layer {found[1]}, "
                    f"but {tensor.name} has {tensor.shape[1]} rows"
                )


def parse_stack(keys: Keys, heads: Heads, embedding_length: int, weights: Weights) -> tuple[Layer, ...]:
    """Return every layer in order, draft layers last. Only for models without a reason in `why_unsupported`."""
    architecture = ARCHITECTURES[keys.architecture]
    layers = len(heads.heads)
    trunk = layers - keys.number("nextn_predict_layers", default=0, high=layers)
    window = _window(keys, architecture.sliding, trunk)
    slides = _slides(keys, architecture.sliding, trunk, layers) if window else [False] * layers
    recurs = _recurs(keys, architecture.recurrent, heads, trunk)
    caches = _caches(keys, architecture, heads, recurs)
    if architecture.sliding and architecture.sliding.period == 0:
        slides = [slide and not recur for slide, recur in zip(slides, recurs, strict=True)]
    state = _state_bytes(keys, architecture.recurrent, heads, embedding_length) if any(recurs) else 0
    is_mla = _is_mla(keys, architecture)
    return tuple(
        _layer(
            heads,
            number,
            caches=caches[number],
            window=window if slides[number] else None,
            state_bytes=state if recurs[number] else 0,
            is_mla=is_mla,
            weights=weights,
            is_draft=number >= trunk,
        )
        for number in range(layers)
    )


def _layer(
    heads: Heads,
    number: int,
    *,
    caches: bool,
    window: int | None,
    state_bytes: int,
    is_mla: bool,
    weights: Weights,
    is_draft: bool,
) -> Layer:
    kv_heads = heads.kv_heads[number]
    key, value = (
        (heads.sliding_key_length, heads.sliding_value_length) if window else (heads.key_length, heads.value_length)
    )
    kind: LayerKind = "mla" if is_mla else "sliding" if window else "full"
    if not kv_heads or not key or (state_bytes and not caches):
        kind = "recurrent" if state_bytes else "none"
    return Layer(
        kind=kind,
        k_elements=key * kv_heads if caches else 0,
        v_elements=value * kv_heads if caches and not is_mla else 0,
        window=window if kind == "sliding" else None,
        state_bytes=state_bytes,
        dense_bytes=weights.dense_bytes[number],
        expert_bytes=weights.expert_bytes[number],
        is_draft=is_draft,
    )


def _known_keys(architecture: Architecture) -> set[str]:
    known = {"attention.kv_lora_rank"} if architecture.latents else set()
    if architecture.recurrent:
        known.update(_STATE_KEYS[architecture.recurrent.state])
        known.update({"attention.recurrent_layers"} if architecture.recurrent.rule == "interval" else ())
    return known


def _keeps_drafts(architecture: Architecture) -> bool:
    """True if the engine's filter of attention layers in this hybrid includes draft layers."""
    return architecture.recurrent is not None and architecture.recurrent.rule != "interval"


def _is_mla(keys: Keys, architecture: Architecture) -> bool:
    if architecture.latents != "cached":
        return False
    key, value = (keys.number(f"attention.{name}_length_mla", default=0) for name in ("key", "value"))
    if bool(key) != bool(value):
        keys.fail(f"its keys attention.key_length_mla, attention.value_length_mla must both be set: {key}, {value}")
    return bool(key)


def _window(keys: Keys, sliding: Sliding | None, trunk: int) -> int | None:
    if sliding is None or (sliding.only_layers not in (None, trunk)):
        return None
    is_needed = sliding.window is None and not sliding.is_optional
    default = None if is_needed else 0 if sliding.is_optional else sliding.window
    window = keys.number("attention.sliding_window", default=default)
    return sliding.window if window and sliding.is_fixed else window or None


def _slides(keys: Keys, sliding: Sliding | None, trunk: int, layers: int) -> list[bool]:
    if sliding is None:
        return [False] * layers
    given = keys.flags("attention.sliding_window_pattern") if sliding.period != 0 else None
    if given is not None:
        return [*given[:layers], *[False] * (layers - len(given))]
    if sliding.period is None:
        keys.fail("its header has no array attention.sliding_window_pattern, which this architecture needs")
    period = keys.number("attention.sliding_window_pattern", default=sliding.period) if sliding.period else 0
    dense = 0 if sliding.dense_first else period - 1
    return [number < trunk and (period == 0 or number % period != dense) for number in range(layers)]


def _recurs(keys: Keys, recurrent: Recurrent | None, heads: Heads, trunk: int) -> list[bool]:
    layers = range(len(heads.heads))
    if recurrent is None:
        return [False for _ in layers]
    if recurrent.rule == "interval":
        given = keys.flags("attention.recurrent_layers")
        if given is not None and len(given) != len(layers):
            keys.fail(f"its key attention.recurrent_layers must hold {len(layers)} booleans, one a layer")
        interval = keys.number("full_attention_interval", default=recurrent.interval, low=1)
        return [number < trunk and (given[number] if given else (number + 1) % interval != 0) for number in layers]
    fed = _feed_forward(keys, recurrent, len(layers))
    lacks_heads = recurrent.rule.startswith("no KV heads")
    return [number < trunk and not (lacks_heads and heads.kv_heads[number]) and not fed[number] for number in layers]


def _feed_forward(keys: Keys, recurrent: Recurrent | None, layers: int) -> tuple[int, ...]:
    """Feed-forward rows by layer, if a layer with feed-forward has nothing else; else all 0."""
    if recurrent is None or recurrent.rule != "no KV heads and no feed-forward":
        return (0,) * layers
    return keys.by_layer("feed_forward_length", layers, default=0)


def _caches(keys: Keys, architecture: Architecture, heads: Heads, recurs: list[bool]) -> list[bool]:
    """For each layer, True if it has a cache of its own."""
    layers = len(recurs)
    own = architecture.own_kv_layers if architecture.own_kv_layers is not None else layers
    if architecture.shares_kv:
        own = layers - keys.number("attention.shared_kv_layers", default=0, high=max(layers - 2, 0))
    is_beside = architecture.recurrent is not None and architecture.recurrent.rule == "beside attention"
    fed = _feed_forward(keys, architecture.recurrent, layers)
    return [
        architecture.caches and number < own and (is_beside or not recur) and not fed[number]
        for number, recur in enumerate(recurs)
    ]


def _state_bytes(keys: Keys, recurrent: Recurrent | None, heads: Heads, embedding_length: int) -> int:
    """Bytes of state per layer and sequence: (n_embd_r + n_embd_s) × 4."""
    state = recurrent.state if recurrent else "ssm"
    if state == "wkv":
        shift = keys.number("token_shift_count", default=2)
        return 4 * embedding_length * (shift + keys.number("wkv.head_size", low=1))
    if state == "shortconv":
        return 4 * embedding_length * (keys.number("shortconv.l_cache", low=1) - 1)
    if state == "lightning":
        return 4 * heads.key_length**2 * heads.heads[0]
    convolution = keys.number("ssm.conv_kernel")
    if state == "kda":
        length = keys.number("kda.head_dim", low=1)
        return 4 * heads.heads[0] * length * (3 * (convolution - 1 if convolution else 3) + length)
    inner, size = keys.number("ssm.inner_size"), keys.number("ssm.state_size")
    groups = keys.number("ssm.group_count") if state == "ssm" else 0
    return 4 * (max(convolution - 1, 0) * (inner + 2 * groups * size) + size * inner)
