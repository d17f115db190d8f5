"""Kills of engines by the kernel's memory killer, kept on the volume: from the second kill on, plans are smaller.

Without them a container that is restarted for ever would load the same plan and be killed for ever.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from datetime import UTC, datetime
from time import time

from appliance.console.report import Report
from appliance.errors import EngineError, VolumeError
from appliance.plan import MemoryKill, Plan, held_mib, remembered
from appliance.plan.memory_kill import KILLS, held_to, why_smaller
from appliance.profile import Profile, ProfileStore
from appliance.start.inputs import StartInputs
from appliance.supervisor import Crash
from appliance.system.detached import detached


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
            await detached(self._store.keep_kills, start.key, self.seen)
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
        return why_smaller(self.seen, most_mib)

    def judge(self, start: StartInputs, profile: Profile) -> None:
        """Mark a profile as stale if it was measured under a limit by kills that holds no more."""
        kills, measured_at_s = self._store.kills(start.key), _seconds(profile.created)
        if start.inputs.host_mib_max < math.inf or not kills or measured_at_s is None:
            return
        if (most := held_to(profile.plans, kills, measured_at_s=measured_at_s)) is None:
            return
        why = (
            f"it was measured while kills by the kernel's memory killer held plans to {most:,.0f} MiB of host memory, "
            "which holds no more"
        )
        try:
            self._store.mark_stale(profile, why)
            self._store.keep_kills(start.key, self.seen)  # else the profile that comes may be judged by them again
        except VolumeError as failure:
            self._report.warning("profile_limited", f"profile {profile.key.id}: {why}; {failure}")


def _seconds(created: str) -> float | None:
    """None for a time that somebody wrote by hand and that is none."""
    try:
        then = datetime.fromisoformat(created)
    except ValueError:
        return None
    return (then if then.tzinfo else then.replace(tzinfo=UTC)).timestamp()
