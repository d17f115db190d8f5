"""Estimate for one configuration: memory of each rank, KV blocks, context length. Pure."""

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
    """Estimate for one option under the facts of a start. Values are computed when first read."""

    facts: Facts
    option: Option

    @cached_property
    def _estimated(self) -> tuple[Stage, ...]:
        return stages_of(self.facts, self.option, self.graph_sizes)

    @cached_property
    def stages(self) -> tuple[Stage, ...]:
        """Pipeline stages. Their memory is corrected by what an earlier start held, if that is used; else estimated."""
        if self.seen_mib is None:
            return self._estimated
        pairs = zip(self._estimated, self.seen_mib, strict=True)
        return tuple(replace(stage, memory=corrected(stage.memory, mib)) for stage, mib in pairs)

    @cached_property
    def seen_mib(self) -> tuple[float, ...] | None:
        """GPU memory of each stage that an earlier start held beyond the estimate, MiB. None if it is unknown or not
        used, see `is_decided`."""
        return None if is_decided(self.facts) else self.seen_beyond_mib

    @property
    def seen_beyond_mib(self) -> tuple[float, ...] | None:
        """Observed memory of each stage beyond the estimate, MiB, even if the user fixed the size. None if unknown."""
        return beyond_estimate(self.facts, self.option, self._estimated)

    @cached_property
    def largest(self) -> Stage:
        """Stage whose KV blocks are largest: `kv_bytes` is the cache size of this stage."""
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
        """Return the KV cache of one rank of this stage, MiB."""
        return self.kv_bytes / MIB * self._part(stage)

    def _part(self, stage: Stage) -> float:
        return stage.kv.bytes_per_block / self.kv.bytes_per_block

    @cached_property
    def reserves(self) -> tuple[Reserve, ...]:
        """Memory kept free on each GPU."""
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
        """Utilization for a first start: a share of each GPU's whole memory. None if the cache is given in bytes or on
        the CPU."""
        is_given = self.kv_asked is not None or self.seen_mib is not None or math.isfinite(self.facts.limits.kv_mib)
        return None if is_given or not self.option.cards or self.fills_uneven else self._share_of_cards

    @cached_property
    def fills_uneven(self) -> bool:
        """True if stages are on GPUs with different room: one utilization for all would leave the larger ones
        unused."""
        is_asked = self.facts.pins.utilization is not None
        return self.option.stages > 1 and not is_asked and are_uneven(self.room_mib, self.option.layout.tensor)

    @property
    def share_asked(self) -> float | None:
        """Utilization that the engine is given, even together with bytes; None on the CPU.

        vLLM refuses to start if less memory than this share is free, no matter how the cache is sized
        (v1/worker/utils.py `request_memory`, default 0.92).
        """
        return self._share_of_cards if self.option.cards else None

    @cached_property
    def _share_of_cards(self) -> float:
        """Utilization that fits the smallest GPU, or the user's.

        The assumed room counts too if observations show more. With bytes given, the value only decides whether vLLM
        starts, and it must not refuse for a CUDA context that is larger than estimated.
        """
        if self.facts.pins.utilization is not None:
            return self.facts.pins.utilization
        hardware = self.facts.hardware
        return min(
            utilization(total_mib(gpu, hardware), min(rooms))
            for gpu, *rooms in zip(self.option.cards, self.room_mib, self._assumed_room_mib, strict=True)
        )

    @property
    def kv_asked(self) -> int | None:
        """KV cache bytes of one rank that the user or an earlier start set, else None. Observed memory overrides an
        earlier start's bytes."""
        return self.facts.pins.kv_bytes or (self.option.kv_bytes if self.seen_mib is None else None)

    @cached_property
    def kv_bytes(self) -> int:
        """KV cache bytes of a rank of the largest stage: the bytes that it is given, or what vLLM will find left."""
        most = self.facts.limits.kv_mib * MIB
        if self.kv_asked is not None:
            return int(min(self.kv_asked, most))
        if not self.option.cards:
            return int(min(self._kv_of_host(), most))
        # With bytes given, vLLM does not measure at its start, so the estimate needs a margin.
        is_unsure = self.fills_uneven and self.seen_mib is None
        return int(min(self._kv_found(assumed.UNSURE_SHARE.value if is_unsure else 0.0), most))

    def _kv_found(self, unsure: float) -> float:
        """Return the bytes left for the cache in the stage with fewest blocks, converted to bytes of the largest stage.
        `unsure` is the share of weights, activations and graphs that is kept as a margin."""
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
        """Return the cache bytes of one rank on the CPU: at most what all requests fill at the wanted context. The rest
        of host memory stays for the file cache and other programs."""
        room = max(0.0, self.host_room_mib) * MIB / self.option.layout.local_ranks
        enough = self.kv.bytes_for(self.facts.wanted, self.option.seqs)
        whole = int(min(room, enough)) // self.kv.bytes_per_block
        return whole * self.kv.bytes_per_block

    @property
    def host_room_mib(self) -> float:
        """Host memory for the KV caches of all ranks of the CPU build, MiB."""
        ranks = self.option.layout.local_ranks
        return self.host_usable_mib - self.host_overhead_mib - self.memory.beside_kv * ranks

    @property
    def host_usable_mib(self) -> float:
        usable = min(self.facts.hardware.memory.usable_mib, self.facts.given.host_mib_max)
        return usable * (1 - assumed.HOST_SPARE_SHARE.value)

    @property
    def host_overhead_mib(self) -> float:
        """Host memory of the API server, EngineCore and the workers of this host, MiB. A single GPU has no worker
        process of its own."""
        ranks = self.option.layout.local_ranks
        workers = 0 if self.option.cards and self.option.layout.ranks == 1 else ranks
        pinned = assumed.PINNED_MIB.value * ranks if self.option.cards else 0.0
        return (2 + workers) * assumed.PROCESS_MIB.value + assumed.APPLIANCE_MIB.value + pinned

    @cached_property
    def blocks(self) -> int:
        return self.kv.blocks_in(self.kv_bytes)

    @property
    def sure_blocks(self) -> int:
        """Blocks that the context may count on. For a first start without --ctx-size they are fewer than `blocks`: vLLM
        measures its memory itself, and with one block too few it refuses to start."""
        if self.share is None or self.facts.settings.ctx_size:
            return self.blocks
        return self.kv.blocks_in(int(self._kv_found(assumed.UNSURE_SHARE.value)))

    @cached_property
    def context(self) -> int:
        """Longest context length of one request, at most the wanted one. Below that it is a multiple of
        CONTEXT_STEP."""
        found = self.kv.longest(self.sure_blocks, self.facts.wanted)
        found = int(min(found, self.facts.limits.context))
        return found if found == self.facts.wanted else found - found % CONTEXT_STEP if found > CONTEXT_STEP else found

    @cached_property
    def room_mib(self) -> tuple[float, ...]:
        """Memory on each GPU for a rank's buffers, MiB: free memory minus CUDA context and reserve."""
        triples = zip(self._assumed_room_mib, self._assumed_reserves, self.reserves, strict=True)
        return tuple(room + before.mib - now.mib for room, before, now in triples)

    @cached_property
    def _assumed_room_mib(self) -> tuple[float, ...]:
        ranks, drafts = self.option.layout.ranks, self.option.has_draft_layers
        return tuple(room_on(self.facts, card, ranks, drafts=drafts) for card in self.option.cards)

    @property
    def fits(self) -> bool:
        """True if memory suffices for the cache that was asked for, or for one that holds the smallest context."""
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
        """Memory that one rank lacks for the smallest context, MiB (on the CPU: all ranks together); negative if it
        fits."""
        if not self.option.cards:
            needed, ranks = self.needed_mib(self.largest), self.option.layout.local_ranks
            return needed * ranks + self.host_overhead_mib - self.host_usable_mib
        return self.needed_mib(self.tightest) - self._room_of(self.tightest)

    @cached_property
    def tightest(self) -> Stage:
        """Stage that lacks most memory for the smallest context."""
        if not self.option.cards:
            return self.largest
        return max(self.stages, key=lambda stage: self.needed_mib(stage) - self._room_of(stage))

    def needed_mib(self, stage: Stage) -> float:
        """Return the memory that a rank of this stage needs for the smallest context, MiB."""
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
        """Number of requests with full context that the cache holds at the same time, rounded down to 0.1."""
        needed = self.kv.blocks_for(max(1, self.context))
        return math.floor(10 * self.blocks / needed) / 10
