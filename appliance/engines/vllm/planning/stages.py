"""Pipeline stages of one configuration: GPUs, memory of a rank, layout of its KV cache. Pure.

All workers get the same utilization or bytes, and as many blocks as the worker with fewest
(v1/core/kv_cache_utils.py `get_kv_cache_configs`). A stage with fewer layers needs less memory for the same blocks.
"""

from __future__ import annotations

from appliance.engines.gpus import device_id
from appliance.engines.vllm.planning.arguments.launch import EAGER
from appliance.engines.vllm.planning.inputs import Facts, free_mib, total_mib
from appliance.engines.vllm.planning.memory.kv import KvLayout, KvRequest, layout_of
from appliance.engines.vllm.planning.memory.memory import (
    Batch,
    Layout,
    RankMemory,
    Reserve,
    context_mib,
    graph_sizes,
    rank_memory,
    reserve_of,
    stage_kinds,
)
from appliance.probe import Gpu
from appliance.values import dataclass


@dataclass(frozen=True, kw_only=True)
class Option:
    """One configuration, as the tuner varies it. `cards` are in the order of ranks and empty for the CPU. `kv_bytes` is
    the cache of one rank in an earlier start, or None."""

    layout: Layout
    cards: tuple[Gpu, ...]
    kv_type: str
    tokens: int
    seqs: int
    graph_mode: str
    block_size: int | None  # None: the engine's default
    drafted: int = 0
    has_draft_layers: bool = False
    kv_bytes: int | None = None

    @property
    def own_cards(self) -> tuple[Gpu, ...]:
        """GPUs of this host."""
        return self.cards[: self.layout.local_ranks]

    @property
    def stages(self) -> int:
        return self.layout.pipeline

    def cards_of(self, stage: int) -> tuple[Gpu, ...]:
        return self.cards[stage * self.layout.tensor : (stage + 1) * self.layout.tensor]


@dataclass(frozen=True, kw_only=True)
class Stage:
    """One pipeline stage. `memory` and `kv` are those of each of its ranks."""

    cards: tuple[Gpu, ...]
    memory: RankMemory
    kv: KvLayout


def stages_of(facts: Facts, option: Option, sizes: tuple[int, ...]) -> tuple[Stage, ...]:
    """Return the stages of an option. `sizes` are the batch sizes of captured CUDA graphs."""
    return tuple(_stage(facts, option, sizes, at) for at in range(option.stages))


def _stage(facts: Facts, option: Option, sizes: tuple[int, ...], at: int) -> Stage:
    cards = option.cards_of(at)
    memory = rank_memory(
        facts.shape,
        facts.dtype,
        Batch(tokens=option.tokens, seqs=option.seqs, drafted=option.drafted),
        option.layout,
        stage=at,
        gpu=cards[0] if cards else None,
        graph_mode=option.graph_mode,
        graph_sizes=sizes,
        has_vision=not facts.is_text_only,
    )
    return Stage(cards=cards, memory=memory, kv=_kv(facts, option, at))


def _kv(facts: Facts, option: Option, at: int) -> KvLayout:
    return layout_of(
        KvRequest(
            shape=facts.shape,
            dtype=facts.dtype,
            kv_type=option.kv_type,
            block_size=option.block_size or facts.chip.block_size,
            tensor_parallel=option.layout.tensor,
            layers=stage_kinds(facts.shape, option.layout, at),
            # Two steps overlap on GPUs (async scheduling); stages of a pipeline each hold one more.
            in_flight=option.tokens * (option.stages + int(bool(option.cards))),
            drafted=option.drafted,
            has_prefix_cache=facts.has_prefix_cache,
        )
    )


def served_graph_sizes(facts: Facts, option: Option) -> tuple[int, ...]:
    """Return the batch sizes of captured CUDA graphs: the user's, else those of decode steps. Empty without graphs."""
    if option.graph_mode in ("NONE", EAGER) or not option.cards:
        return ()
    return facts.pins.graph_sizes or graph_sizes(option.seqs, option.drafted)


def reserve_on(facts: Facts, card: Gpu, *, drafts: bool = False) -> Reserve:
    asked = facts.settings.reserve_mib if facts.settings.is_set("reserve_mib") else None
    late = facts.chip.sm is not None and facts.chip.sm < 80
    return reserve_of(card, total_mib(card, facts.hardware), asked_mib=asked, compiles_late=late, drafts=drafts)


def room_on(facts: Facts, card: Gpu, ranks: int, *, drafts: bool = False) -> float:
    """Return the memory on a GPU for a rank's buffers, MiB: free memory minus CUDA context and reserve."""
    left = free_mib(card, facts.hardware) - context_mib(card, ranks)
    return min(left, facts.limits.free_of(device_id(card))) - reserve_on(facts, card, drafts=drafts).mib
