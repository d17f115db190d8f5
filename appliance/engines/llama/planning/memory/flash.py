"""Flash attention kernels of GPUs, by the size of a model's heads. Pure.

The table follows `ggml_cuda_get_best_fattn_kernel` of the pinned ggml/src/ggml-cuda/fattn.cu. If a GPU has no kernel,
the operation would run on the CPU, and the whole cache would be copied there for every token. The CPU's own kernel
takes heads of any size.
"""

from __future__ import annotations

from collections.abc import Mapping

from appliance.engines.llama.planning.memory.memory import layers_of
from appliance.model import Layer, Model

# By the values of a K head: the values of a V head, and the number that divides the query heads of one KV head.
_KERNELS: Mapping[int, tuple[int, int]] = {
    **{size: (size, 1) for size in (40, 64, 72, 80, 96, 112, 128, 256)},
    192: (128, 8),
    320: (256, 32),
}
# Heads that the vector kernel takes (FATTN_VEC_CASES_ALL_D), which reads a quantized cache without conversion. For
# others the whole cache is converted to f16 for every token (`need_f16_K` of the tile and tensor core kernels).
_VECTOR = (64, 128, 256)
_SEVERAL = {512: 512, 576: 512}  # V values by K values of kernels that need two query heads or more per KV head
EXACT_TYPES = ("f16", "f32", "bf16")  # a V cache of any other type needs flash attention (llama-context.cpp)


def why_no_kernel(model: Model) -> str | None:
    """Return the first missing kernel in words; None if every attention layer has a kernel."""
    for layer, kv_heads in zip(layers_of(model), model.kv_heads, strict=False):
        if (words := _missing(layer, kv_heads, model.heads)) is not None:
            return words
    return None


def converted_layers(model: Model) -> frozenset[Layer]:
    """Return the layers whose quantized KV cache is converted to f16 for every token."""
    of_layers = zip(layers_of(model), model.kv_heads, strict=False)
    attending = ((layer, kv_heads) for layer, kv_heads in of_layers if _attends(layer, kv_heads))
    return frozenset(layer for layer, kv_heads in attending if _key(layer, kv_heads) not in _VECTOR)


def _attends(layer: Layer, kv_heads: int) -> bool:
    return not layer.is_draft and bool(layer.k_elements) and (layer.kind == "mla" or kv_heads > 0)


def _key(layer: Layer, kv_heads: int) -> int:
    """Return the values of a K head. In MLA one compressed row is K and V of every head."""
    return layer.k_elements if layer.kind == "mla" else layer.k_elements // kv_heads


def _missing(layer: Layer, kv_heads: int, heads: int) -> str | None:
    if not _attends(layer, kv_heads):
        return None
    key, queries = _key(layer, kv_heads), heads
    if layer.kind == "mla":  # the length of the row decides how much of it is V
        value = _KERNELS[key][0] if key in _KERNELS else _SEVERAL.get(key, key)
    else:
        value, queries = layer.v_elements // kv_heads, max(1, heads // kv_heads)
    if _SEVERAL.get(key) == value and queries > 1:
        return None
    expected, multiple = _KERNELS.get(key, (0, 1))
    if expected == value and queries % multiple == 0:
        return None
    return f"no kernel for K heads of {key} and V heads of {value} values with {queries} queries each"
