"""Everything that the supervisor needs to know about a program: how to start it, when it is ready, when to give up."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import field
from pathlib import Path
from typing import Protocol

from appliance.values import dataclass

Readiness = Callable[[], Awaitable[bool]]
"""Asks the program once whether it is ready. "Not yet" is False and raises nothing: so is a refused connection."""


class Upkeep(Protocol):
    """Files that a program keeps between its runs. The three methods are called around each run, in this order, and
    must return quickly."""

    def begin(self) -> None:
        """Prepare the files; called before the program is started."""

    def ready(self) -> None:
        """Called when the program became ready; not called if it ended before."""

    def end(self) -> None:
        """Called when all processes of the program are gone."""


@dataclass(frozen=True, kw_only=True)
class Silence:
    """How long a program has sent nothing to the requests that wait for it. Time in which no request waits is not
    counted."""

    requests: int  # requests that wait for an answer now
    seconds: float  # since any of these requests got a part of its answer
    patience_s: float  # after so many seconds without a part of an answer it hangs, even if it uses a CPU


class Demand(Protocol):
    """Requests that a program works on while it serves."""

    @property
    def requests(self) -> int:
        """Number of requests that wait for an answer now."""

    def begin(self) -> None:
        """Start to count anew: the program was restarted and no request waits for it yet."""

    def pass_time(self, seconds: float) -> Silence:
        """Add `seconds` to the waiting time of all requests. Only the program's supervisor calls this."""

    def give_up(self, why: str) -> None:
        """Send an error to all waiting requests at once: the program hangs and is about to be killed."""


def _never(_line: str) -> bool:
    return False


@dataclass(frozen=True, kw_only=True)
class Command:
    """One program to supervise. `environment` is the whole environment of the child, not an addition to ours."""

    argv: tuple[str, ...]
    environment: Mapping[str, str] = field(default_factory=dict)
    is_ready: Readiness
    is_error: Callable[[str], bool] = _never  # True for a line of the program's log that reports an error
    # True for a log line of a serving program after which it answers nothing more
    is_fatal: Callable[[str], bool] = _never
    # True for a log line that repeats while the program only waits; no sign of work
    is_waiting: Callable[[str], bool] = _never
    # Never the volume: an engine may load code from its working directory, and anyone who can write a file there would
    # run code in every container that shares the volume.
    folder: Path = Path("/")
    socket_path: Path | None = None  # unlinked before each start: a stale file makes the next bind fail
    # Created before each start; removed with its contents after each end.
    scratch: Path | None = None
    upkeep: Upkeep | None = None
    # the program is killed after so long without a sign of work, while it loads or while requests wait
    stall_timeout_s: float = 120.0
    # Called before the program counts as stalled. True if it works in a way that its processes do not show, as on a
    # GPU.
    is_at_work: Callable[[], bool] | None = None
    # Requests that wait while the program serves. None: they are not counted, and a serving program never counts as
    # hung.
    demand: Demand | None = None
    # A cheap question, asked now and then while no request waits. None: the program has no such question.
    is_answering: Readiness | None = None
    # Returns a value that differs once the program has worked on a request. None: the program cannot tell.
    work_done: Callable[[], Awaitable[object]] | None = None
    stop_grace_s: float = 2.0  # between SIGTERM and SIGKILL
    last_words_s: float = 1.0  # time after a fatal line to answer clients, write the log and exit by itself
    # Processes of our control group that the kernel's OOM killer has ended so far. None: the count is unknown.
    oom_kills: Callable[[], int | None] | None = None
