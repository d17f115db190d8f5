"""Formulas for the memory of a plan. The engine's log tells what it then allocates, which is kept with the prediction.

Units: MiB are floats of 2**20 bytes. Sources, all in the pinned llama.cpp: KV bytes and block sizes from ggml-common.h
(blocks of 32 values with their scales); cells of sliding layers from src/llama-kv-cache-iswa.cpp; states from
src/llama-memory-recurrent.cpp; copied weights from ggml-cpu/repack.cpp and ggml-cpu/amx; the compute buffer from sizes
seen in llama-server's log (benchmarks/memory.py prints both).
"""

from __future__ import annotations

from functools import lru_cache
from types import MappingProxyType

from appliance.engines.llama.planning.hardware.assumptions import APPLIANCE_MIB, ENGINE_MIB, VOCABULARY_KIB
from appliance.model import Layer, Matrices, Model
from appliance.plan import CONTEXT_STEP, k_and_v
from appliance.values import dataclass

MIB = 2**20
KV_BYTES = MappingProxyType(
    {
        "f32": 4.0,
        "f16": 2.0,
        "bf16": 2.0,
        "q8_0": 34 / 32,
        "q5_1": 24 / 32,
        "q5_0": 22 / 32,
        "q4_1": 20 / 32,
        "iq4_nl": 18 / 32,
        "q4_0": 18 / 32,
    }
)
"""Bytes per value of the KV cache, of each type that can be planned with: the most exact first."""

KV_BLOCK = 32  # values in a block of a quantized type; llama.cpp refuses head sizes that are no multiple of it
UBATCH = 512  # llama-server's own default
CHECKPOINTS_MAX = 32  # llama-server's own default for each slot
SCHED_COPIES = 4  # GGML_SCHED_MAX_COPIES: copies of the inputs if several GPUs work as a pipeline
# Layouts of the CPU backend, by the instructions that a variant is compiled for. A matrix goes to the first layout that
# takes it (ggml-cpu.cpp, ggml_backend_cpu_get_extra_buffer_types: AMX before CPU_REPACK), if its rows are a multiple of
# the number here. AMX takes no banks of experts (amx.cpp, supports_op). For some types it needs more bytes a block
# (mmq.cpp, get_row_size): 34 + 4 for Q8_0, 144 + 4 for Q4_K, 176 + 4 for Q5_K, 136 + 2 for IQ4_XS.
AMX_ISA = frozenset({"amx_int8", "avx512_vnni"})
AMX_ROWS = 32
AMX_GROWTH = MappingProxyType(
    {
        "Q4_0": 1.0,
        "Q4_1": 1.0,
        "Q8_0": 38 / 34,
        "Q4_K": 148 / 144,
        "Q5_K": 180 / 176,
        "Q6_K": 1.0,
        "IQ4_XS": 138 / 136,
        "F16": 1.0,
    }
)
AMX_F16_COLUMNS = 16
# repack.cpp, ggml_repack_get_optimal_repack_type: any of these (instructions, multiple of rows) is enough; the copy has
# the size of the original.
REPACKED_BY = MappingProxyType(
    {
        "Q4_0": (("avx2", 8), ("asimddp", 4)),
        "Q4_K": (("avx2", 8), ("asimddp", 8)),
        "IQ4_NL": (("avx2", 8), ("asimddp", 4)),
        "MXFP4": (("avx2", 8), ("asimddp", 4)),
        "Q2_K": (("avx512f", 8),),
        "Q5_K": (("asimddp", 8),),
        "Q6_K": (("asimddp", 8),),
        "Q8_0": (("asimddp", 4),),
        "Q1_0": (("asimddp", 4),),
    }
)
# Architectures whose graphs were seen to be wider or narrower than those of others.
_DELTA_NETS = ("qwen3next", "qwen35", "qwen35moe")
_UNGATED = ("nemotron_h", "nemotron_h_moe")
_PARALLEL = ("cohere2", "command-r")  # attention and feed-forward from one norm


