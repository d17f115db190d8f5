"""Memory of both builds: whether both may be loaded at once, and what the new one needs more. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from appliance.host.court.judge import SLOWER, Verdict
from appliance.values import dataclass

_PARTS = ("model", "kv", "compute", "output", "recurrent", "repacked")
# Engines at once while the new build is measured: the old one, the new one, and the one that is tried.
COPIES = 3
ROOM = 1.1  # an engine grows a little while it answers
NOISE_MIB = 64.0


@dataclass(frozen=True, kw_only=True)
class Memory:
    """Allocations by the engines' own logs, MiB, with the context lengths that they hold. None is unknown."""

    old_mib: float | None
    new_mib: float | None
    old_context: int | None
    new_context: int | None

    @property
    def verdict(self) -> Verdict:
        """A longer context may take more; a shorter one is a loss whatever it takes."""
        if None in (self.old_context, self.new_context):
            return Verdict.NOT_DECIDED
        if (self.new_context or 0) < (self.old_context or 0):
            return Verdict.LOST
        if self.old_mib is None or self.new_mib is None:
            return Verdict.NOT_DECIDED
        takes_more = self.new_mib > self.old_mib * (1 + SLOWER) + NOISE_MIB
        return Verdict.LOST if takes_more and self.new_context == self.old_context else Verdict.AS_GOOD


def memory_of(old: Mapping[str, Any], new: Mapping[str, Any]) -> Memory:
    """Compare two status documents."""
    return Memory(
        old_mib=held_mib(old), new_mib=held_mib(new), old_context=old.get("context"), new_context=new.get("context")
    )


def held_mib(status: Mapping[str, Any]) -> float | None:
    """Return what the engine allocated; None if its log did not tell."""
    allocated = status.get("allocated") or {}
    parts = [float(allocated[name]) for name in _PARTS if name in allocated]
    return sum(parts) if parts else None


def why_in_turn(status: Mapping[str, Any], *, has_gpus: bool, available_mib: float) -> str:
    """Say why both builds cannot be loaded at once; empty if they can.

    The kernel counts mapped weights as available, so the old build's memory is counted again.
    """
    if has_gpus:
        return "a plan takes the memory of the GPUs that is free"
    held = held_mib(status)
    if held is None:
        return "the engine does not tell what it holds"
    needed = COPIES * ROOM * held
    if needed <= available_mib:
        return ""
    return f"{COPIES} engines of {held:,.0f} MiB do not fit into the {available_mib:,.0f} MiB that are available"
