"""Values of config.json, under the different names that architectures use for them.

Names: `CONFIG_FIELD_ALIASES` of vLLM 0.33.0 transformers_utils/config.py, and model_arch_config_convertor.py beside
it.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import NoReturn

from appliance.errors import ModelUnreadableError
from appliance.model.formats.safetensors import read_json

_UINT32_MAX = (1 << 32) - 1
_HINT = "fetch the model again: this file describes no language model"
_NAMES = {
    "layers": ("num_hidden_layers", "n_layer", "num_layers"),
    "width": ("hidden_size", "n_embd", "d_model"),
    "heads": ("num_attention_heads", "n_head"),
    "kv_heads": ("n_head_kv", "num_kv_heads", "num_key_value_heads", "multi_query_group_num", "num_attention_groups"),
    "head_length": ("head_dim", "hidden_size_per_head"),
    "feed_forward": ("intermediate_size", "n_inner", "ffn_hidden_size"),
    "context": ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length"),
    "vocabulary": ("vocab_size",),
    "experts": ("num_experts", "moe_num_experts", "n_routed_experts", "num_local_experts"),
    "experts_used": ("num_experts_per_tok", "num_experts_per_token", "top_k_experts", "moe_topk", "moe_top_k"),
    "drafts": ("num_nextn_predict_layers", "mtp_num_hidden_layers"),
    "latent": ("kv_lora_rank",),
    "rope_length": ("qk_rope_head_dim",),
    "window": ("sliding_window",),
    "window_period": ("sliding_window_pattern",),
}
# `is_deepseek_mla`: in other models with latents, these are expanded to keys and values.
_LATENTS_CACHED = frozenset(
    ("axk1", "deepseek_v2", "deepseek_v3", "glm4_moe_lite", "kimi_k2", "longcat_flash", "pangu_ultra_moe")
)
_ATTENDING = {"attention": False, "full_attention": False, "sliding_attention": True, "chunked_attention": True}
# All layers slide if the file has a window and names no layers: their configurations in transformers 5.19 add no layer
# list, and vLLM then gives all layers the model's window.
_ALL_SLIDE = frozenset(("ministral", "mistral", "mixtral", "phi3", "starcoder2"))
# Keys that show another kind of cache than keys and values, or one latent row, for every token in every layer.
_OTHER_CACHES = {
    "index_topk": "sparse attention keeps a second cache, for its indexer",
    "indexer_n_heads": "sparse attention keeps a second cache, for its indexer",
    "compress_ratios": "compressed attention keeps several caches of its own sizes",
    "linear_attn_config": "linear attention keeps a state, whose type is a setting of the engine",
    "linear_num_value_heads": "linear attention keeps a state, whose type is a setting of the engine",
    "mamba_d_state": "a state-space layer keeps a state, whose type is a setting of the engine",
    "ssm_state_size": "a state-space layer keeps a state, whose type is a setting of the engine",
    "state_size": "a state-space layer keeps a state, whose type is a setting of the engine",
    "layers_block_type": "its layers are of several kinds",
    "hybrid_override_pattern": "its layers are of several kinds",
    "block_configs": "its layers are of several kinds",
    "num_kv_shared_layers": "some of its layers share a cache",
    "conv_L_cache": "a convolution layer keeps a state",
    "decoder_layers": "an encoder-decoder model keeps two caches",
}


class Config:
    """config.json with typed access; errors name the key. For a multimodal model, values come from its language
    part."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "config.json"
        self._outer = read_json(self.path)
        inner = self._outer.get("text_config") or self._outer.get("llm_config") or self._outer
        if not isinstance(inner, dict):
            self.fail("its text_config is not an object")
        self._inner: Mapping[str, object] = inner

    def fail(
        self, reason: str, *, hint: str = "fetch the model again: this file describes no language model"
    ) -> NoReturn:
        message = f"model cannot be used: {self.path}: {reason}"
        raise ModelUnreadableError(message, hint=hint)

    @property
    def values(self) -> Mapping[str, object]:
        """All values as they are in the file."""
        return self._outer

    @property
    def architecture(self) -> str:
        names = self._outer.get("architectures")
        name = names[0] if isinstance(names, list) and names else None
        if not isinstance(name, str) or not name or not name.isprintable() or len(name) > 128:
            self.fail("it has no architectures, which every model names")
        return name

    def number(self, what: str, *, default: int | None = None, low: int = 0, high: int = _UINT32_MAX) -> int:
        """Return a whole number within bounds, from the first of its names that exists and is not null."""
        for name in _NAMES[what]:
            value = self._inner.get(name)
            if value is not None:
                if type(value) is not int or not low <= value <= high:
                    self.fail(f"its {name} must be a whole number from {low} to {high}: {str(value)[:80]!r}")
                return value
        if default is None:
            self.fail(f"it has no {_NAMES[what][0]}")
        return default

    def is_true(self, name: str, *, default: bool) -> bool:
        value = self._inner.get(name)
        return default if value is None else bool(value)

    def why_unsupported(self) -> str | None:
        """Return why this model's cache cannot be computed, else None."""
        if self._outer.get("is_encoder_decoder"):
            return "an encoder-decoder model keeps two caches"
        for name, words in _OTHER_CACHES.items():
            if self._inner.get(name):
                return f"{words}: {name}"
        if self.number("latent", default=0) and str(self._inner.get("model_type")) not in _LATENTS_CACHED:
            return "it is unknown whether this model with latent attention caches the latents: kv_lora_rank"
        other = sorted({str(kind)[:40] for kind in self._layer_types() or () if kind not in _ATTENDING})
        if other:
            return f"layers of a kind whose cache is unknown: {', '.join(other[:4])}"
        says_which = self._layer_types() is not None or self.number("window_period", default=0) or self._all_slide()
        if self._has_window() and not says_which:
            return "it has a sliding window, but does not say which layers use it: sliding_window"
        return None

    def slides(self, layers: int) -> list[bool]:
        """For each layer, True if it attends only to `window` tokens."""
        kinds = self._layer_types()
        period = self.number("window_period", default=0)
        if not self._has_window():
            return [False] * layers
        if kinds is None:
            return [(number + 1) % period != 0 if period else self._all_slide() for number in range(layers)]
        if len(kinds) != layers:
            self.fail(f"its layer_types must name {layers} layers, but names {len(kinds)}")
        return [_ATTENDING.get(kind, False) for kind in kinds]

    def quantization(self) -> str | None:
        """Quantization method, with the bits of the weights if they are given; None for unquantized weights."""
        settings = self._outer.get("quantization_config", self._inner.get("quantization_config"))
        settings = settings or self._outer.get("compression_config")
        if settings is None:
            return None
        if not isinstance(settings, dict):
            self.fail("its quantization_config is not an object")
        return describe_quantization(settings)

    def _has_window(self) -> bool:
        return self.is_true("use_sliding_window", default=True) and self.number("window", default=0) > 0

    def _all_slide(self) -> bool:
        return str(self._inner.get("model_type")) in _ALL_SLIDE

    def _layer_types(self) -> list[str] | None:
        kinds = self._inner.get("layer_types")
        if kinds is None:
            return None
        if not isinstance(kinds, list) or not all(isinstance(kind, str) for kind in kinds):
            self.fail("its layer_types must be a list of names")
        return kinds


def describe_quantization(settings: Mapping[str, object]) -> str:
    """Format it: `awq 4-bit`, `fp8`, `compressed-tensors nvfp4-pack-quantized 4-bit`, `modelopt NVFP4`."""
    inner = settings.get("quantization")
    algorithm = settings.get("quant_algo") or (inner.get("quant_algo") if isinstance(inner, dict) else None)
    method = settings.get("quant_method") or ("modelopt" if algorithm else "unknown")
    bits = settings.get("bits") or settings.get("w_bit") or _group_bits(settings.get("config_groups"))
    shown = settings.get("format") if method == "compressed-tensors" else algorithm
    words = [str(method)[:40], str(shown)[:40] if shown else "", f"{bits}-bit" if type(bits) is int else ""]
    return " ".join(word for word in words if word and word.isprintable())


def _group_bits(groups: object) -> object:
    """Smallest number of bits of all groups' weights; None if there is none."""
    if not isinstance(groups, dict):
        return None
    weights = [group.get("weights") for group in groups.values() if isinstance(group, dict)]
    bits = [entry.get("num_bits") for entry in weights if isinstance(entry, dict)]
    return min((number for number in bits if type(number) is int), default=None)
