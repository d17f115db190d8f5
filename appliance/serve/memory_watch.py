"""What the engine that serves holds of its GPUs: as it becomes ready, and the most seen since, kept for later starts.

An engine's allocator keeps what it once had, so a look a while after requests came sees their peak. Only memory of the
engine's own processes counts: what others take or give back meanwhile is not its growth.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace
from itertools import repeat
from pathlib import Path
from typing import TYPE_CHECKING

from appliance.engines.gpus import device_id
from appliance.errors import VolumeError
from appliance.plan import CardPeak, MemoryPeak, Plan
from appliance.probe import Gpu
from appliance.race import first_of
from appliance.values import dataclass

if TYPE_CHECKING:
    from appliance.gateway.traffic import Traffic  # for the name only: it takes half a second to import
    from appliance.serve.served_model import ServedModel

LOOK_EVERY_S = 60.0  # while requests come: a look is a child process that works for a fifth of a second
STEP_MIB = 16  # less growth than this is not written


@dataclass(frozen=True, kw_only=True)
class Watched:
    """One engine, from its readiness on."""

    plan: Plan
    pid: int
    socket_path: Path
    kv_mib: tuple[float, ...]  # of each card of the plan


class MemoryWatch:
    """Of one served model, whichever engine of it serves."""

    def __init__(self, served: ServedModel) -> None:
        self._served = served
        self._every_s = min(LOOK_EVERY_S, served.settings.idle_s)
        self._engine: Watched | None = None
        self._pids: tuple[frozenset[int], ...] = ()  # of the engine, that hold memory of each card
        self._is_new = asyncio.Event()
        self._kept: MemoryPeak | None = None
        self.peak: MemoryPeak | None = None  # of the engine that serves; None: nobody can say

    def begin(self, plan: Plan, pid: int | None, socket_path: Path) -> None:
        """That engine is ready. It is not watched where nothing would come of it: its plans do not count on what is
        seen, or it shares memory with the host or work with other hosts."""
        served = self._served
        self._engine, self._pids, self.peak, self._kept = None, (), None, None
        shares, tokens = plan.placement.shares, served.allocated.kv_tokens if served.allocated else 0
        if pid is None or not tokens or served.settings.nodes > 1 or any(share.gpu.is_unified for share in shares):
            return
        if kv_mib := served.space_of_profile.kv_mib(plan, tokens):
            self._engine = Watched(plan=plan, pid=pid, socket_path=socket_path, kv_mib=kv_mib)
            self._is_new.set()

    async def run(self, traffic: Traffic) -> None:
        """Never returns, and raises nothing that a driver or a volume does."""
        while True:
            self._is_new.clear()
            arrivals = traffic.arrivals
            if self._engine is not None:
                await self._look(self._engine)
            if traffic.arrivals == arrivals:
                await first_of(traffic.until_arrival(), self._is_new.wait())
            if not self._is_new.is_set():
                await asyncio.sleep(self._every_s)

    async def _look(self, engine: Watched) -> None:
        # In this order: memory that was looked at before the work was done would stand for all of it.
        is_whole = await self._served.start.engine.has_peaked(engine.plan, engine.socket_path)
        held = await asyncio.to_thread(self._query_held, engine)
        if held is None or engine is not self._engine:  # another took its place meanwhile
            return
        self.peak = _risen(engine, self.peak, held, is_whole=is_whole)
        if self._kept is None or self.peak.is_whole != self._kept.is_whole or _has_grown(self._kept, self.peak):
            self._kept = self.peak
            await self._keep(self.peak)

    def _query_held(self, engine: Watched) -> tuple[int, ...] | None:
        """MiB of each card of the plan; None where nobody can say. Blocks."""
        # Here: no start of an engine needs them.
        from appliance.probe.holders import held_mib, own_pids
        from appliance.probe.nvidia import query_gpus
        from appliance.probe.processes import query_tree

        served, ids = self._served, [share.gpu.id for share in engine.plan.placement.shares]
        found = query_gpus(Path("/"), served.environment, served.settings.data_dir).gpus
        cards, known = (_in_order(ids, gpus) for gpus in (found, served.hardware.gpus.gpus))
        if len(cards) != len(ids) or len(known) != len(ids):
            return None
        if not (self._pids and all(self._pids)):
            self._pids = tuple(map(own_pids, cards, repeat(query_tree(engine.pid)), known))
        held = [held_mib(card, pids) or 0 for card, pids in zip(cards, self._pids, strict=True)]
        # Less than its cache is not all of it.
        is_all = all(mib > kv_mib for mib, kv_mib in zip(held, engine.kv_mib, strict=True))
        return tuple(held) if is_all else None

    async def _keep(self, peak: MemoryPeak) -> None:
        served = self._served
        try:
            await asyncio.to_thread(served.store.keep_peak, served.key, peak)
        except VolumeError as error:  # serving goes on; the next start assumes what this one did
            served.report.warning("memory_not_kept", error.message)
            return
        cards = (f"{card.peak_mib:,} MiB of {card.device}, {card.ready_mib:,} as it was ready" for card in peak.cards)
        served.report.info("memory_seen", f"the engine has held {'; '.join(cards)}", is_whole=peak.is_whole)


def _in_order(ids: list[str], gpus: tuple[Gpu, ...]) -> list[Gpu]:
    by_id = {device_id(gpu): gpu for gpu in gpus}
    return [by_id[id_] for id_ in ids if id_ in by_id]


def _risen(engine: Watched, before: MemoryPeak | None, held: tuple[int, ...], *, is_whole: bool) -> MemoryPeak:
    if before is None:
        shares = engine.plan.placement.shares
        cards = tuple(
            CardPeak(device=share.gpu.id, kv_mib=kv_mib, ready_mib=mib, peak_mib=mib)
            for share, kv_mib, mib in zip(shares, engine.kv_mib, held, strict=True)
        )
        return MemoryPeak(plan=replace(engine.plan, choices=()), cards=cards, is_whole=is_whole)
    pairs = zip(before.cards, held, strict=True)
    return replace(
        before,
        cards=tuple(replace(card, peak_mib=max(card.peak_mib, mib)) for card, mib in pairs),
        is_whole=before.is_whole or is_whole,
    )


def _has_grown(before: MemoryPeak, after: MemoryPeak) -> bool:
    pairs = zip(before.cards, after.cards, strict=True)
    return any(new.peak_mib - old.peak_mib >= STEP_MIB for old, new in pairs)
