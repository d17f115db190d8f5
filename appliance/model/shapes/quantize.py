"""Type of each tensor in a file of some quantization.

From `llama_tensor_get_type_impl` and `tensor_type_fallback` of llama.cpp's src/llama-quant.cpp, for files made
without an importance matrix. Left out: Falcon, LLM_TYPE_70B, and the types below three bits.
"""

from __future__ import annotations

from collections.abc import Sequence

from appliance.model.formats.ggml_types import GGML_TYPES, UNQUANTIZED, GgmlType
from appliance.model.shapes.shape import Shape

BY_NAME = {kind.name: kind for kind in GGML_TYPES.values()}
# llama_ftype_get_default_type
BASES = {
    "F32": "F32",
    "F16": "F16",
    "BF16": "BF16",
    "Q8_0": "Q8_0",
    "Q6_K": "Q6_K",
    "Q5_K_M": "Q5_K",
    "Q5_K_S": "Q5_K",
    "Q5_1": "Q5_1",
    "Q5_0": "Q5_0",
    "Q4_K_M": "Q4_K",
    "Q4_K_S": "Q4_K",
    "Q4_1": "Q4_1",
    "Q4_0": "Q4_0",
    "IQ4_NL": "IQ4_NL",
    "IQ4_XS": "IQ4_XS",
    "Q3_K_L": "Q3_K",
    "Q3_K_M": "Q3_K",
    "Q3_K_S": "Q3_K",
    "Q2_K": "Q2_K",
    "MXFP4": "MXFP4",
}
# Replacement types if the row length is not a multiple of 256.
_FALLBACKS = {"Q2_K": "Q4_0", "Q3_K": "Q4_0", "Q4_K": "Q5_0", "Q5_K": "Q5_1", "Q6_K": "Q8_0", "IQ4_XS": "IQ4_NL"}
_KEPT_F32 = (
    "norm",
    "ffn_gate_inp",
    "ssm_conv1d",
    "ssm_a",
    "ssm_d",
    "ssm_dt",
    "shortconv.conv",
    "attn_sinks",
    ".bias",
    "lerp",
)
_MORE_BITS = frozenset({"Q4_K_M", "Q5_K_M"})
_EIGHT_EXPERTS = 8
_GROUPED = 4  # query heads per KV head from which V gets a larger type


def tensor_type(name: str, size: Sequence[int], shape: Shape, quantization: str) -> GgmlType:
    """Type of a tensor whose innermost dimension is `size[0]`. Raises KeyError for an unknown quantization."""
    base = BASES[quantization]
    if len(size) == 1 or any(part in name for part in _KEPT_F32):
        return BY_NAME["F32"]
    if base in UNQUANTIZED:
        return BY_NAME[base]
    return _fitting(BY_NAME[_wanted(name, size, shape, quantization)], size[0])


def size_bytes(size: Sequence[int], kind: GgmlType) -> int:
    elements = 1
    for dimension in size:
        elements *= dimension
    return elements // kind.block_size * kind.block_bytes


def _wanted(name: str, size: Sequence[int], shape: Shape, quantization: str) -> str:
    base = BASES[quantization]
    if name == "output.weight" or (name == "token_embd.weight" and shape.is_tied):
        return "Q8_0" if base in ("MXFP4", "Q8_0") or size[0] % BY_NAME[base].block_size else "Q6_K"
    if base == "MXFP4":
        return "MXFP4" if len(size) > 2 and "_exps" in name else "Q8_0"
    if any(part in name for part in ("attn_v.weight", "attn_qkv.weight", "attn_kv_b.weight")):
        return _of_values(name, shape, quantization)
    if "attn_k.weight" in name:
        return "Q8_0" if shape.get("expert_count") == _EIGHT_EXPERTS else base
    if "ffn_down" in name:
        return _of_down(_layer(name), shape.layers, quantization)
    return _of_attention_output(shape, quantization) if "attn_output.weight" in name else base


def _of_values(name: str, shape: Shape, quantization: str) -> str:
    base, layer = BASES[quantization], _layer(name)
    if shape.get("expert_count") == _EIGHT_EXPERTS:
        return "Q8_0"
    heads = shape.of_layer("attention.head_count", layer)
    kv_heads = shape.of_layer("attention.head_count_kv", layer, heads)
    is_grouped = bool(kv_heads) and heads // kv_heads >= _GROUPED
    rules = {
        "Q2_K": "Q4_K" if is_grouped else "Q3_K",
        "Q3_K_M": "Q5_K" if layer < 2 else "Q4_K",
        "Q3_K_L": "Q5_K",
        "Q4_K_S": "Q5_K" if layer < 4 else base,
        "IQ4_NL": "Q5_K" if is_grouped else base,
        "IQ4_XS": "Q5_K" if is_grouped else base,
    }
    if quantization in _MORE_BITS:
        return "Q6_K" if _has_more_bits(layer, shape.layers) else base
    return rules.get(quantization, base)


def _of_down(layer: int, layers: int, quantization: str) -> str:
    base = BASES[quantization]
    is_early = layer < layers // 8
    rules = {
        "Q2_K": "Q3_K",
        "Q3_K_M": "Q5_K" if layer < layers // 16 else "Q4_K",
        "Q3_K_L": "Q5_K",
        "Q4_K_S": "Q5_K" if is_early else base,
        "IQ4_NL": "Q5_K" if is_early else base,
        "IQ4_XS": "Q5_K" if is_early else base,
    }
    if quantization in _MORE_BITS:
        return "Q6_K" if _has_more_bits(layer, layers) else base
    return rules.get(quantization, base)


def _of_attention_output(shape: Shape, quantization: str) -> str:
    base = BASES[quantization]
    if shape.get("expert_count") == _EIGHT_EXPERTS:
        return "Q5_K" if base in ("Q2_K", "Q3_K", "Q4_K", "IQ4_NL", "IQ4_XS") else base
    return {"Q2_K": "Q3_K", "Q3_K_M": "Q4_K", "Q3_K_L": "Q5_K"}.get(quantization, base)


def _fitting(kind: GgmlType, row: int) -> GgmlType:
    if row % kind.block_size == 0:
        return kind
    smaller = BY_NAME[_FALLBACKS.get(kind.name, "F16")]
    return smaller if row % smaller.block_size == 0 else BY_NAME["F16"]


def _has_more_bits(layer: int, layers: int) -> bool:
    """True for layers with more bits, as in `use_more_bits`: the first and last eighth, and every third layer
    between."""
    return layer < layers // 8 or layer >= 7 * layers // 8 or (layer - layers // 8) % 3 == 2


def _layer(name: str) -> int:
    return int(name.split(".")[1])
