"""What one rank of vLLM takes of a GPU, MiB: weights, the profiled peak of a forward pass, CUDA graphs, the rest.

`KV = min(free, total x u) - weights - context and NCCL - activation peak - graphs - reserve`. vLLM 0.33.0 takes a
snapshot once the context and NCCL are there (v1/worker/gpu_worker.py line 541), so `total x u` has to lie below what is
free then.
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
# Of a sampled sequence's logits: half precision gathered over ranks, in 32 bits, sorted with their 64-bit places, and
# probabilities (v1/sample/ops/topk_topp_sampler.py).
SAMPLER_BYTES = 2 + 4 + 4 + 8 + 4
GRAPH_SIZES_MAX = 512


@dataclass(frozen=True, kw_only=True)
class Batch:
    """Of one step."""

    tokens: int  # max_num_batched_tokens
    seqs: int  # max_num_seqs
    drafted: int = 0


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Of ranks over cards. `layers` has one entry a pipeline stage. Each of the `nodes` has as many whole stages."""

    tensor: int = 1
    pipeline: int = 1
    layers: tuple[int, ...] = ()
    nodes: int = 1

    @property
    def ranks(self) -> int:
        return self.tensor * self.pipeline

    @property
    def local_ranks(self) -> int:
        """Of one host."""
        return self.ranks // self.nodes


@dataclass(frozen=True, kw_only=True)
class RankMemory:
    """MiB of one rank without its KV cache."""

    weights: float
    activation: float
    graphs: float
    vision: float
    context: float  # CUDA context, PyTorch's and NCCL's own
    sampling: float = 0.0  # of the activations: where all sequences are sampled at once, beyond a forward pass

    @property
    def beside_kv(self) -> float:
        return self.weights + self.activation + self.graphs + self.vision + self.context

    @property
    def counted(self) -> float:
        """By vLLM as its own: all that comes after its snapshot."""
        return self.beside_kv - self.context


@dataclass(frozen=True, kw_only=True)
class Reserve:
    """MiB that nobody plans with, part by part in words. One that was asked for is the whole of it."""

    parts: tuple[tuple[str, float], ...]

    @property
    def mib(self) -> float:
        return sum(mib for _, mib in self.parts)

    @property
    def lasting(self) -> tuple[tuple[str, float], ...]:
        """Parts that stay whatever was seen in service: room for what it was not yet, and for others on the card."""
        return tuple((words, mib) for words, mib in self.parts if words in _LASTING)

    @property
    def growth_mib(self) -> float:
        """Assumed to be allocated after readiness."""
        return sum(mib for words, mib in self.parts if words not in _LASTING)

    def describe(self) -> str:
        return " + ".join(f"{mib:,.0f} {words}" for words, mib in self.parts)


def graph_sizes(seqs: int, drafted: int = 0) -> tuple[int, ...]:
    """Batches that graphs are captured for: those of decode steps, in powers of two, then in steps of at most a fifth.
    A batch in between is padded to the next one; the engine's own 51 sizes take twice as long to capture."""
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
    """Of a rank of one stage. `gpu` None: the host."""
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
    """Layers of one stage; those that draft are on the last."""
    if not layout.layers:
        return shape.kinds
    first, count = sum(layout.layers[:stage]), layout.layers[stage]
    return shape.kinds[first:] if stage == layout.pipeline - 1 else shape.kinds[first : first + count]


def weights_mib(shape: Shape, dtype: str, layout: Layout, stage: int) -> float:
    """Matrices are divided over ranks. A stage has its layers, the first the embedding as well and the last the output,
    which of a tied model is the embedding once more."""
    whole = shape.weights_bytes(dtype) / MIB
    if layout.pipeline == 1:
        return whole / layout.tensor
    first, last = ends_mib(shape, dtype)
    tied = shape.loaded(shape.tied_bytes, dtype) / MIB
    share = len(stage_kinds(shape, layout, stage)) / shape.layers
    found = (whole - first - last + tied) * share + first * (stage == 0) + last * (stage == layout.pipeline - 1)
    return found / layout.tensor


def ends_mib(shape: Shape, dtype: str) -> tuple[float, float]:
    """What the first stage of a pipeline has beside its layers, and the last."""
    return shape.loaded(shape.embedding_bytes, dtype) / MIB, shape.loaded(shape.output_bytes, dtype) / MIB


def activation_mib(shape: Shape, dtype: str, batch: Batch, tensor: int = 1) -> float:
    """Peak of one step over a full batch: in the forward pass, or in the sampler."""
    sampler = batch.seqs * (1 + batch.drafted) * shape.vocabulary * SAMPLER_BYTES
    return max(forward_mib(shape, dtype, batch, tensor), sampler * assumed.ACTIVATION_SHARE.value / MIB)


def forward_mib(shape: Shape, dtype: str, batch: Batch, tensor: int = 1) -> float:
    """What lives at once in the widest part of a layer.

    Dense: residual, its norm, and gate, up and their product. Experts: the gathered inputs and both products of each
    token and expert. Attention: query, key, value and their output.
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
    """`max(first) + per graph x (sizes - 1)` of each mode that is captured; none without sizes."""
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
    """What is kept free of one card; `asked_mib` wins."""
    if asked_mib is not None:
        return Reserve(parts=((_ASKED, float(asked_mib)),))
    parts = [(_MARGIN, assumed.REDUNDANCY_MIB.value), ("driver", assumed.DRIVER_MIB.value)]
    parts.append(("workspaces", total_mib * assumed.WORKSPACE_SHARE.value))
    if gpu.display:
        parts.append((_DISPLAY, assumed.DISPLAY_MIB.value))
    if compiles_late:
        parts.append(("kernels compiled at the first request", assumed.JIT_MIB.value))
    if drafts:
        parts.append(("multi-token prediction", assumed.DRAFT_MIB.value))
    return Reserve(parts=tuple(parts))


def utilization(total_mib: float, room_mib: float) -> float:
    """Of the card's total, rounded down, so that vLLM asks for no more than is free when it looks; 0.0 where nothing
    is."""
    return max(0, math.floor(room_mib / total_mib * UTILIZATION_STEP)) / UTILIZATION_STEP


def kv_bytes_at(total_mib: float, share: float, memory: RankMemory) -> int:
    """What vLLM will find left for the cache under a utilization."""
    return max(0, int((total_mib * share - memory.counted) * MIB))
