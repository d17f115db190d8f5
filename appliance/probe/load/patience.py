"""How long work that can wait leaves a busy machine alone."""

from __future__ import annotations

LOOKS = 5
"""Looks that find the machine busy; then the work is done as it is, since the machine may never be quiet."""
LOOK_AGAIN_S = 60.0  # after the first busy look, doubled after each


def is_used_up(busy_looks: int) -> bool:
    """True after LOOKS busy ones."""
    return busy_looks >= LOOKS


def look_again_s(busy_looks: int, idle_s: float) -> float:
    """Return the seconds until the next look, after the first at most `idle_s`, the pause that begins such work."""
    return min(LOOK_AGAIN_S, idle_s) * 2.0 ** (busy_looks - 1)


def most_s(idle_s: float) -> float:
    """Return the seconds after which the work is done anyway."""
    return sum(look_again_s(looks, idle_s) for looks in range(1, LOOKS))
