"""Shape of a model as vLLM reads it from config.json: kinds of layers, state of each, and storage of the weights.

Keys are those of vLLM 0.33.0: transformers_utils/model_arch_config_convertor.py, models/qwen3_next.py and
models/qwen3_5.py.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any, Literal, NoReturn

from appliance.engines.vllm.planning.model.quantization import LIMIT, Quantization, quantization_of
from appliance.errors import ModelUnreadableError
from appliance.model import LayerKind, Model
from appliance.values import dataclass

Kind = Literal["full", "sliding", "mla", "linear"]
_HINT = "use a model of another architecture, or an image with another engine"
# Names of torch's types, including newer ones such as `float4_e2m1fn_x2`.
_TORCH_DTYPE = re.compile(r"auto|half|float|double|(?:b?float|complex|q?u?int)\d+(?:_\w+)?")
_DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
_PLAIN_BYTES = {"F64": 8, "F32": 4, "BF16": 2, "F16": 2}
_STORED = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}


@dataclass(frozen=True, kw_only=True)
class LinearState:
    """State of one linear layer with a gated delta rule: heads and lengths of keys and values, width of its
    convolution.

    By `gated_delta_net_state_shape` of layers/mamba/mamba_utils.py a layer keeps a window of the convolution's input in
    the model's type, and one matrix for each value head with `type_bytes` per element.
    """

    key_heads: int
    value_heads: int
    key_length: int
    value_length: int
    kernel: int
    type_bytes: int

    def bytes_of_rank(self, tensor_parallel: int, dtype_bytes: int, drafted: int = 0) -> int:
        channels = 2 * self.key_heads * self.key_length + self.value_heads * self.value_length
        window = channels // tensor_parallel * (self.kernel - 1 + drafted) * dtype_bytes
        matrices = self.value_heads // tensor_parallel * self.value_length * self.key_length
        return window + matrices * self.type_bytes


@dataclass(frozen=True, kw_only=True)
class Shape:
    """Shape of a model. Lengths are in elements. `kinds` has one entry for each layer without draft layers."""

    title: str
    architecture: str
    kinds: tuple[Kind, ...]
    heads: int
    kv_heads: int
    key_length: int  # of a head; for MLA the latent row with the rotated part
    value_length: int  # 0 for MLA
    query_length: int  # of a head's query; for MLA before it becomes latent
    output_length: int  # of a head's output
    window: int | None
    linear: LinearState | None
    width: int
    feed_forward: int
    vocabulary: int
    experts: int
    experts_used: int
    expert_length: int
    shared_length: int
    dtype: str  # the model's own: float32, bfloat16 or float16
    stored_bytes: int  # size of all weights in the files, without draft layers
    stored_types: tuple[tuple[str, int], ...]  # types of all weights, with their bytes
    draft_bytes: int
    drafts: int
    expert_bytes: int
    embedding_bytes: int
    output_bytes: int  # everything except layers and embedding; if tied, including the embedding
    tied_bytes: int  # size of an embedding that is also the output; 0 if the output is separate
    quantization: Quantization
    native_context: int
    has_vision: bool
    sees: bool  # True if the model reads images; False if only sound
    is_exact: bool  # True if the computed KV cache is exact; False if it is an upper bound

    @property
    def layers(self) -> int:
        return len(self.kinds)

    @cached_property
    def is_hybrid(self) -> bool:
        return "linear" in self.kinds

    def count(self, kind: Kind) -> int:
        return self.kinds.count(kind)

    def weights_bytes(self, dtype: str) -> int:
        """Return the size of the weights once loaded, with unquantized weights converted to `dtype`."""
        return self.loaded(self.stored_bytes, dtype)

    def loaded(self, stored_bytes: int, dtype: str) -> int:
        """Return the loaded size of weights with this size in the files. Quantized weights keep it; others are
        converted to `dtype`."""
        if self.quantization.name is not None:
            return stored_bytes
        served = sum(
            size * dtype_bytes(dtype) // _PLAIN_BYTES.get(kind, dtype_bytes(dtype)) for kind, size in self.stored_types
        )
        return stored_bytes * served // sum(size for _, size in self.stored_types)


def dtype_bytes(dtype: str) -> int:
    return _DTYPE_BYTES[dtype]


def shape_of(model: Model) -> Shape:
    """Return the shape of a model. Raises ModelUnreadableError (30) if config.json is inconsistent or describes unknown
    layers."""
    inner = _inner(model.config)
    kinds = _kinds(model, inner)
    heads, kv_heads = model.heads, max(model.kv_heads, default=0)
    if not (heads and kv_heads and model.key_length):
        _fail(model, f"its layers do not attend: {heads} heads, {kv_heads} KV heads of {model.key_length} elements")
    if heads % kv_heads:
        _fail(model, f"its {heads} attention heads cannot share {kv_heads} KV heads: no whole number for each")
    drafts = model.layers - len(kinds)
    return Shape(
        title=model.title,
        architecture=model.architecture,
        kinds=kinds,
        heads=heads,
        kv_heads=kv_heads,
        key_length=model.key_length,
        value_length=model.value_length,
        query_length=model.key_length if model.value_length else _latent_query(model, inner),
        output_length=model.value_length or _number(model, inner, "v_head_dim", default=0),
        window=_window(model, inner),
        linear=_linear(model, inner) if "linear" in kinds else None,
        width=model.embedding_length,
        feed_forward=model.feed_forward_length,
        vocabulary=model.vocabulary,
        experts=model.experts,
        experts_used=model.experts_used,
        expert_length=_number(model, inner, "moe_intermediate_size", "expert_intermediate_size", default=0)
        or (model.feed_forward_length if model.experts else 0),
        shared_length=_number(model, inner, "shared_expert_intermediate_size", default=0),
        dtype=_dtype(model, inner),
        stored_bytes=model.weights_bytes - model.draft_bytes,
        stored_types=model.bytes_by_type,
        draft_bytes=model.draft_bytes,
        drafts=drafts,
        expert_bytes=model.expert_bytes,
        embedding_bytes=model.embedding_bytes,
        output_bytes=model.output_bytes,
        tied_bytes=model.embedding_bytes if model.output_is_tied else 0,
        quantization=quantization_of(model.config, inner, has_kv_scales=model.has_kv_scales),
        native_context=model.native_context,
        has_vision=any(key in model.config for key in ("vision_config", "vision_tower", "audio_config")),
        sees=any(key in model.config for key in ("vision_config", "vision_tower")),
        is_exact=model.cache_kind == "attention" or "linear" in kinds,
    )


def _inner(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the config with the keys of a multimodal model's language part on the top level."""
    for name in ("text_config", "llm_config"):
        if isinstance(config.get(name), Mapping):
            return {**config, **config[name]}
    return config


