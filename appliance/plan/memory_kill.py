"""Engines that the kernel's memory killer ended, and how much smaller the next plan has to be. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime

from appliance.plan.plan import Plan
from appliance.values import dataclass

KILLS = 2  # one may be another program's doing; from the second on, each takes some of the plan away
SHARES = (0.8, 0.9, 0.95)  # of what the killed plan held: the first that a plan fits into
REMEMBERED_S = 24 * 3600.0  # after the last kill; then the engine has served well, and a start tries the larger plan
MORE_ROOM = 1.125  # times the memory that was usable before the kill: conditions have changed


@dataclass(frozen=True, kw_only=True)
class MemoryKill:
    """One kill. `held_mib` is what the plan counted on of host memory by then; `usable_mib` what its start found."""

    at_s: float  # by the wall clock, which the next process has as well
    held_mib: float
    usable_mib: float

    @property
    def is_possible(self) -> bool:
        return all(0 < each < math.inf for each in (self.at_s, self.held_mib, self.usable_mib))


def held_mib(plan: Plan, *, was_ready: bool) -> float:
    """Of host memory. Caches that grow with use are empty before readiness."""
    memory = plan.memory
    grown = 0.0 if was_ready else memory.cache + memory.checkpoints
    return memory.total - grown + sum(share.memory.total for share in plan.placement.shares if share.gpu.is_unified)


def remembered(kills: Sequence[MemoryKill], *, now_s: float, usable_mib: float) -> tuple[MemoryKill, ...]:
    """Those that count now. A clock that was set back makes a kill old, never one that counts for ever."""
    last_s = max((kill.at_s for kill in kills), default=-math.inf)
    is_recent = 0 <= now_s - last_s < REMEMBERED_S
    return tuple(kill for kill in kills if usable_mib <= MORE_ROOM * kill.usable_mib) if is_recent else ()


def most_mib(kills: Sequence[MemoryKill]) -> Iterator[float]:
    """What a plan may hold of host memory after these: the first figure that a plan fits into. Empty for too few."""
    if len(kills) >= KILLS:
        yield from (share * min(kill.held_mib for kill in kills) for share in SHARES)


def held_to(plans: Sequence[Plan], kills: Sequence[MemoryKill], *, measured_at_s: float) -> float | None:
    """Return what plans might hold of host memory when these were measured; None if no kill limited them then. `kills`
    are all that are kept, also those that count no more."""
    before = [kill for kill in kills if kill.at_s <= measured_at_s]
    most = most_mib(remembered(before, now_s=measured_at_s, usable_mib=0.0))
    return next((mib for mib in most if all(held_mib(plan, was_ready=True) <= mib for plan in plans)), None)


def why_smaller(kills: Sequence[MemoryKill], most_mib: float) -> str:
    """Why plans are smaller after these kills."""
    last, least = kills[-1], min(kill.held_mib for kill in kills)
    at = datetime.fromtimestamp(last.at_s, UTC).strftime("%Y-%m-%d %H:%M UTC")
    return (
        f"the kernel's memory killer ended the engine {len(kills)} times, last at {at}, with a plan of "
        f"{least:,.0f} MiB of host memory: plans take at most {most_mib:,.0f} MiB until "
        f"{REMEMBERED_S / 3600:.0f} h after the last kill"
    )
