"""Division of a model over GPUs: tensor parallel as far as heads and quantization groups allow, pipeline stages if that
is not enough. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from appliance.engines.vllm.planning.memory.kv import kv_heads_of_rank
from appliance.engines.vllm.planning.memory.memory import Layout
from appliance.engines.vllm.planning.model.shape import Shape
from appliance.probe import Gpu
from appliance.values import dataclass

RANKS_MAX = 16
_UNEVEN = 1.1  # chosen: stages must reach a tenth more memory to be worth their transfers
# Shared memory of a start with several ranks: one queue to all workers with chunks of VLLM_MQ_MAX_CHUNK_BYTES_MB (16),
# one queue back from each worker with chunks of 24 MiB, ten chunks each (shm_broadcast.py line 500,
# multiproc_executor.py line 165).
_BROADCAST_MIB, _REPLY_MIB = 160, 240
# The CPU build has a worker process even for a single rank. A queue must fit into the free memory when it is made, but
# uses only what is written to it, which is little. 256 MiB were seen to suffice; 64 are refused.
_ONE_WORKER_MIB = 256


def why_not_tensor(shape: Shape, ranks: int) -> str | None:
    """Return why so many ranks cannot share each layer, as a sentence; None if they can."""
    if shape.heads % ranks:
        return f"{shape.heads} attention heads are not divisible by {ranks}"
    if shape.kv_heads % ranks and ranks % shape.kv_heads:
        return f"{shape.kv_heads} KV heads are neither divisible by {ranks} nor the other way round"
    state = shape.linear
    if state and (state.key_heads % ranks or state.value_heads % ranks):
        return f"{state.key_heads} and {state.value_heads} heads of linear attention are not divisible by {ranks}"
    if ranks == 1:
        return None
    for part in _divided(shape, ranks):
        of_rank, rest = divmod(part.length, ranks)
        if rest:
            return f"{part.name} {part.length:,} is not divisible by {ranks}"
        broken = next((words for words, size in part.blocks if of_rank % size), None)
        if broken is not None:
            return f"{part.name} {part.length:,} / {ranks} = {of_rank:,} is not divisible by the {broken}"
    return None


@dataclass(frozen=True, kw_only=True)
class _Part:
    """Length that is divided over ranks. `blocks` are the names and sizes of quantization blocks that must not be
    cut."""

    name: str
    length: int
    blocks: tuple[tuple[str, int], ...]


def _divided(shape: Shape, ranks: int) -> Iterator[_Part]:
    """Yield the lengths that are divided. A matrix divided by its inputs must keep quantization groups whole; one
    divided by its outputs must keep rows of blocks whole.

    Source: vLLM's `validate_fp8_block_shape` (quantization/utils/fp8_utils.py), `verify_marlin_supports_shape`
    (marlin_utils.py).
    """
    stored = shape.quantization
    inputs = ((f"group of {stored.group}", stored.group),) if stored.group else ()
    outputs = ((f"block of {stored.rows} rows", stored.rows),) if stored.rows else ()
    yield _Part(name="intermediate size", length=shape.feed_forward, blocks=inputs + outputs)
    if shape.experts:
        yield _Part(name="intermediate size of experts", length=shape.expert_length, blocks=inputs + outputs)
    yield _Part(name="intermediate size of the shared expert", length=shape.shared_length, blocks=inputs + outputs)
    if stored.covers("self_attn", "o_proj", layers=shape.layers - shape.count("linear")):
        yield _Part(name="output of attention", length=shape.heads * shape.output_length, blocks=inputs)
        yield _Part(name="queries", length=shape.heads * shape.query_length, blocks=outputs)
        if shape.value_length:
            whole = kv_heads_of_rank(shape.kv_heads, ranks) * ranks * shape.key_length
            yield _Part(name="keys", length=whole, blocks=outputs)
    if (state := shape.linear) and stored.covers("linear_attn", layers=shape.count("linear")):
        keys, values = state.key_heads * state.key_length, state.value_heads * state.value_length
        yield _Part(name="values of linear attention", length=values, blocks=inputs + outputs)
        yield _Part(name="keys of linear attention", length=keys, blocks=outputs)


def tensor_sizes(shape: Shape, cards: int) -> tuple[int, ...]:
    """Return the tensor parallel sizes that the model allows, including 1."""
    return tuple(n for n in range(1, min(cards, RANKS_MAX) + 1) if n == 1 or why_not_tensor(shape, n) is None)


def layouts(
    shape: Shape, rooms: Sequence[float], ends: tuple[float, float], *, tensor: int | None, pipeline: int | None
) -> Iterator[Layout]:
    """Yield candidate layouts with one GPU for each rank. `tensor` and `pipeline` are the user's values or None.
    `rooms` are the GPUs' rooms, the largest first; `ends` is as for `staged`.

    A layout has pipeline stages only if the user asked for them, or if they reach more memory than tensor parallel:
    with more GPUs than the model's tensor parallel sizes allow, or with uneven GPUs.
    """
    allowed = tensor_sizes(shape, len(rooms))
    for size in (tensor,) if tensor else allowed:
        for stages in range(1, min(len(rooms) // size, shape.layers) + 1):
            taken = rooms[: size * stages]
            if pipeline and stages != pipeline:
                continue
            if not pipeline and stages > 1 and len(taken) <= max(allowed) and not are_uneven(taken, size):
                continue
            yield staged(shape.layers, taken, ends, tensor=size)


def are_uneven(rooms: Sequence[float], tensor: int) -> bool:
    """True if pipeline stages reach clearly more memory of these GPUs than tensor parallel, where every rank is as
    large as the smallest GPU."""
    by_stage = sum(min(rooms[at : at + tensor]) * tensor for at in range(0, len(rooms), tensor))
    return by_stage > _UNEVEN * len(rooms) * max(1.0, min(rooms))


def staged(layers: int, rooms: Sequence[float], ends: tuple[float, float], *, tensor: int, nodes: int = 1) -> Layout:
    """Return a layout with layers divided by the room of each stage's smallest GPU, MiB. `ends` are the MiB that the
    first and the last stage hold in addition to their layers."""
    stages = len(rooms) // tensor
    if stages == 1:
        return Layout(tensor=tensor, nodes=nodes)
    least = [min(rooms[at : at + tensor]) for at in range(0, len(rooms), tensor)]
    least[0] -= ends[0] / tensor
    least[-1] -= ends[1] / tensor
    found = split_layers(layers, [max(1.0, room) for room in least])
    return Layout(tensor=tensor, pipeline=stages, layers=found, nodes=nodes)


def split_layers(layers: int, rooms: Sequence[float]) -> tuple[int, ...]:
    """Divide layers in proportion to the rooms, at least one for each stage, so that the smallest room per layer is as
    large as possible. Raises ValueError if there are more stages than layers."""
    if layers < len(rooms):
        message = f"{len(rooms)} pipeline stages need as many layers, and the model has {layers}"
        raise ValueError(message)
    found = [1] * len(rooms)
    for _ in range(layers - len(rooms)):
        widest = max(range(len(rooms)), key=lambda at: rooms[at] / (found[at] + 1))
        found[widest] += 1
    return tuple(found)


def choose_cards(cards: Sequence[Gpu], ranks: int) -> tuple[Gpu, ...]:
    """Return the GPUs for tensor parallel: of one kind if there are enough, linked ones first; else those with most
    free memory."""
    kinds: dict[tuple[str | None, str | None, int | None], list[Gpu]] = {}
    for card in cards:
        kinds.setdefault((card.name, card.sm, card.vram_total_mib), []).append(card)
    fitting = [found for found in kinds.values() if len(found) >= ranks]
    if fitting:
        best = max(fitting, key=lambda found: (found[0].bandwidth_gb_s or 0.0, _least_free(found)))
        return _linked(best, ranks)
    return tuple(sorted(cards, key=lambda card: -(card.vram_free_mib or 0))[:ranks])


def _least_free(cards: Sequence[Gpu]) -> int:
    return min(card.vram_free_mib or 0 for card in cards)


def _linked(cards: Sequence[Gpu], ranks: int) -> tuple[Gpu, ...]:
    """Return the GPU with most free memory, then GPUs linked to it by NVLink, then others; each by free memory."""
    order = sorted(cards, key=lambda card: (-(card.vram_free_mib or 0), card.index))
    first = order[0]
    peers = [card for card in order[1:] if card.index in first.nvlink_peers]
    others = [card for card in order[1:] if card.index not in first.nvlink_peers]
    return tuple([first, *peers, *others][:ranks])


def are_linked(cards: Sequence[Gpu]) -> bool:
    """True if each of the GPUs has NVLink to another one of them."""
    indices = {card.index for card in cards}
    return len(cards) > 1 and all(indices & set(card.nvlink_peers) - {card.index} for card in cards)


def shm_needed_mib(ranks: int) -> int:
    """Return the MiB of /dev/shm that ranks on GPUs need; 0 for one rank."""
    return 0 if ranks == 1 else _BROADCAST_MIB + _REPLY_MIB * ranks


def shm_of_workers_mib(ranks: int) -> int:
    """Return the MiB of /dev/shm that ranks of the CPU build need."""
    return _ONE_WORKER_MIB if ranks == 1 else shm_needed_mib(ranks)
