"""One configuration with what it takes and gives: memory of each rank, blocks, context and speed. Pure."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import cached_property

from appliance.engines.vllm.planning.inputs import Facts, total_mib
from appliance.engines.vllm.planning.memory import assumptions as assumed
from appliance.engines.vllm.planning.memory.kv import NULL_BLOCKS, KvLayout
from appliance.engines.vllm.planning.memory.memory import MIB, RankMemory, Reserve, kv_bytes_at, utilization
from appliance.engines.vllm.planning.memory.parallel import are_uneven
from appliance.engines.vllm.planning.observed_memory import beyond_estimate, corrected, is_decided, resized
from appliance.engines.vllm.planning.stages import (
    Option,
    Stage,
    reserve_on,
    room_on,
    served_graph_sizes,
    stages_of,
)
from appliance.plan import CONTEXT_STEP
from appliance.values import dataclass


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """`share` is the utilization of a first start; None where bytes are given."""

    facts: Facts
    option: Option

    @cached_property
    def _estimated(self) -> tuple[Stage, ...]:
        return stages_of(self.facts, self.option, self.graph_sizes)

    @cached_property
    def stages(self) -> tuple[Stage, ...]:
        """As they were seen to be in service, else as estimated."""
        if self.seen_mib is None:
            return self._estimated
        pairs = zip(self._estimated, self.seen_mib, strict=True)
        return tuple(replace(stage, memory=corrected(stage.memory, mib)) for stage, mib in pairs)

    @cached_property
    def seen_mib(self) -> tuple[float, ...] | None:
        """Of each stage, what an earlier start held of a card beyond the estimate. None where it decides nothing."""
        return None if is_decided(self.facts) else self.seen_beyond_mib

    @property
    def seen_beyond_mib(self) -> tuple[float, ...] | None:
        """The same, also where it was decided otherwise."""
        return beyond_estimate(self.facts, self.option, self._estimated)

    @cached_property
    def largest(self) -> Stage:
        """Which takes most for a block: bytes of a cache are counted by it."""
        return max(self.stages, key=lambda stage: (stage.kv.bytes_per_block, stage.memory.weights))

    @property
    def memory(self) -> RankMemory:
        return self.largest.memory

    @property
    def kv(self) -> KvLayout:
        return self.largest.kv

    def stage_of(self, rank: int) -> Stage:
        return self.stages[rank // self.option.layout.tensor]

    def kv_mib_of(self, stage: Stage) -> float:
        """That one of its ranks takes."""
        return self.kv_bytes / MIB * self._part(stage)

    def _part(self, stage: Stage) -> float:
        return stage.kv.bytes_per_block / self.kv.bytes_per_block

    @cached_property
    def reserves(self) -> tuple[Reserve, ...]:
        """Of each card."""
        if self.seen_mib is None:
            return self._assumed_reserves
        seen = (self.seen_mib[at // self.option.layout.tensor] for at in range(len(self.option.cards)))
        pairs = zip(self._assumed_reserves, seen, strict=True)
        return tuple(resized(reserve, mib) for reserve, mib in pairs)

    @cached_property
    def _assumed_reserves(self) -> tuple[Reserve, ...]:
        drafts = self.option.has_draft_layers
        return tuple(reserve_on(self.facts, card, drafts=drafts) for card in self.option.cards)

    @cached_property
    def share(self) -> float | None:
        """Of each whole card, for a first start; None where bytes are given."""
        is_given = self.kv_asked is not None or self.seen_mib is not None or math.isfinite(self.facts.limits.kv_mib)
        return None if is_given or not self.option.cards or self.fills_uneven else self._share_of_cards

    @cached_property
    def fills_uneven(self) -> bool:
        """Whether stages are on cards with unlike room: one share of each would leave the larger ones unused."""
        is_asked = self.facts.pins.utilization is not None
        return self.option.stages > 1 and not is_asked and are_uneven(self.room_mib, self.option.layout.tensor)

    @property
    def share_asked(self) -> float | None:
        """What the engine is told beside bytes, too: it refuses to start where less is free, whatever decides of its
        cache (v1/worker/utils.py `request_memory`, whose default is 0.92)."""
        return self._share_of_cards if self.option.cards else None

    @cached_property
    def _share_of_cards(self) -> float:
        """The smallest decides. Of what is assumed too, where more room was seen: beside bytes it decides nothing but
        whether the engine starts, and it must not refuse to for a context that is larger than the estimate."""
        if self.facts.pins.utilization is not None:
            return self.facts.pins.utilization
        hardware = self.facts.hardware
        return min(
            utilization(total_mib(gpu, hardware), min(rooms))
            for gpu, *rooms in zip(self.option.cards, self.room_mib, self._assumed_room_mib, strict=True)
        )

    @property
    def kv_asked(self) -> int | None:
        """Bytes of one rank that the user or an earlier start decided; what was seen in service counts for more than
        what that start was left with."""
        return self.facts.pins.kv_bytes or (self.option.kv_bytes if self.seen_mib is None else None)

    @cached_property
    def kv_bytes(self) -> int:
        """Of a rank of the largest stage: what it is given, or what vLLM will find left."""
        most = self.facts.limits.kv_mib * MIB
        if self.kv_asked is not None:
            return int(min(self.kv_asked, most))
        if not self.option.cards:
            return int(min(self._kv_of_host(), most))
        # What nobody measures at the start has to be enough from the beginning.
        is_unsure = self.fills_uneven and self.seen_mib is None
        return int(min(self._kv_found(assumed.UNSURE_SHARE.value if is_unsure else 0.0), most))

    def _kv_found(self, unsure: float) -> float:
        """Of the stage with fewest blocks, as bytes of the largest, less a share of what vLLM counts as its own."""
        found = min(
            (self._kv_left(stage) - int(stage.memory.counted * unsure * MIB)) / self._part(stage)
            for stage in self.stages
        )
        return max(0.0, found)

    def _kv_left(self, stage: Stage) -> int:
        if self.fills_uneven or self.seen_mib is not None:
            return int((self._room_of(stage) - stage.memory.counted) * MIB)
        totals = [total_mib(card, self.facts.hardware) for card in stage.cards]
        return min(kv_bytes_at(total, self._share_of_cards, stage.memory) for total in totals)

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
        usable = min(self.facts.hardware.memory.usable_mib, self.facts.given.host_mib_max)
        return usable * (1 - assumed.HOST_SPARE_SHARE.value)

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
        return self.kv.blocks_in(int(self._kv_found(assumed.UNSURE_SHARE.value)))

    @cached_property
    def context(self) -> int:
        """The longest that one request may have, at most the wanted one; in whole steps below it."""
        found = self.kv.longest(self.sure_blocks, self.facts.wanted)
        found = int(min(found, self.facts.limits.context))
        return found if found == self.facts.wanted else found - found % CONTEXT_STEP if found > CONTEXT_STEP else found

    @cached_property
    def room_mib(self) -> tuple[float, ...]:
        """Of each card, what a rank's buffers may take, its context and the reserve taken off."""
        triples = zip(self._assumed_room_mib, self._assumed_reserves, self.reserves, strict=True)
        return tuple(room + before.mib - now.mib for room, before, now in triples)

    @cached_property
    def _assumed_room_mib(self) -> tuple[float, ...]:
        ranks, drafts = self.option.layout.ranks, self.option.has_draft_layers
        return tuple(room_on(self.facts, card, ranks, drafts=drafts) for card in self.option.cards)

    @property
    def fits(self) -> bool:
        """With the cache that was asked for, or any that holds the smallest context."""
        least = self.facts.settings.ctx_size or min(self.facts.wanted, CONTEXT_STEP)
        if self.context < least:
            return False
        if not self.option.cards:
            return self.kv_bytes <= self.host_room_mib * MIB / self.option.layout.local_ranks + 1
        if self.facts.pins.utilization is not None:
            return True
        taken = [stage.memory.counted + self.kv_mib_of(stage) for stage in self.stages]
        ranks = self.option.layout.tensor
        return all(taken[at // ranks] <= room + self._rounding for at, room in enumerate(self.room_mib))

    @property
    def _rounding(self) -> float:
        return 1 / MIB

    @property
    def missing_mib(self) -> float:
        """That one rank lacks for the smallest context; below 0 where it has room."""
        if not self.option.cards:
            needed, ranks = self.needed_mib(self.largest), self.option.layout.local_ranks
            return needed * ranks + self.host_overhead_mib - self.host_usable_mib
        return self.needed_mib(self.tightest) - self._room_of(self.tightest)

    @cached_property
    def tightest(self) -> Stage:
        """Which lacks most."""
        if not self.option.cards:
            return self.largest
        return max(self.stages, key=lambda stage: self.needed_mib(stage) - self._room_of(stage))

    def needed_mib(self, stage: Stage) -> float:
        """Of a rank, for the smallest context."""
        least = self.facts.settings.ctx_size or min(self.facts.wanted, CONTEXT_STEP)
        return stage.memory.counted + stage.kv.bytes_for(least) / MIB

    def _room_of(self, stage: Stage) -> float:
        pinned, hardware = self.facts.pins.utilization, self.facts.hardware
        if pinned is not None:
            return min(pinned * total_mib(card, hardware) for card in stage.cards)
        rooms = zip(self.option.cards, self.room_mib, strict=True)
        return min(room for card, room in rooms if card in stage.cards)

    @property
    def graph_sizes(self) -> tuple[int, ...]:
        return served_graph_sizes(self.facts, self.option)

    def requests_of(self, tokens: int) -> int:
        """How many requests of so many tokens the cache holds at the same time."""
        return (self.blocks - NULL_BLOCKS) // self.kv.blocks_for(max(1, min(tokens, self.context)))

    @property
    def concurrency(self) -> float:
        """How many requests fill their context at the same time."""
        needed = self.kv.blocks_for(max(1, self.context))
        return math.floor(10 * self.blocks / needed) / 10