def layers_of(model: Model) -> tuple[Layer, ...]:
    """Return the model's layers. If only sums are known of the model, all layers are alike."""
    if model.stack:
        return model.stack
    outside = model.embedding_bytes + (0 if model.output_is_tied else model.output_bytes)
    experts = model.expert_bytes // model.layers
    dense = max(0, (model.weights_bytes - outside - model.expert_bytes) // model.layers)
    return _alike(model.kv_heads, model.key_length, model.value_length, dense, experts)


@lru_cache(maxsize=8)
def _alike(
    kv_heads: tuple[int, ...], key_length: int, value_length: int, dense: int, experts: int
) -> tuple[Layer, ...]:
    return tuple(
        Layer(
            kind="full",
            k_elements=heads * key_length,
            v_elements=heads * value_length,
            window=None,
            state_bytes=0,
            dense_bytes=dense,
            expert_bytes=experts,
        )
        for heads in kv_heads
    )


def weights_mib(model: Model) -> float:
    """Return the MiB of all tensors, without draft layers: these are loaded for speculative decoding only."""
    return model.weights_bytes / MIB - drafts_mib(model)


@dataclass(frozen=True, kw_only=True)
class Copies:
    """Weights that the CPU backend copies into a layout of its own, MiB. Copies are anonymous memory, not mapped."""

    made: float = 0.0  # all copies
    tied: float = 0.0  # the part of `made` that copies the tied embedding: look-ups still read the original
    originals: float = 0.0  # originals of the other copies, which are not read again

    @property
    def more(self) -> float:
        """MiB that are needed in addition to the weights: the copy of a tied embedding, and growth by a layout."""
        return self.made - self.originals

    def of_share(self, share: float) -> Copies:
        return Copies(made=self.made * share, tied=self.tied * share, originals=self.originals * share)


def copies(model: Model, isa: tuple[str, ...]) -> Copies:
    """Return the copies for kernels that are compiled for `isa`. For plans without a GPU only.

    With a GPU nothing is copied: the loader prefers the GPU's host buffer, and plain mapped memory after that
    (llama-model.cpp, make_cpu_buft_list).
    """
    made = tied = originals = 0.0
    for matrices in model.matrices:
        growth = growth_of(matrices, isa)
        if growth is None:
            continue
        made += matrices.size_bytes * growth
        if matrices.is_tied:
            tied += matrices.size_bytes * growth
        else:
            originals += matrices.size_bytes
    loaded = weights_mib(model) / max(1.0, weights_mib(model) + drafts_mib(model))
    found = Copies(made=(made - tied) / MIB, originals=originals / MIB).of_share(loaded)
    return Copies(made=found.made + tied / MIB, tied=tied / MIB, originals=found.originals)


def growth_of(matrices: Matrices, isa: tuple[str, ...]) -> float | None:
    """Return the bytes of the copy for each byte of the file; None if these matrices are not copied."""
    kind = matrices.type_name.upper()
    is_taken = kind in AMX_GROWTH and (kind != "F16" or matrices.columns_by % AMX_F16_COLUMNS == 0)
    has_amx = AMX_ISA.issubset(isa)
    if has_amx and is_taken and not matrices.is_bank and matrices.rows_by % AMX_ROWS == 0:
        return AMX_GROWTH[kind]
    is_repacked = any(flag in isa and matrices.rows_by % rows == 0 for flag, rows in REPACKED_BY.get(kind, ()))
    return 1.0 if is_repacked else None


def drafts_mib(model: Model) -> float:
    """Return the MiB of draft layers. They are in the mapped file, and are loaded for speculative decoding only."""
    return sum(layer.dense_bytes + layer.expert_bytes for layer in layers_of(model) if layer.is_draft) / MIB


def cells(layer: Layer, context: int, ubatch: int, parallel: int) -> int:
    """Return the KV cache cells of a layer: the whole context, or the window of each slot plus one ubatch."""
    if layer.window is None:
        return padded(context)
    return padded(min(padded(context), layer.window * parallel + ubatch))


def layer_kv_bytes(layer: Layer, kv_type: str, context: int, ubatch: int, parallel: int) -> float:
    each = cell_bytes(layer, kv_type)
    return each * cells(layer, context, ubatch, parallel) if each else 0.0


def cell_bytes(layer: Layer, kv_type: str) -> float:
    """Return the bytes of one token in a layer's KV cache."""
    k, v = k_and_v(kv_type)
    return layer.k_elements * KV_BYTES[k] + layer.v_elements * KV_BYTES[v]


def flash_copy_bytes(layer: Layer, kv_type: str, context: int, ubatch: int, parallel: int) -> float:
    """Return the bytes of f16 copies of a layer's K and V in a GPU's compute buffer; 0 for an f16 cache.

    Flash attention makes them of every other type when it reads a batch (ggml-cuda.cu, get_alloc_size of
    FLASH_ATTN_EXT; llama.cpp#23907 and #24166).
    """
    return 0.0 if kv_type == "f16" else layer_kv_bytes(layer, "f16", context, ubatch, parallel)


def can_keep(model: Model, kv_type: str) -> bool:
    """Return True if the engine takes this type for the model's cache (llama-context.cpp, llama_init_from_model)."""
    return kv_type in ("f32", "f16", "bf16") or not (model.key_length % KV_BLOCK or model.value_length % KV_BLOCK)


def kv_bytes_per_token(model: Model, kv_type: str) -> float:
    """Return the KV bytes of each additional token. Sliding window layers add none, once their window is full."""
    growing = [layer for layer in layers_of(model) if layer.window is None and not layer.is_draft]
    return sum(cell_bytes(layer, kv_type) for layer in growing)


def kv_mib(model: Model, kv_type: str, context: int, ubatch: int = UBATCH, parallel: int = 4) -> float:
    kept = [layer for layer in layers_of(model) if not layer.is_draft]
    return sum(layer_kv_bytes(layer, kv_type, context, ubatch, parallel) for layer in kept) / MIB


def state_mib(model: Model, parallel: int) -> float:
    """Return the MiB of recurrent states: one in f32 for each sequence, at any length of the sequence."""
    return sum(layer.state_bytes for layer in layers_of(model) if not layer.is_draft) * parallel / MIB


def checkpoint_mib(model: Model, kv_type: str) -> float:
    """Return the MiB of one context checkpoint of one slot: states, and the windows of sliding layers.

    These parts cannot be rolled back. 0 if the model has neither.
    """
    kept = [layer for layer in layers_of(model) if not layer.is_draft]
    states = sum(layer.state_bytes for layer in kept)
    windows = sum(cell_bytes(layer, kv_type) * layer.window for layer in kept if layer.window)
    return (states + windows) / MIB


def mask_bytes(model: Model, ubatch: int, context: int, parallel: int, *, has_flash: bool = True) -> float:
    """Return the bytes of the attention masks: one for full layers, one for sliding layers.

    Masks are f16 with flash attention, else f32.
    """
    sizes = {cells(layer, context, ubatch, parallel) for layer in layers_of(model) if layer.k_elements}
    if not sizes and model.reads_whole:  # such a model has no KV cache, and attends within the batch
        sizes = {ubatch}
    return (2.0 if has_flash else 4.0) * ubatch * sum(sizes)


def compute_mib(model: Model, ubatch: int, context: int, parallel: int = 4, *, has_flash: bool = True) -> float:
    """Return the MiB of the compute buffer: the graph's widest moment in f32, the masks, and copies of states."""
    tokens = min(ubatch, padded(context))
    masks = mask_bytes(model, tokens, context, parallel, has_flash=has_flash)
    wide = widest(model)
    if not has_flash:
        wide = max(wide, _scores_width(model, tokens, context, parallel))
    return (4 * tokens * wide + masks + _states(model, parallel)) / MIB


def widest(model: Model) -> int:
    """Return the values kept for each token at the graph's widest moment.

    That moment is in attention, in a feed-forward layer, among experts, or in a recurrent layer. The scheduler lets
    buffers share memory, so the formulas were found by widening small models step by step, not by adding up the graph.
    If chance decides what fits into freed memory, the larger size is taken. 8 stands for token ids and the like.
    """
    layers = layers_of(model)
    moments = [_attention_width(model)]
    if any(not layer.expert_bytes for layer in layers):
        moments.append(_dense_width(model))
    if model.experts:
        moments.append(_experts_width(model))
    if model.recurrent_length:
        moments.append(_recurrent_width(model))
    return max(moments) + 8


def _attention_width(model: Model) -> int:
    layers, d = layers_of(model), model.embedding_length
    latent = max((layer.k_elements for layer in layers if layer.kind == "mla"), default=0)
    if latent:  # the queries, the queries at the width of the cache, and the results
        return 3 * model.heads * latent
    keys = max((layer.k_elements + layer.v_elements for layer in layers), default=0)
    return 2 * model.heads * model.key_length + keys + 2 * d


def _scores_width(model: Model, tokens: int, context: int, parallel: int) -> int:
    """Return the values kept for each token without flash attention: one score for each head and cell.

    14 loads on the CPU took from 0.3 % more to 2.4 % less.
    """
    cells_most = max((cells(layer, context, tokens, parallel) for layer in layers_of(model)), default=0)
    has_latent = any(layer.kind == "mla" for layer in layers_of(model))
    beside = 7 * model.embedding_length // 2 if has_latent else model.embedding_length
    return model.heads * cells_most + _attention_width(model) + beside


def _dense_width(model: Model) -> int:
    d, wide = model.embedding_length, model.feed_forward_length
    if model.architecture == "gemma3n":  # four streams, and an embedding of 256 for every layer
        return 7 * d + 4 * 256 * model.layers
    if model.architecture in _UNGATED:
        return 2 * wide + d
    return 3 * wide + (5 if model.architecture in _PARALLEL else 4) * d


def _experts_width(model: Model) -> int:
    """Return the values kept for each token among experts.

    The results of the used experts fit into the memory of gate and up, or need memory of their own.
    """
    d, used = model.embedding_length, model.experts_used
    inner = used * (model.expert_length or model.feed_forward_length)
    if used * d <= 2 * inner:
        return 3 * inner + 5 * d
    # Memory that attention frees in each layer; in a delta net most layers have no attention.
    holes = 0 if model.architecture in _DELTA_NETS else model.heads * model.key_length
    return used * d + 3 * inner + (2 if inner <= holes else 4) * d


def _recurrent_width(model: Model) -> int:
    d, inner, channels = model.embedding_length, model.recurrent_length, model.recurrent_channels
    return 3 * channels + (4 * d - inner if model.architecture in _DELTA_NETS else 3 * d + 2 * inner + 512)


def _states(model: Model, parallel: int) -> float:
    """Return the bytes of the copies of one layer's states that the graph works on."""
    copies = 2.2 if model.architecture in _DELTA_NETS else 1.0
    return copies * parallel * max((layer.state_bytes for layer in layers_of(model)), default=0)


def output_mib(model: Model, parallel: int) -> float:
    """Return the MiB of logits in f32, one token for each slot: llama-server's n_outputs_max is its number of slots."""
    return 4 * model.vocabulary * parallel / MIB


def host_overhead_mib(model: Model) -> float:
    """Return the MiB of host memory that engine and appliance take in addition to the engine's buffers."""
    return ENGINE_MIB.value + VOCABULARY_KIB.value * model.vocabulary / 1024 + APPLIANCE_MIB.value


def padded(context: int) -> int:
    return -(-context // CONTEXT_STEP) * CONTEXT_STEP
