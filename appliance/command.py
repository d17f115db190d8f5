"""All that a supervisor needs to know about a program: how to start it, when it is ready, when to give up."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import field
from pathlib import Path
from typing import Protocol

from appliance.values import dataclass

Readiness = Callable[[], Awaitable[bool]]
"""Asks the program once whether it is ready. Never raises for "not yet": a refused connection is False."""


class Upkeep(Protocol):
    """What a program keeps between its runs, held in order around each of them: quick, and called in this order."""

    def begin(self) -> None:
        """Before it is started."""

    def ready(self) -> None:
        """It became ready; not called where it ended before."""

    def end(self) -> None:
        """All of it is gone."""


@dataclass(frozen=True, kw_only=True)
class Silence:
    """How long a program has owed something to those who wait for it. Time in which nobody waits is not counted."""

    requests: int  # that it has to answer now
    seconds: float  # since any of them got something of its answer
    patience_s: float  # after so many seconds the program hangs, even if it works all the time


class Demand(Protocol):
    """Requests that a program works on while it serves."""

    @property
    def requests(self) -> int:
        """How many it has to answer now."""

    def begin(self) -> None:
        """Start anew with a new life of the program, which owes nothing yet."""

    def pass_time(self, seconds: float) -> Silence:
        """Count so much time for all that wait. Called by the program's supervisor alone."""

    def give_up(self, why: str) -> None:
        """Tell those who wait at once: the program hangs and is about to be killed."""


def _never(_line: str) -> bool:
    return False


@dataclass(frozen=True, kw_only=True)
class Command:
    """One program to supervise. `environment` is the whole environment of the child, not an addition to ours."""

    argv: tuple[str, ...]
    environment: Mapping[str, str] = field(default_factory=dict)
    is_ready: Readiness
    is_error: Callable[[str], bool] = _never  # whether a line of its log says that something went wrong
    is_fatal: Callable[[str], bool] = _never  # whether one says, while it serves, that nothing more will be answered
    is_waiting: Callable[[str], bool] = _never  # whether one is no sign of work: said again and again by who waits
    # Never the volume: an engine may look for code to load in its working directory, and whoever can write a file
    # there would run code in every container that shares it.
    folder: Path = Path("/")
    socket_path: Path | None = None  # unlinked before each start: a stale file makes the next bind fail
    # Made anew before each start, and removed after each end with all that is in it.
    scratch: Path | None = None
    upkeep: Upkeep | None = None
    stall_timeout_s: float = 120.0  # no sign of work for this long: as it loads, and while somebody waits for it
    # Asked before it is taken for stalled: whether it does work that its processes do not show, such as a GPU's.
    is_at_work: Callable[[], bool] | None = None
    # Whoever waits for it while it serves; None: nobody does, and it is not watched then.
    demand: Demand | None = None
    # A question that costs it nothing, asked now and then while nobody waits for it; None: there is none.
    is_answering: Readiness | None = None
    # What it has worked off of its requests: anything that differs once it has worked on. None: it does not tell.
    work_done: Callable[[], Awaitable[object]] | None = None
    stop_grace_s: float = 2.0  # between SIGTERM and SIGKILL
    last_words_s: float = 1.0  # after a fatal line: to tell its clients and its log, and to end by itself
    # How many processes of our control group the kernel's memory killer has ended so far; None: it cannot be known.
    oom_kills: Callable[[], int | None] | None = None
