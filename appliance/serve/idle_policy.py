"""What to do next while an engine serves that was never measured. Pure: time and traffic come in as figures."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

SETTLE_S = 3.0  # between two turns of one conversation nothing is started: it would be stopped before it is loaded
CHECK_AGAIN_S = 30.0  # who else holds memory may change at any time


class Action(StrEnum):
    WAIT = "wait"
    MEASURE_BESIDE = "measure beside the engine that serves"
    MEASURE_ALONE = "stop the engine, measure, load the best"
    SWAP_BESIDE = "load the best beside the engine that serves, then switch to it"
    SWAP_ALONE = "stop the engine, load the best"
    END = "end"


@dataclass(frozen=True, kw_only=True)
class IdleState:
    """An idle period begins with the end of a request and ends with the next one."""

    is_ready: bool  # the engine answers
    running: int  # requests, of whatever kind
    idle_s: float
    has_room: bool  # memory holds what would be started beside the engine that serves
    is_measured: bool  # nothing is left to measure
    has_better: bool  # it was measured, and another plan than the one that serves is the best
    was_measured_now: bool  # in this idle period, until the measuring ended by itself
    was_reloaded_now: bool  # in this idle period


@dataclass(frozen=True, kw_only=True)
class Decision:
    action: Action
    wait_s: float = 0.0


def decide(now: IdleState, *, idle_s: float, settle_s: float = SETTLE_S) -> Decision:
    """`idle_s` is how long nobody must have asked before requests may have to wait for a reload."""
    if now.is_measured and not now.has_better:
        return Decision(action=Action.END)
    if not now.is_ready:
        return _wait(settle_s)
    if now.has_better and now.has_room:
        # Whether somebody asks or not: nobody waits for it.
        return Decision(action=Action.SWAP_BESIDE)
    if now.running:
        return _wait(CHECK_AGAIN_S)
    is_alone = not now.has_room
    if (is_alone and now.was_reloaded_now) or (not now.is_measured and now.was_measured_now):
        return _wait(CHECK_AGAIN_S)
    left_s = (max(idle_s, settle_s) if is_alone else settle_s) - now.idle_s
    if left_s > 0:
        return _wait(left_s)
    if now.is_measured:
        return Decision(action=Action.SWAP_ALONE)
    return Decision(action=Action.MEASURE_ALONE if is_alone else Action.MEASURE_BESIDE)


def _wait(seconds: float) -> Decision:
    return Decision(action=Action.WAIT, wait_s=min(CHECK_AGAIN_S, max(0.01, seconds)))
