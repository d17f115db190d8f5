"""What the engine that serves holds of its GPUs: as it becomes ready, and the most seen since, kept for later starts.

An engine's allocator keeps what it once had, so a look a while after requests came sees their peak. Only memory of the
engine's own processes counts: what others take or give back meanwhile is not its growth.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from itertools import repeat
from pathlib import Path
from typing import TYPE_CHECKING

from appliance.engines.gpus import device_id
from appliance.errors import EngineError, FatalError, VolumeError
from appliance.plan import CardPeak, MemoryPeak, Plan
from appliance.probe import Gpu
from appliance.race import first_of

if TYPE_CHECKING:
    from appliance.gateway.clients.traffic import Traffic  # for the name only: it takes half a second to import
    from appliance.serve.served_model import ServedModel

# Between looks while requests come, by `idle_s`: each is a child process that works for a fifth of a second.
LOOK_EVERY_S, LOOK_LEAST_S = 60.0, 10.0
STEP_MIB = 16  # less growth than this is not written


class Watched:
    """One engine, from its readiness on, and what was seen of it."""

    def __init__(self, plan: Plan, pid: int, socket_path: Path, kv_mib: tuple[float, ...]) -> None:
        self.plan = plan
        self.pid = pid
        self.socket_path = socket_path
        self.kv_mib = kv_mib  # of each card of the plan
        self.pids: tuple[frozenset[int], ...] = ()  # of its processes that hold memory of each card
        self.peak: MemoryPeak | None = None
        self.kept: MemoryPeak | None = None
        self.is_told = False  # that it cannot be kept


class MemoryWatch:
    """Of one served model, whichever engine of it serves."""

    def __init__(self, served: ServedModel) -> None:
        self._served = served
        self.every_s = min(LOOK_EVERY_S, max(LOOK_LEAST_S, served.settings.idle_s))
        self._engine: Watched | None = None
        self._is_new = asyncio.Event()

    @property
    def peak(self) -> MemoryPeak | None:
        """Of the engine that serves; None: nobody looks, or can say."""
        return self._engine.peak if self._engine else None

    def begin(self, plan: Plan, pid: int | None, socket_path: Path) -> None:
        """That engine is ready. It is not watched where nothing would come of it: its plans do not count on what is
        seen, or it shares memory with the host or work with other hosts."""
        served = self._served
        self._engine = None
        shares, tokens = plan.placement.shares, served.allocated.kv_tokens if served.allocated else 0
        if pid is None or not tokens or served.settings.nodes > 1 or any(share.gpu.is_unified for share in shares):
            return
        if kv_mib := served.space_of_profile.kv_mib(plan, tokens):
            self._engine = Watched(plan, pid, socket_path, kv_mib)
            self._is_new.set()

    async def run(self, traffic: Traffic) -> None:
        """Never returns, and raises nothing that an engine, a driver or a volume does."""
        while True:
            self._is_new.clear()
            arrivals = traffic.arrivals
            if self._engine is not None:
                await self._try_to_look(self._engine)
            if traffic.arrivals == arrivals:
                await first_of(traffic.until_arrival(), self._is_new.wait())
            await first_of(self._is_new.wait(), timeout_s=self.every_s)

    async def on_death(self, plan: Plan | None, error: FatalError) -> None:
        """An engine that ran out of memory has shown that its peak was not whole."""
        if plan is None or not plan.placement.shares or not (isinstance(error, EngineError) and error.was_memory):
            return
        try:
            await asyncio.to_thread(self._served.store.doubt_peak, self._served.key, plan)
        except (VolumeError, RuntimeError) as failure:
            self._served.report.warning("memory_not_kept", str(failure))

    async def _try_to_look(self, engine: Watched) -> None:
        try:
            await self._look(engine)
        except (OSError, ValueError, RuntimeError) as error:  # no file or thread is left, or another /proc than thought
            self._served.report.warning("memory_not_seen", f"GPU memory in service is not looked at any more: {error}")
            if engine is self._engine:
                self._engine = None

    async def _look(self, engine: Watched) -> None:
        is_wanted = True
        # In this order: memory that was looked at before the work was done would stand for all of it.
        is_whole = await self._served.start.engine.has_peaked(engine.plan, engine.socket_path)
        try:
            held = await asyncio.to_thread(self._query_held, engine, lambda: is_wanted)
        finally:
            is_wanted = False
        supervisor = self._served.host.supervisor
        if held is None or supervisor is None or supervisor.pid != engine.pid:
            return  # nobody can say, or another takes its place
        engine.peak = _risen(engine, held, is_whole=is_whole)
        kept = engine.kept
        if kept is None or engine.peak.is_whole != kept.is_whole or _has_grown(kept, engine.peak):
            await self._keep(engine, engine.peak)

    def _query_held(self, engine: Watched, is_wanted: Callable[[], bool]) -> tuple[int, ...] | None:
        """MiB of each card of the plan; None where nobody can say. Blocks until `is_wanted` says no."""
        # Here: no start of an engine needs them.
        from appliance.probe.gpu.nvidia import query_gpus
        from appliance.probe.load.holders import held_mib, own_pids
        from appliance.probe.load.processes import query_tree

        served, ids = self._served, [share.gpu.id for share in engine.plan.placement.shares]
        found = query_gpus(Path("/"), served.environment, served.settings.data_dir, is_wanted=is_wanted).gpus
        cards, known = (_in_order(ids, gpus) for gpus in (found, served.hardware.gpus.gpus))
        if len(cards) != len(ids) or len(known) != len(ids):
            return None
        if not (engine.pids and all(engine.pids)):
            engine.pids = tuple(map(own_pids, cards, repeat(query_tree(engine.pid)), known))
        held = [held_mib(card, pids) or 0 for card, pids in zip(cards, engine.pids, strict=True)]
        # Less than its cache is not all of it.
        is_all = all(mib > kv_mib for mib, kv_mib in zip(held, engine.kv_mib, strict=True))
        return tuple(held) if is_all else None

    async def _keep(self, engine: Watched, peak: MemoryPeak) -> None:
        """Tried again at the next look where it fails, or another is at work on the volume."""
        served = self._served
        try:
            is_kept = await asyncio.to_thread(served.store.keep_peak, served.key, peak, served.hardware.gpus.gpus)
        except VolumeError as error:  # serving goes on; the next start assumes what this one did
            if not engine.is_told:
                served.report.warning("memory_not_kept", error.message)
            engine.is_told = True
            return
        if not is_kept:
            return
        engine.kept = peak
        cards = (f"{card.peak_mib:,} MiB of {card.device}, {card.ready_mib:,} as it was ready" for card in peak.cards)
        served.report.info("memory_seen", f"the engine has held {'; '.join(cards)}", is_whole=peak.is_whole)


def _in_order(ids: list[str], gpus: tuple[Gpu, ...]) -> list[Gpu]:
    by_id = {device_id(gpu): gpu for gpu in gpus}
    return [by_id[id_] for id_ in ids if id_ in by_id]


def _risen(engine: Watched, held: tuple[int, ...], *, is_whole: bool) -> MemoryPeak:
    before = engine.peak
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
