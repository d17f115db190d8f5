"""GPU memory of one vLLM rank, MiB: weights, peak of a forward pass, CUDA graphs, CUDA context, reserve.

`KV = min(free, total x u) - weights - context and NCCL - activation peak - graphs - reserve`. vLLM 0.33.0 takes a
snapshot of free memory after CUDA context and NCCL are allocated (v1/worker/gpu_worker.py line 541). `total x u` must
be below the memory that is free then.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from appliance.engines.vllm.planning.memory import assumptions as assumed
from appliance.engines.vllm.planning.model.shape import Kind, Shape, dtype_bytes
from appliance.probe import Gpu
from appliance.values import dataclass

MIB = 2**20
UTILIZATION_STEP = 1000  # utilization has three digits: 0.001 of 24 GiB are 25 MiB
# Bytes for each logit of a sampled sequence: 16-bit gathered over ranks, 32-bit, 32-bit sorted with 64-bit indices, and
# 32-bit probabilities (v1/sample/ops/topk_topp_sampler.py).
SAMPLER_BYTES = 2 + 4 + 4 + 8 + 4
GRAPH_SIZES_MAX = 512


@dataclass(frozen=True, kw_only=True)
class Batch:
    """Upper limits of one step."""

    tokens: int  # max_num_batched_tokens
    seqs: int  # max_num_seqs
    drafted: int = 0


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Layout of ranks over GPUs. `layers` has one entry for each pipeline stage. All `nodes` have the same number of
    whole stages."""

    tensor: int = 1
    pipeline: int = 1
    layers: tuple[int, ...] = ()
    nodes: int = 1

    @property
    def ranks(self) -> int:
        return self.tensor * self.pipeline

    @property
    def local_ranks(self) -> int:
        """Number of ranks on each host."""
        return self.ranks // self.nodes


@dataclass(frozen=True, kw_only=True)
class RankMemory:
    """Memory of one rank without its KV cache, MiB."""

    weights: float
    activation: float
    graphs: float
    vision: float
    context: float  # CUDA context, PyTorch's and NCCL's own buffers
    sampling: float = 0.0  # part of `activation`: peak of sampling all sequences at once, above a forward pass

    @property
    def beside_kv(self) -> float:
        return self.weights + self.activation + self.graphs + self.vision + self.context

    @property
    def counted(self) -> float:
        """Memory that vLLM counts as its own: everything allocated after its snapshot."""
        return self.beside_kv - self.context


@dataclass(frozen=True, kw_only=True)
class Reserve:
    """Memory kept free on a GPU: named parts in MiB. A reserve that the user set is a single part."""

    parts: tuple[tuple[str, float], ...]

    @property
    def mib(self) -> float:
        return sum(mib for _, mib in self.parts)

    @property
    def lasting(self) -> tuple[tuple[str, float], ...]:
        """Parts that are kept even if memory was observed in service: vLLM's margin, the display, the user's
        reserve."""
        return tuple((words, mib) for words, mib in self.parts if words in _LASTING)

    @property
    def growth_mib(self) -> float:
        """Memory assumed to be allocated after readiness, MiB."""
        return sum(mib for words, mib in self.parts if words not in _LASTING)

    def describe(self) -> str:
        return " + ".join(f"{mib:,.0f} {words}" for words, mib in self.parts)


def graph_sizes(seqs: int, drafted: int = 0) -> tuple[int, ...]:
    """Return the batch sizes that CUDA graphs are captured for: powers of two, then steps of at most a fifth, and the
    exact sizes of decode steps, up to twice the largest decode step.

    A batch in between is padded to the next size; the engine's own 51 sizes take twice as long to capture.
    """
    largest = min(2 * seqs * (1 + drafted), GRAPH_SIZES_MAX)
    ranges = (range(8, 65, 8), range(80, 129, 16), range(160, 257, 32), range(320, GRAPH_SIZES_MAX + 1, 64))
    sizes = (1, 2, 4, *(size for each in ranges for size in each))
    exact = {(1 + drafted) * count for count in (1, 2, 4, seqs) if count <= seqs}
    return tuple(sorted({size for size in sizes if size <= largest} | {size for size in exact if size <= largest}))


def rank_memory(
    shape: Shape,
    dtype: str,
    batch: Batch,
    layout: Layout,
    *,
    stage: int,
    gpu: Gpu | None,
    graph_mode: str,
    graph_sizes: Sequence[int],
    has_vision: bool,
) -> RankMemory:
    """Return the memory of one rank of a stage. `gpu` is None on the CPU."""
    layers = len(stage_kinds(shape, layout, stage))
    activation = activation_mib(shape, dtype, batch, layout.tensor)
    return RankMemory(
        weights=weights_mib(shape, dtype, layout, stage),
        activation=activation,
        sampling=activation - forward_mib(shape, dtype, batch, layout.tensor),
        graphs=0.0 if gpu is None else graphs_mib(layers, graph_sizes, graph_mode),
        vision=assumed.VISION_MIB.value if has_vision and shape.has_vision else 0.0,
        context=0.0 if gpu is None else context_mib(gpu, layout.ranks),
    )


def stage_kinds(shape: Shape, layout: Layout, stage: int) -> tuple[Kind, ...]:
    """Return the kinds of the layers of one stage. Draft layers are on the last stage."""
    if not layout.layers:
        return shape.kinds
    first, count = sum(layout.layers[:stage]), layout.layers[stage]
    return shape.kinds[first:] if stage == layout.pipeline - 1 else shape.kinds[first : first + count]


