"""Blocks of a KV cache and the context length that they hold: vLLM's own arithmetic, in bytes and tokens.

Source, vLLM 0.33.0: v1/core/kv_cache_planning.py (groups, bytes of a block, the null block), v1/kv_cache_interface.py
(pages), platforms/interface.py `_align_hybrid_block_size`. All layers of one kind are split into groups of the same
number of layers. A block is one page of every layer of a group, and all groups take blocks from one pool.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from appliance.engines.vllm.planning.model.shape import Kind, Shape, dtype_bytes
from appliance.values import dataclass

NULL_BLOCKS = 1  # block 0 is a placeholder that holds no tokens: v1/core/block_pool.py
# If the numbers of layers of the kinds differ by less than this factor, all groups are padded to the larger one.
_PADDED_BELOW = 1.5
_SCALE_BYTES = 4  # for each head and token, once for K and once for V: triton_attn.py `customize_spec`


@dataclass(frozen=True, kw_only=True)
class KvRequest:
    """Everything that decides the layout of the cache. `in_flight` is the number of tokens scheduled and not
    finished."""

    shape: Shape
    dtype: str
    kv_type: str
    block_size: int  # before vLLM raises it for hybrid models
    tensor_parallel: int = 1
    layers: tuple[Kind, ...] = ()  # of the rank's pipeline stage; empty: all layers
    in_flight: int = 2048
    drafted: int = 0
    has_prefix_cache: bool = True


@dataclass(frozen=True, kw_only=True)
class Group:
    """Group of layers that share blocks. `layers` is the number that the rank's stage holds of the largest group;
    smaller groups are padded to it."""

    kind: Kind
    layers: int


@dataclass(frozen=True, kw_only=True)
class KvLayout:
    """Layout of the cache on one rank."""

    block_size: int
    page_bytes: int
    groups: tuple[Group, ...]
    bytes_per_block: int
    window: int | None
    in_flight: int
    state_blocks: int  # for one request in each group of linear layers

    def blocks_in(self, kv_bytes: int) -> int:
        return max(0, kv_bytes) // self.bytes_per_block

    def blocks_for(self, context: int) -> int:
        """Return the number of blocks of one request that fills the context."""
        return sum(self._blocks(group.kind, context) for group in self.groups)

    def longest(self, blocks: int, native: int) -> int:
        """Return the longest context of one request, at most `native`; 0 if not even one token fits."""
        usable = blocks - NULL_BLOCKS
        if self.blocks_for(1) > usable:
            return 0
        low, high = 1, native
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if self.blocks_for(middle) <= usable else (low, middle - 1)
        return low

    def bytes_for(self, context: int, requests: int = 1) -> int:
        return (requests * self.blocks_for(context) + NULL_BLOCKS) * self.bytes_per_block

    def _blocks(self, kind: Kind, context: int) -> int:
        if kind == "linear":
            return self.state_blocks
        if kind == "sliding" and self.window:
            return -(-min(self.window - 1 + self.in_flight, context) // self.block_size) + 1
        return -(-context // self.block_size)


def layout_of(request: KvRequest) -> KvLayout:
    """Return the layout of the cache on one rank. Groups are made from the layers of all stages; a rank holds its
    stage's part of each group."""
    shape = request.shape
    token = token_bytes(request)
    block_size, page = request.block_size, request.block_size * token
    if shape.linear and shape.is_hybrid:
        state = shape.linear.bytes_of_rank(request.tensor_parallel, dtype_bytes(request.dtype), request.drafted)
        block_size = max(block_size, block_size * -(-state // (block_size * token)))
        page = block_size * token
    groups = tuple(_groups(shape.kinds, request.layers or shape.kinds))
    return KvLayout(
        block_size=block_size,
        page_bytes=page,
        groups=groups,
        bytes_per_block=page * groups[0].layers,
        window=shape.window,
        in_flight=request.in_flight,
        state_blocks=(2 if request.has_prefix_cache else 1) + request.drafted,
    )


def kv_heads_of_rank(kv_heads: int, tensor_parallel: int) -> int:
    """Return the number of KV heads on one rank, at least 1: if there are more ranks than heads, each head is
    replicated on several ranks."""
    return max(1, kv_heads // tensor_parallel)


def token_bytes(request: KvRequest) -> int:
    """Return the cache bytes of one token in one attention layer on one rank."""
    shape = request.shape
    heads = 1 if not shape.value_length else kv_heads_of_rank(shape.kv_heads, request.tensor_parallel)
    elements = shape.key_length + shape.value_length
    if request.kv_type.endswith("_per_token_head"):
        packed = elements // 2 if request.kv_type.startswith("int4") else elements
        return heads * (packed + (2 if shape.value_length else 1) * _SCALE_BYTES)
    return math.ceil(heads * elements * _type_bytes(request.kv_type, request.dtype))


def _type_bytes(kv_type: str, dtype: str) -> float:
    if kv_type.startswith("fp8"):
        return 1.0
    if kv_type.startswith("nvfp4"):
        return 0.5 + 1 / 16  # a scale of one byte for 16 values
    return dtype_bytes({"f16": "float16", "bf16": "bfloat16"}.get(kv_type, dtype))


def _groups(kinds: Sequence[Kind], of_stage: Sequence[Kind]) -> list[Group]:
    """Return the groups, as vLLM's `_get_kv_cache_groups_uniform_page_size` makes them.

    A group has as many layers as the rarest kind. If all kinds have nearly the same number, it has as many as the most
    frequent one. Neighbouring layers go to different groups, so that all stages are alike.
    """
    counts = {kind: kinds.count(kind) for kind in dict.fromkeys(kinds)}
    least, most = min(counts.values()), max(counts.values())
    size = most if most < least * _PADDED_BELOW else least
    numbers = {kind: -(-count // size) for kind, count in counts.items()}
    held = max(-(-of_stage.count(kind) // number) for kind, number in numbers.items())
    return [Group(kind=kind, layers=held) for kind, number in numbers.items() for _ in range(number)]
