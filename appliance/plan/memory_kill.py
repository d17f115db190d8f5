"""Kills of an engine by the kernel's memory killer, and the memory limit of the next plan. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime

from appliance.plan.plan import Plan
from appliance.values import dataclass

KILLS = 2  # number of kills from which plans become smaller; one kill may be another program's fault
SHARES = (0.8, 0.9, 0.95)  # limits as shares of the killed plan's memory; the first with a plan that fits is used
REMEMBERED_S = 24 * 3600.0  # after the last kill; later starts try the larger plan again
MORE_ROOM = 1.125  # a kill does not count if more than this many times its memory is usable now


@dataclass(frozen=True, kw_only=True)
class MemoryKill:
    """One kill of an engine."""

    at_s: float  # wall clock, which later processes share
    held_mib: float  # host memory that the plan counted at that moment
    usable_mib: float  # host memory that was usable when the engine's start was planned

    @property
    def is_possible(self) -> bool:
        return all(0 < each < math.inf for each in (self.at_s, self.held_mib, self.usable_mib))


def held_mib(plan: Plan, *, was_ready: bool) -> float:
    """Return the MiB of host memory that a plan counts; before readiness without caches, which grow with use."""
    memory = plan.memory
    grown = 0.0 if was_ready else memory.cache + memory.checkpoints
    return memory.total - grown + sum(share.memory.total for share in plan.placement.shares if share.gpu.is_unified)


def remembered(kills: Sequence[MemoryKill], *, now_s: float, usable_mib: float) -> tuple[MemoryKill, ...]:
    """Return the kills that count now: the last was recent, and memory is not much larger since.

    If the clock was set back, kills lie in the future and do not count.
    """
    last_s = max((kill.at_s for kill in kills), default=-math.inf)
    is_recent = 0 <= now_s - last_s < REMEMBERED_S
    return tuple(kill for kill in kills if usable_mib <= MORE_ROOM * kill.usable_mib) if is_recent else ()


def most_mib(kills: Sequence[MemoryKill]) -> Iterator[float]:
    """Yield limits of host memory for plans after these kills, the smallest first; none for fewer than KILLS.

    The first limit that some plan fits into is used.
    """
    if len(kills) >= KILLS:
        yield from (share * min(kill.held_mib for kill in kills) for share in SHARES)


def held_to(plans: Sequence[Plan], kills: Sequence[MemoryKill], *, measured_at_s: float) -> float | None:
    """Return the limit of host memory that held when these plans were measured; None if no kill limited them.

    `kills` are all recorded kills, also those that no longer count.
    """
    before = [kill for kill in kills if kill.at_s <= measured_at_s]
    most = most_mib(remembered(before, now_s=measured_at_s, usable_mib=0.0))
    return next((mib for mib in most if all(held_mib(plan, was_ready=True) <= mib for plan in plans)), None)


def why_smaller(kills: Sequence[MemoryKill], most_mib: float) -> str:
    """Return the reason why plans are smaller after these kills."""
    last, least = kills[-1], min(kill.held_mib for kill in kills)
    at = datetime.fromtimestamp(last.at_s, UTC).strftime("%Y-%m-%d %H:%M UTC")
    return (
        f"the kernel's memory killer ended the engine {len(kills)} times, last at {at}, with a plan of "
        f"{least:,.0f} MiB of host memory: plans take at most {most_mib:,.0f} MiB until "
        f"{REMEMBERED_S / 3600:.0f} h after the last kill"
    )
