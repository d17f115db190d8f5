"""Whether a GPU has a flash attention kernel for the heads of a model: pure.

The table is `ggml_cuda_get_best_fattn_kernel` of the pinned ggml/src/ggml-cuda/fattn.cu. Where it has none, the
operation would run on the CPU with the whole cache copied there for every token. The CPU's own takes heads of any size.
"""

from __future__ import annotations

from collections.abc import Mapping

from appliance.engines.llama.planning.memory import layers_of
from appliance.model import Layer, Model

# Values of a K head: those of a V head, and what the query heads of one KV head must be a multiple of.
_KERNELS: Mapping[int, tuple[int, int]] = {
    **{size: (size, 1) for size in (40, 64, 72, 80, 96, 112, 128, 256)},
    192: (128, 8),
    320: (256, 32),
}
_SEVERAL = {512: 512, 576: 512}  # for two query heads or more
EXACT_TYPES = ("f16", "f32", "bf16")  # a V cache of any other type needs flash attention (llama-context.cpp)


def why_no_kernel(model: Model) -> str | None:
    """In words; None where every layer that attends has one."""
    for layer, kv_heads in zip(layers_of(model), model.kv_heads, strict=False):
        if (words := _missing(layer, kv_heads, model.heads)) is not None:
            return words
    return None


def _missing(layer: Layer, kv_heads: int, heads: int) -> str | None:
    if layer.is_draft or not layer.k_elements or (layer.kind != "mla" and not kv_heads):
        return None
    if layer.kind == "mla":  # one compressed row is K and V of every head; how much of it is V follows from its length
        key, queries = layer.k_elements, heads
        value = _KERNELS[key][0] if key in _KERNELS else _SEVERAL.get(key, key)
    else:
        key, value, queries = layer.k_elements // kv_heads, layer.v_elements // kv_heads, max(1, heads // kv_heads)
    if _SEVERAL.get(key) == value and queries > 1:
        return None
    expected, multiple = _KERNELS.get(key, (0, 1))
    if expected == value and queries % multiple == 0:
        return None
    return f"no kernel for K heads of {key} and V heads of {value} values with {queries} queries each"