def weights_mib(shape: Shape, dtype: str, layout: Layout, stage: int) -> float:
    """Return the weights of one rank of a stage, MiB. Matrices are divided over the ranks of a layer.

    The first stage also has the embedding and the last one the output. If the output is tied to the embedding, the last
    stage has a second copy of the embedding.
    """
    whole = shape.weights_bytes(dtype) / MIB
    if layout.pipeline == 1:
        return whole / layout.tensor
    first, last = ends_mib(shape, dtype)
    tied = shape.loaded(shape.tied_bytes, dtype) / MIB
    share = len(stage_kinds(shape, layout, stage)) / shape.layers
    found = (whole - first - last + tied) * share + first * (stage == 0) + last * (stage == layout.pipeline - 1)
    return found / layout.tensor


def ends_mib(shape: Shape, dtype: str) -> tuple[float, float]:
    """Return the MiB of the embedding, on the first pipeline stage, and of the output, on the last."""
    return shape.loaded(shape.embedding_bytes, dtype) / MIB, shape.loaded(shape.output_bytes, dtype) / MIB


def activation_mib(shape: Shape, dtype: str, batch: Batch, tensor: int = 1) -> float:
    """Return the peak of one step with a full batch, MiB: the larger one of forward pass and sampler."""
    sampler = batch.seqs * (1 + batch.drafted) * shape.vocabulary * SAMPLER_BYTES
    return max(forward_mib(shape, dtype, batch, tensor), sampler * assumed.ACTIVATION_SHARE.value / MIB)


def forward_mib(shape: Shape, dtype: str, batch: Batch, tensor: int = 1) -> float:
    """Return the peak of a forward pass, MiB: the tensors that exist at once in the widest part of a layer.

    Dense: residual, its norm, gate, up and their product. Experts: gathered inputs and both products for each token and
    expert. Attention: query, key, value and output.
    """
    size, width = dtype_bytes(dtype), shape.width
    always = 3 * width  # residual, hidden states and their norm
    attention = (2 * shape.heads + 2 * shape.kv_heads) * max(shape.key_length, 1) // tensor
    dense = 3 * max(shape.feed_forward, shape.shared_length) // tensor
    routed = shape.experts_used * (max(2 * shape.expert_length // tensor, width) + shape.expert_length // tensor)
    linear = 0
    if shape.linear:
        state = shape.linear
        linear = (4 * state.key_heads * state.key_length + 6 * state.value_heads * state.value_length) // tensor
    widest = max(attention, dense, routed, linear)
    return batch.tokens * (always + widest) * size * assumed.ACTIVATION_SHARE.value / MIB


def graphs_mib(layers: int, sizes: Sequence[int], mode: str) -> float:
    """Return the memory of captured CUDA graphs, MiB: a fixed part, and a part for each size and layer. 0 without
    sizes. FULL_AND_PIECEWISE captures two modes."""
    if not sizes:
        return 0.0
    each = assumed.GRAPH_MIB_LAYER.value * layers
    modes = 1 + assumed.GRAPH_FULL_SHARE.value * (mode == "FULL_AND_PIECEWISE")
    return assumed.GRAPH_FIRST_MIB.value + each * modes * len(sizes)


def context_mib(gpu: Gpu, ranks: int) -> float:
    own = gpu.sm_count * assumed.CONTEXT_MIB_EACH.value if gpu.sm_count else assumed.CONTEXT_MIB.value
    return own + assumed.TORCH_MIB.value + (assumed.NCCL_MIB.value if ranks > 1 else 0.0)


_MARGIN, _DISPLAY, _ASKED = "vLLM's own margin", "display", "asked for"
_LASTING = frozenset({_MARGIN, _DISPLAY, _ASKED})


def reserve_of(gpu: Gpu, total_mib: float, *, asked_mib: int | None, compiles_late: bool, drafts: bool) -> Reserve:
    """Return the reserve of one GPU. `asked_mib`, if given, is the whole reserve."""
    if asked_mib is not None:
        return Reserve(parts=((_ASKED, float(asked_mib)),))
    parts = [(_MARGIN, assumed.REDUNDANCY_MIB.value), ("driver", assumed.DRIVER_MIB.value)]
    parts.append(("workspaces", total_mib * assumed.WORKSPACE_SHARE.value))
    if compiles_late:
        parts.append(("kernels compiled at the first request", assumed.JIT_MIB.value))
    if drafts:
        parts.append(("multi-token prediction", assumed.DRAFT_MIB.value))
    if compiles_late:
        least = total_mib * assumed.LEFT_FREE_SHARE.value
        parts.append(("fragments, as the fullest published run left", max(0.0, least - sum(mib for _, mib in parts))))
    if gpu.display:
        parts.append((_DISPLAY, assumed.DISPLAY_MIB.value))
    return Reserve(parts=tuple(parts))


def utilization(total_mib: float, room_mib: float) -> float:
    """Return the share of the GPU's total memory that equals the room, rounded down so that vLLM asks for no more than
    is free. 0.0 if there is no room."""
    return max(0, math.floor(room_mib / total_mib * UTILIZATION_STEP)) / UTILIZATION_STEP


def kv_bytes_at(total_mib: float, share: float, memory: RankMemory) -> int:
    """Return the bytes that vLLM will find left for the cache with this utilization."""
    return max(0, int((total_mib * share - memory.counted) * MIB))
