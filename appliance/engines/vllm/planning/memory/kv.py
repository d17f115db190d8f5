"""How many blocks a KV cache has and how long a context they carry: vLLM's own arithmetic, in bytes and tokens.

Of vLLM 0.33.0: v1/core/kv_cache_planning.py (groups, bytes of a block, the null block), v1/kv_cache_interface.py
(pages), platforms/interface.py `_align_hybrid_block_size`. All layers of one kind are split into groups of the same
number of layers; a block is one page of every layer of a group, and all groups draw blocks from one pool.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from appliance.engines.vllm.planning.model.shape import Kind, Shape, dtype_bytes
from appliance.values import dataclass

NULL_BLOCKS = 1  # block 0 stands for "nothing": v1/core/block_pool.py
# Groups of kinds that differ by less than this in layers are padded to the larger one.
_PADDED_BELOW = 1.5
_SCALE_BYTES = 4  # of a head and token, for K and for V: triton_attn.py `customize_spec`


@dataclass(frozen=True, kw_only=True)
class KvRequest:
    """What decides the layout of the cache. `in_flight` tokens are scheduled and not yet settled."""

    shape: Shape
    dtype: str
    kv_type: str
    block_size: int  # before hybrids raise it
    tensor_parallel: int = 1
    layers: tuple[Kind, ...] = ()  # of the rank's pipeline stage; empty: all
    in_flight: int = 2048
    drafted: int = 0
    has_prefix_cache: bool = True


@dataclass(frozen=True, kw_only=True)
class Group:
    """`layers` are those that the rank's stage holds of the group with most of them: the others are padded."""

    kind: Kind
    layers: int


@dataclass(frozen=True, kw_only=True)
class KvLayout:
    """Of one rank. `state_bytes` are of a block of linear layers before they are padded to the page."""

    block_size: int
    page_bytes: int
    groups: tuple[Group, ...]
    bytes_per_block: int
    window: int | None
    in_flight: int
    state_blocks: int  # of one request, each group of linear layers

    def blocks_in(self, kv_bytes: int) -> int:
        return max(0, kv_bytes) // self.bytes_per_block

    def blocks_for(self, context: int) -> int:
        """Of one request that fills the context."""
        return sum(self._blocks(group.kind, context) for group in self.groups)

    def longest(self, blocks: int, native: int) -> int:
        """The longest context that one request may have, at most `native`; 0 where not even one token fits."""
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
    """Groups are made of the layers of all stages; a rank has what its stage holds of each. Raises ValueError for a
    number of ranks that the heads cannot be divided by."""
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
    """Beyond the number of heads they are kept on several ranks."""
    return max(1, kv_heads // tensor_parallel)


def token_bytes(request: KvRequest) -> int:
    """Of one token in one layer that attends, on one rank."""
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
    """`_get_kv_cache_groups_uniform_page_size`: as many layers in each as the rarest kind has, unless that pads more
    than the most frequent one takes. Neighbours are dealt to different groups, so that stages are alike."""
    counts = {kind: kinds.count(kind) for kind in dict.fromkeys(kinds)}
    least, most = min(counts.values()), max(counts.values())
    size = most if most < least * _PADDED_BELOW else least
    numbers = {kind: -(-count // size) for kind, count in counts.items()}
    held = max(-(-of_stage.count(kind) // number) for kind, number in numbers.items())
    return [Group(kind=kind, layers=held) for kind, number in numbers.items() for _ in range(number)]
