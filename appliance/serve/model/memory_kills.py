"""Kills of engines by the kernel's memory killer, kept on the volume: from the second kill on, plans are smaller.

Without them a container that is restarted for ever would load the same plan and be killed for ever.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from datetime import UTC, datetime
from time import time

from appliance.console.report import Report
from appliance.errors import EngineError, VolumeError
from appliance.plan import MemoryKill, Plan, held_mib, remembered
from appliance.plan.memory_kill import KILLS, REMEMBERED_S
from appliance.profile import ProfileStore
from appliance.start.inputs import StartInputs
from appliance.supervisor import Crash


class MemoryKills:
    """The kills that count. `seen` has those of this process and of earlier ones, even if the volume is full."""

    def __init__(
        self, start: StartInputs, store: ProfileStore, report: Report, *, now_s: Callable[[], float] = time
    ) -> None:
        self.seen = start.memory_kills(store)
        self._store = store
        self._report = report
        self._now_s = now_s
        self._last: Crash | None = None
        self._calls_for_less = False  # True if the last kill did
        self._is_told = False  # True once a warning said that the volume is full

    async def note(self, start: StartInputs, plan: Plan | None, crash: Crash) -> bool:
        """Note a crash, once each. True if it is a kill after which the next plan has to be smaller."""
        if crash is self._last:
            return self._calls_for_less
        self._last, self._calls_for_less = crash, False
        if plan is None or not crash.oom_kills or start.settings.nodes > 1:
            return False
        error = start.engine.as_error(crash)
        if not (isinstance(error, EngineError) and error.was_memory):
            return False  # the engine ended for another reason; the kill hit another process of the group
        now_s, usable_mib = self._now_s(), float(start.inputs.hardware.memory.usable_mib)
        kill = MemoryKill(at_s=now_s, held_mib=held_mib(plan, was_ready=crash.was_ready), usable_mib=usable_mib)
        self.seen = (*remembered(self.seen, now_s=now_s, usable_mib=usable_mib), kill)
        self._calls_for_less = len(self.seen) >= KILLS
        try:
            await asyncio.to_thread(self._store.keep_kills, start.key, self.seen)
        except (
            VolumeError,
            RuntimeError,
        ) as failure:  # RuntimeError: no thread is left. Serving goes on, and `seen` has the kill
            if not self._is_told:
                self._report.warning("memory_kill_not_kept", str(failure))
            self._is_told = True
        return self._calls_for_less

    def words(self, most_mib: float) -> str:
        """Say why plans are smaller, with count, time and figures."""
        last, least = self.seen[-1], min(kill.held_mib for kill in self.seen)
        at = datetime.fromtimestamp(last.at_s, UTC).strftime("%Y-%m-%d %H:%M UTC")
        return (
            f"the kernel's memory killer ended the engine {len(self.seen)} times, last at {at}, with a plan of "
            f"{least:,.0f} MiB of host memory: plans take at most {most_mib:,.0f} MiB until "
            f"{REMEMBERED_S / 3600:.0f} h after the last kill"
        )
