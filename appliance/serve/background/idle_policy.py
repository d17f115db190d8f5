"""The next step of idle tuning, decided from time and traffic as figures. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

SETTLE_S = (
    3.0  # a shorter pause is one between two turns of a conversation: an engine would be stopped before it is loaded
)
CHECK_AGAIN_S = 30.0  # memory that others hold may change at any time
LIKELY = 0.5  # a load is begun if it is more likely than not that it comes to a measurement
# A pause counts as like the longest one, and so about to end, until it is 1/JITTER times as long.
JITTER = 0.8
NEED_MOST_S = 600.0


class Action(StrEnum):
    WAIT = "wait"
    LOOK = "look at what else the machine does"
    MEASURE_SERVING = "measure the plan that serves on its own engine"
    MEASURE_BESIDE = "measure beside the engine that serves"
    MEASURE_ALONE = "stop the engine, measure, load the best"
    SWAP_BESIDE = "load the best beside the engine that serves, then switch to it"
    SWAP_ALONE = "stop the engine, load the best"
    END = "end"


@dataclass(frozen=True, kw_only=True)
class IdleState:
    """Figures of this moment. An idle period begins with the end of a request and ends with the next one."""

    is_ready: bool  # the engine answers
    running: int  # requests of any kind
    idle_s: float
    has_room: bool  # memory holds a second engine
    is_measured: bool  # True if nothing is left to measure
    has_better: bool  # True if another plan than the one that serves was measured as the best
    was_reloaded_now: bool  # True if the engine was reloaded in this idle period
    pauses: tuple[float, ...] = ()  # earlier pauses in seconds; empty if a client waits for the result
    need_s: float = 0.0  # time to load an engine and measure at one depth
    rest_s: float = 0.0  # how much longer a machine is left to others, which are busy or measure
    has_baseline: bool = True  # False if the plan that serves is to be measured on its own engine
    is_calm: bool = True  # True if a look in this idle period found the machine quiet


@dataclass(frozen=True, kw_only=True)
class Decision:
    """An action, and how long to wait if it is WAIT."""

    action: Action
    wait_s: float = 0.0


def decide(now: IdleState, *, idle_s: float, settle_s: float = SETTLE_S) -> Decision:
    """Decide. `idle_s` is the idle time after which requests may have to wait for a reload."""
    if now.is_measured and not now.has_better:
        return Decision(action=Action.END)
    if not now.is_ready:
        return _wait(settle_s)
    if now.has_better and now.has_room:
        # Even while requests run: they do not wait for it.
        return Decision(action=Action.SWAP_BESIDE)
    if now.running:
        return _wait(CHECK_AGAIN_S)
    is_alone = not now.has_room
    if not now.is_measured and not now.has_baseline:
        return _of_serving(now, settle_s)
    if is_alone and now.was_reloaded_now:
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


def _of_serving(now: IdleState, settle_s: float) -> Decision:
    """Decide when the engine that serves is measured: it costs no load, and a request ends it at once."""
    if (left_s := max(settle_s - now.idle_s, now.rest_s)) > 0:
        return _wait(left_s)
    return Decision(action=Action.MEASURE_SERVING if now.is_calm else Action.LOOK)


def chance(pauses: Sequence[float], idle_s: float, need_s: float) -> float:
    """Probability that a pause of `idle_s` lasts for `need_s` more, estimated from earlier pauses.

    A pause longer than all earlier ones is assumed to go on.
    """
    lasting = sum(pause > JITTER * idle_s for pause in pauses)
    enough = sum(pause > idle_s + need_s for pause in pauses)
    return (enough + 1) / (lasting + 1)


def worth_after_s(pauses: Sequence[float], idle_s: float, need_s: float) -> float:
    """Further idle time in seconds until a load is worth beginning; 0 if it is worth it now.

    It is never much longer than the longest of the pauses.
    """
    times = (idle_s, *sorted(pause / JITTER for pause in pauses if pause / JITTER > idle_s))
    return next(at for at in times if at == times[-1] or chance(pauses, at, need_s) >= LIKELY) - idle_s


def doubled(need_s: float, wasted: int) -> float:
    """Assumed need of a sitting, doubled for each interrupted one before it that kept nothing."""
    return min(max(need_s, NEED_MOST_S), need_s * 2.0 ** min(wasted, 30))


def _wait(seconds: float) -> Decision:
    return Decision(action=Action.WAIT, wait_s=min(CHECK_AGAIN_S, max(0.01, seconds)))