def _kinds(model: Model, inner: Mapping[str, Any]) -> tuple[Kind, ...]:
    if model.stack:
        return tuple(_plain(layer.kind) for layer in model.stack if not layer.is_draft)
    layers = _number(model, inner, "num_hidden_layers", "n_layer", "num_layers")
    if inner.get("linear_num_value_heads"):
        return _mixed(model, inner, layers)
    return (_named(is_linear=False),) * layers


def _plain(kind: LayerKind) -> Kind:
    """Return vLLM's kind of a layer: `sliding`, `mla`, and `full` for every other kind."""
    if kind == "sliding":
        return "sliding"
    return "mla" if kind == "mla" else "full"


def _mixed(model: Model, inner: Mapping[str, Any], layers: int) -> tuple[Kind, ...]:
    """Return the kinds of a model with linear and full attention. config.json lists them (`layer_types`), or every n-th
    layer is full (`full_attention_interval`)."""
    named = inner.get("layer_types")
    if isinstance(named, Sequence) and not isinstance(named, str):
        if len(named) != layers:
            _fail(model, f"its layer_types must name {layers} layers, and names {len(named)}")
        other = sorted({str(name)[:40] for name in named} - {"linear_attention", "full_attention"})
        if other:
            _fail(model, f"layers of a kind that is not known beside linear attention: {', '.join(other[:4])}")
        return tuple(_named(is_linear=name == "linear_attention") for name in named)
    every = _number(model, inner, "full_attention_interval", default=4, low=1)
    return tuple(_named(is_linear=(at + 1) % every != 0) for at in range(layers))


def _named(*, is_linear: bool) -> Kind:
    return "linear" if is_linear else "full"


def _linear(model: Model, inner: Mapping[str, Any]) -> LinearState:
    kept = inner.get("mamba_ssm_dtype")
    own = _dtype(model, inner)
    return LinearState(
        key_heads=_number(model, inner, "linear_num_key_heads", low=1),
        value_heads=_number(model, inner, "linear_num_value_heads", low=1),
        key_length=_number(model, inner, "linear_key_head_dim", low=1),
        value_length=_number(model, inner, "linear_value_head_dim", low=1),
        kernel=_number(model, inner, "linear_conv_kernel_dim", default=4, low=1, high=64),
        # If the config does not say, it is the convolution's type: config.py, Qwen3_5ForConditionalGenerationConfig.
        type_bytes=_DTYPE_BYTES.get(str(kept), 4) if kept else _DTYPE_BYTES[own],
    )


def _latent_query(model: Model, inner: Mapping[str, Any]) -> int:
    return sum(_number(model, inner, name, default=0) for name in ("qk_nope_head_dim", "qk_rope_head_dim"))


def _window(model: Model, inner: Mapping[str, Any]) -> int | None:
    windows = {layer.window for layer in model.stack if layer.window}
    return max(windows) if windows else None


def _dtype(model: Model, inner: Mapping[str, Any]) -> str:
    """Return the type that the config names, else the type of most weight bytes; bfloat16 if all are quantized."""
    named = str(inner.get("dtype") or inner.get("torch_dtype") or "auto").removeprefix("torch.")
    if named in _DTYPE_BYTES:
        return named
    if not _TORCH_DTYPE.fullmatch(named):
        _fail(model, f"its dtype is none of torch's: {named[:80]!r}")
    return next((_STORED[kind] for kind, _ in model.bytes_by_type if kind in _STORED), "bfloat16")


def _number(
    model: Model, inner: Mapping[str, Any], *names: str, default: int | None = None, low: int = 0, high: int = LIMIT
) -> int:
    for name in names:
        value = inner.get(name)
        if value is not None:
            if type(value) is not int or not low <= value <= high:
                _fail(model, f"its {name} must be a whole number from {low} to {high}: {str(value)[:80]!r}")
            return value
    if default is None:
        _fail(model, f"it has no {names[0]}")
    return default


def _fail(model: Model, reason: str) -> NoReturn:
    message = f"model cannot be planned: {model.path / 'config.json'}: {reason}"
    raise ModelUnreadableError(message, hint=_HINT)
