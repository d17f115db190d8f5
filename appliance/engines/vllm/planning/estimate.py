"""One configuration with what it takes and gives: memory of each rank, blocks, context and speed. Pure."""

from __future__ import annotations

import math
from functools import cached_property

from appliance.engines.vllm.planning import assumptions as assumed
from appliance.engines.vllm.planning.inputs import Facts, free_mib, total_mib
from appliance.engines.vllm.planning.kv import KvLayout, KvRequest, layout_of
from appliance.engines.vllm.planning.launch import EAGER
from appliance.engines.vllm.planning.memory import (
    MIB,
    Batch,
    Layout,
    RankMemory,
    Reserve,
    kv_bytes_at,
    rank_memory,
    reserve_of,
    utilization,
)
from appliance.plan import CONTEXT_STEP
from appliance.probe import Gpu
from appliance.values import dataclass


@dataclass(frozen=True, kw_only=True)
class Option:
    """What the tuner varies. `cards` are in the order of ranks, empty for the CPU; `kv_bytes` of one rank, from an
    earlier start."""

    layout: Layout
    cards: tuple[Gpu, ...]
    kv_type: str
    tokens: int
    seqs: int
    graph_mode: str
    block_size: int | None  # None: the engine's own
    drafted: int = 0
    has_draft_layers: bool = False
    kv_bytes: int | None = None

    @property
    def own_cards(self) -> tuple[Gpu, ...]:
        """Of this host."""
        return self.cards[: self.layout.local_ranks]

    @property
    def batch(self) -> Batch:
        return Batch(tokens=self.tokens, seqs=self.seqs, drafted=self.drafted)


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """`share` is the utilization of a first start; None where bytes are given."""

    facts: Facts
    option: Option

    @cached_property
    def memory(self) -> RankMemory:
        """Of the rank on the first card: the others differ in their context only."""
        return self._memory_on(self.option.cards[0] if self.option.cards else None)

    def _memory_on(self, gpu: Gpu | None) -> RankMemory:
        facts, option = self.facts, self.option
        return rank_memory(
            facts.shape,
            facts.dtype,
            option.batch,
            option.layout,
            gpu=gpu,
            graph_mode="NONE" if option.graph_mode == EAGER else option.graph_mode,
            has_vision=not facts.is_text_only,
        )

    @cached_property
    def kv(self) -> KvLayout:
        facts, option = self.facts, self.option
        is_gpu = bool(option.cards)
        return layout_of(
            KvRequest(
                shape=facts.shape,
                dtype=facts.dtype,
                kv_type=option.kv_type,
                block_size=option.block_size or facts.chip.block_size,
                tensor_parallel=option.layout.tensor,
                layers=facts.shape.kinds[: max(option.layout.layers)] if option.layout.layers else (),
                # Two steps overlap on GPUs (async scheduling); stages of a pipeline each hold one more.
                in_flight=option.tokens * (option.layout.pipeline + int(is_gpu)),
                drafted=option.drafted,
                has_prefix_cache=facts.has_prefix_cache,
            )
        )

    @cached_property
    def reserves(self) -> tuple[Reserve, ...]:
        """Of each card."""
        facts = self.facts
        asked = facts.settings.reserve_mib if facts.settings.is_set("reserve_mib") else None
        late = facts.chip.sm is not None and facts.chip.sm < 80
        return tuple(
            reserve_of(
                gpu,
                total_mib(gpu, facts.hardware),
                asked_mib=asked,
                compiles_late=late,
                drafts=self.option.has_draft_layers,
            )
            for gpu in self.option.cards
        )

    @cached_property
    def share(self) -> float | None:
        """Of each whole card, for a first start; None where bytes are given."""
        is_given = self.kv_asked is not None or math.isfinite(self.facts.limits.kv_mib)
        return None if is_given or not self.option.cards else self._share_of_cards

    @cached_property
    def _share_of_cards(self) -> float:
        """The smallest decides."""
        if self.facts.pins.utilization is not None:
            return self.facts.pins.utilization
        hardware = self.facts.hardware
        return min(
            utilization(total_mib(gpu, hardware), free_mib(gpu, hardware), self._context(gpu), reserve.mib)
            for gpu, reserve in zip(self.option.cards, self.reserves, strict=True)
        )

    @property
    def kv_asked(self) -> int | None:
        """Bytes of one rank that the user or an earlier start decided."""
        return self.facts.pins.kv_bytes or self.option.kv_bytes

    @cached_property
    def kv_bytes(self) -> int:
        """Of one rank: what it is given, or what vLLM will find left."""
        most = self.facts.limits.kv_mib * MIB
        if self.kv_asked is not None:
            return int(min(self.kv_asked, most))
        if not self.option.cards:
            return int(min(self._kv_of_host(), most))
        totals = [total_mib(gpu, self.facts.hardware) for gpu in self.option.cards]
        found = min(kv_bytes_at(total, self._share_of_cards, self.memory) for total in totals)
        return int(min(found, most))

    def _kv_of_host(self) -> int:
        """No more than all requests fill at the wanted context: the rest stays for files and other programs."""
        room = max(0.0, self.host_room_mib) * MIB / self.option.layout.local_ranks
        enough = self.kv.bytes_for(self.facts.wanted, self.option.seqs)
        whole = int(min(room, enough)) // self.kv.bytes_per_block
        return whole * self.kv.bytes_per_block

    @property
    def host_room_mib(self) -> float:
        """Of host memory, for the caches of all ranks of the CPU build."""
        ranks = self.option.layout.local_ranks
        return self.host_usable_mib - self.host_overhead_mib - self.memory.beside_kv * ranks

    @property
    def host_usable_mib(self) -> float:
        return self.facts.hardware.memory.usable_mib * (1 - assumed.HOST_SPARE_SHARE.value)

    @property
    def host_overhead_mib(self) -> float:
        """API server, EngineCore and workers of this host; one card that is alone is served inside EngineCore."""
        ranks = self.option.layout.local_ranks
        workers = 0 if self.option.cards and self.option.layout.ranks == 1 else ranks
        pinned = assumed.PINNED_MIB.value * ranks if self.option.cards else 0.0
        return (2 + workers) * assumed.PROCESS_MIB.value + assumed.APPLIANCE_MIB.value + pinned

    @cached_property
    def blocks(self) -> int:
        return self.kv.blocks_in(self.kv_bytes)

    @property
    def sure_blocks(self) -> int:
        """Before vLLM has measured, a context that nobody asked for counts on a little less than is computed: one block
        too few and the engine refuses to start."""
        if self.share is None or self.facts.settings.ctx_size:
            return self.blocks
        unsure = self.memory.counted * assumed.UNSURE_SHARE.value
        return self.kv.blocks_in(self.kv_bytes - int(unsure * MIB))

    @cached_property
    def context(self) -> int:
        """The longest that one request may have, at most the wanted one; in whole steps below it."""
        found = self.kv.longest(self.sure_blocks, self.facts.wanted)
        found = int(min(found, self.facts.limits.context))
        return found if found == self.facts.wanted else found - found % CONTEXT_STEP if found > CONTEXT_STEP else found

    @property
    def room_mib(self) -> tuple[float, ...]:
        """Of each card, what a rank's buffers may take, its context and the reserve taken off."""
        hardware = self.facts.hardware
        return tuple(
            free_mib(gpu, hardware) - self._context(gpu) - reserve.mib
            for gpu, reserve in zip(self.option.cards, self.reserves, strict=True)
        )

    @property
    def fits(self) -> bool:
        """With the cache that was asked for, or any that holds the smallest context."""
        least = self.facts.settings.ctx_size or min(self.facts.wanted, CONTEXT_STEP)
        if self.context < least:
            return False
        if not self.option.cards:
            return self.kv_bytes <= self.host_room_mib * MIB / self.option.layout.local_ranks + 1
        taken = self.memory.counted + self.kv_bytes / MIB
        return all(taken <= room + self._rounding for room in self.room_mib) or self.facts.pins.utilization is not None

    @property
    def _rounding(self) -> float:
        return 1 / MIB

    @property
    def missing_mib(self) -> float:
        """That one rank lacks for the smallest context; below 0 where it has room."""
        least = self.facts.settings.ctx_size or min(self.facts.wanted, CONTEXT_STEP)
        needed = self.memory.counted + self.kv.bytes_for(least) / MIB
        if not self.option.cards:
            ranks = self.option.layout.local_ranks
            return needed * ranks + self.host_overhead_mib - self.host_usable_mib
        pinned = self.facts.pins.utilization
        if pinned is not None:
            return needed - min(pinned * total_mib(gpu, self.facts.hardware) for gpu in self.option.cards)
        return needed - min(self.room_mib)

    def _context(self, gpu: Gpu) -> float:
        return self._memory_on(gpu).context

    @property
    def graph_sizes(self) -> tuple[int, ...]:
        if self.option.graph_mode in ("NONE", EAGER) or not self.option.cards:
            return ()
        return self.facts.pins.graph_sizes or self.option.batch.graph_sizes

    @property
    def concurrency(self) -> float:
        """How many requests fill their context at the same time."""
        needed = self.kv.blocks_for(max(1, self.context))
        return math.floor(10 * self.blocks / needed) / 10
