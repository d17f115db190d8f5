"""States of an engine, and which state may follow which."""

from __future__ import annotations

from enum import StrEnum


class State(StrEnum):
    STOPPED = "stopped"  # never started, or stopped on request
    STARTING = "starting"
    READY = "ready"
    HUNG = "hung"  # no longer works, and is being killed
    STOPPING = "stopping"  # asked to stop; the process may still live
    BACKOFF = "backoff"  # died; waiting before the next start
    FAILED = "failed"  # died, and is not restarted automatically


TRANSITIONS: dict[State, frozenset[State]] = {
    State.STOPPED: frozenset({State.STARTING}),
    State.STARTING: frozenset({State.READY, State.STOPPING, State.BACKOFF, State.FAILED}),
    State.READY: frozenset({State.HUNG, State.STOPPING, State.BACKOFF, State.FAILED}),
    State.HUNG: frozenset({State.STOPPING, State.BACKOFF, State.FAILED}),
    State.STOPPING: frozenset({State.STOPPED}),
    State.BACKOFF: frozenset({State.STARTING, State.STOPPING, State.FAILED}),
    State.FAILED: frozenset({State.STARTING}),
}


class IllegalTransitionError(RuntimeError):
    """A bug in the supervisor; no outside event causes it."""


def checked(now: State, then: State) -> State:
    """Return `then` if it may follow `now`. Raises IllegalTransitionError otherwise."""
    if then not in TRANSITIONS[now]:
        message = f"an engine cannot go from {now} to {then}"
        raise IllegalTransitionError(message)
    return then
