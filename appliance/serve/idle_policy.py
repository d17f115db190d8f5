"""What to do next while an engine serves that was never measured. Pure: time and traffic come in as figures."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

SETTLE_S = 3.0  # between two turns of one conversation nothing is started: it would be stopped before it is loaded
CHECK_AGAIN_S = 30.0  # who else holds memory may change at any time
LIKELY = 0.5  # a load is begun if it is more likely than not that it comes to a measurement
# A pause that has lasted longer than all others by no more than this may be one like them, and about to end.
JITTER = 0.8
NEED_MOST_S = 600.0
LOOKS = 5  # that find the machine busy; then it is measured as it is, since it may never be quiet
LOOK_AGAIN_S = 60.0  # after the first of them, and twice as long after each


class Action(StrEnum):
    WAIT = "wait"
    LOOK = "look at what else the machine does"
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
    pauses: tuple[float, ...] = ()  # earlier ones, in seconds; empty also if somebody waits for what is measured
    need_s: float = 0.0  # to load an engine and measure at one depth
    rest_s: float = 0.0  # how much longer a machine that was found busy is left alone
    is_calm: bool = True  # the machine was looked at in this idle period, and little else is at work


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
    if (left_s := max(now.rest_s, worth_after_s(now.pauses, now.idle_s, now.need_s))) > 0:
        return _wait(left_s)
    if not now.is_calm:
        return Decision(action=Action.LOOK)
    return Decision(action=Action.MEASURE_ALONE if is_alone else Action.MEASURE_BESIDE)


def chance(pauses: Sequence[float], idle_s: float, need_s: float) -> float:
    """How likely nobody asks for `need_s` more, after `idle_s` without a request. Earlier pauses tell; of a pause that
    is longer than all of them nothing is known, and it is taken to go on."""
    lasting = sum(pause > JITTER * idle_s for pause in pauses)
    enough = sum(pause > idle_s + need_s for pause in pauses)
    return (enough + 1) / (lasting + 1)


def worth_after_s(pauses: Sequence[float], idle_s: float, need_s: float) -> float:
    """How much longer to wait before a load is worth beginning if nobody asks until then; 0: it is now. Never much
    longer than the longest of the pauses."""
    times = (idle_s, *sorted(pause / JITTER for pause in pauses if pause / JITTER > idle_s))
    return next(at for at in times if at == times[-1] or chance(pauses, at, need_s) >= LIKELY) - idle_s


def look_again_s(looks: int, idle_s: float) -> float:
    """How long a machine is left alone after so many looks that found it busy."""
    return min(LOOK_AGAIN_S, idle_s) * 2.0 ** (looks - 1)


def doubled(need_s: float, wasted: int) -> float:
    """What a sitting may need, after so many in a row that were interrupted before anything was kept."""
    return min(max(need_s, NEED_MOST_S), need_s * 2.0 ** min(wasted, 30))


def _wait(seconds: float) -> Decision:
    return Decision(action=Action.WAIT, wait_s=min(CHECK_AGAIN_S, max(0.01, seconds)))
