"""GPU memory of the engine that serves: at readiness, and the highest value since, kept for later starts.

An engine's allocator keeps what it once had, so a look some time after requests sees their peak. Only memory of the
engine's own processes counts: what others take or give back is not its growth.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import repeat
from pathlib import Path
from typing import TYPE_CHECKING

from appliance.engines.gpus import device_id
from appliance.errors import VolumeError
from appliance.plan import CardPeak, MemoryPeak
from appliance.probe import Gpu
from appliance.race import first_of
from appliance.serve.model.served_model import ReadyEngine, ServedModel
from appliance.system.detached import detached

if TYPE_CHECKING:
    from appliance.gateway.clients.traffic import Traffic  # for the name only: it takes half a second to import

# Time between looks while requests come, by `idle_s`: each look is a child process that works for 0.2 s.
LOOK_EVERY_S, LOOK_LEAST_S = 60.0, 10.0
STEP_MIB = 16  # smaller growth is not written


class Watched:
    """One engine from its readiness on, and what was seen of it."""

    def __init__(self, ready: ReadyEngine, pid: int, kv_mib: tuple[float, ...]) -> None:
        self.plan = ready.plan
        self.pid = pid
        self.socket_path = ready.socket_path
        self.kv_mib = kv_mib  # of each card of the plan
        self.pids: tuple[frozenset[int], ...] = ()  # its processes that hold memory of each card
        self.peak: MemoryPeak | None = None
        self.kept: MemoryPeak | None = None
        self.is_told = False  # True once a warning said that the peak cannot be kept


class MemoryWatch:
    """Follows the engine of one served model, and writes `gpu_memory` of it."""

    def __init__(self, served: ServedModel) -> None:
        self._served = served
        self.every_s = min(LOOK_EVERY_S, max(LOOK_LEAST_S, served.settings.idle_s))
        self._ready: ReadyEngine | None = None
        self._engine: Watched | None = None  # None: it cannot be watched, or a look at it has failed

    async def run(self, traffic: Traffic) -> None:
        """Look again and again. Never returns; no error of an engine, a driver or a volume ends it."""
        is_new = self._served.ready_changed
        while True:
            is_new.clear()
            self._follow(self._served.ready)
            arrivals = traffic.arrivals
            if self._engine is not None:
                await self._try_to_look(self._engine)
            if traffic.arrivals == arrivals:
                await first_of(traffic.until_arrival(), is_new.wait())
            await first_of(is_new.wait(), timeout_s=self.every_s)

    def _follow(self, ready: ReadyEngine | None) -> None:
        """Watch the engine that became ready last.

        It is not watched if its plans do not count on the result, or if it shares memory with the host or work with
        other hosts.
        """
        if ready is None or ready is self._ready:
            return
        self._ready, self._engine = ready, None
        served, shares = self._served, ready.plan.placement.shares
        tokens = served.allocated.kv_tokens if served.allocated else 0
        if ready.pid is None or not tokens or served.settings.nodes > 1 or any(each.gpu.is_unified for each in shares):
            return
        if kv_mib := served.space_of_profile.kv_mib(ready.plan, tokens):
            self._engine = Watched(ready, ready.pid, kv_mib)

    async def _try_to_look(self, engine: Watched) -> None:
        try:
            await self._look(engine)
        except (OSError, ValueError, RuntimeError) as error:  # no file or thread is left, or /proc has another form
            self._served.report.warning("memory_not_seen", f"GPU memory in service is not looked at any more: {error}")
            self._engine = None
            self._show(None)

    async def _look(self, engine: Watched) -> None:
        is_wanted = True
        # Asked first: memory seen before the work was done must not count as the whole peak.
        is_whole = await self._served.start.engine.has_peaked(engine.plan, engine.socket_path)
        try:
            held = await detached(self._query_held, engine, lambda: is_wanted)
        finally:
            is_wanted = False
        supervisor = self._served.host.supervisor
        if held is None or supervisor is None or supervisor.pid != engine.pid:
            return  # unknown, or another engine takes its place
        engine.peak = _risen(engine, held, is_whole=is_whole)
        self._show(engine.peak)
        kept = engine.kept
        if kept is None or engine.peak.is_whole != kept.is_whole or _has_grown(kept, engine.peak):
            await self._keep(engine, engine.peak)

    def _show(self, peak: MemoryPeak | None) -> None:
        if self._served.ready is self._ready:
            self._served.gpu_memory = peak

    def _query_held(self, engine: Watched, is_wanted: Callable[[], bool]) -> tuple[int, ...] | None:
        """Return MiB on each card of the plan; None if unknown. Blocks until done or `is_wanted` returns False."""
        # here: no start of an engine needs them
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
        # Less than its KV cache is not all of its memory.
        is_all = all(mib > kv_mib for mib, kv_mib in zip(held, engine.kv_mib, strict=True))
        return tuple(held) if is_all else None

    async def _keep(self, engine: Watched, peak: MemoryPeak) -> None:
        """Keep the peak on the volume. If that fails, the next look tries again."""
        served = self._served
        try:
            is_kept = await detached(served.store.keep_peak, served.key, peak, served.hardware.gpus.gpus)
        except VolumeError as error:  # serving goes on; the next start plans as this one did
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
