"""How an engine ended without a request to stop: as data and in words."""

from __future__ import annotations

import signal as signals

from appliance.values import dataclass

SIGNAL_WORDS = {
    signals.SIGILL: "illegal instruction: this CPU lacks one that the program uses",
    signals.SIGABRT: "it aborted itself",
    signals.SIGBUS: "bus error: a mapped file was cut short, or /dev/shm is full",
    signals.SIGSEGV: "segmentation fault",
    signals.SIGKILL: "sent from outside: it may be the kernel's memory killer",
}
BY_MEMORY_KILLER = "by the kernel's memory killer"
NOT_BY_MEMORY_KILLER = "sent from outside, and not by the kernel's memory killer"


@dataclass(frozen=True, kw_only=True)
class Hang:
    """A hang of a serving program: what it did not do, in words, and for how many seconds."""

    words: str
    seconds: float


@dataclass(frozen=True, kw_only=True)
class Crash:
    """One ending. If `exit_code` and `signal` are both None, the program could not be executed, or it outlived even
    SIGKILL.

    `first_error` is the first line that looks like an error: before readiness in the whole log, afterwards among the
    kept lines. `seconds` is the time from start to end.
    """

    exit_code: int | None
    signal: int | None
    first_error: str | None
    log: tuple[str, ...] = ()  # the last lines, at most 200, oldest first
    was_ready: bool = False
    # True: killed by us after Command.stall_timeout_s without a sign of work, or because it `hung`
    stalled: bool = False
    hung: str = ""  # why it was killed as hung while serving, in words; empty: it was not
    hung_s: float = 0.0  # duration of the hang
    seconds: float
    # True: ended by us after its log reported that a part of it is gone; code and signal are None then
    gave_up: bool = False
    stopped: bool = False  # True: not a crash; stop() was called before the program was ready
    not_executed: bool = False  # True: the program could not be executed; `first_error` says why
    # Processes of our control group that the kernel's OOM killer ended in that time; None: the count is unknown.
    oom_kills: int | None = None

    @property
    def outlived_kill(self) -> bool:
        """True if SIGKILL did not end it, as with a stuck driver. Its memory is then still taken."""
        is_otherwise = self.gave_up or self.stopped or self.not_executed
        return self.exit_code is None and self.signal is None and not is_otherwise

    def describe(self) -> str:
        """Return a sentence without a subject and without a final period: "exited with code 1 before it was ready:
        …"."""
        if self.not_executed:
            return f"could not be started again: {self.first_error}"
        when = f"while serving, after {self.seconds:.1f} s" if self.was_ready else "before it was ready"
        cause = f": {self.first_error}" if self.first_error else ""
        return f"{self._ending()} {when}{cause}"

    def _ending(self) -> str:
        if self.stopped:
            return "was stopped on request"
        if self.hung:
            return f"hung and {'did not end even after SIGKILL' if self.outlived_kill else 'was killed'} ({self.hung})"
        if self.stalled:
            return f"made no progress (no log line, no CPU time) and was killed {self.seconds:.1f} s after its start,"
        if self.gave_up:
            return "lost a process that it needs and was ended"
        if self.signal is not None:
            return f"was killed by {_signal_in_words(self.signal, self.oom_kills)}"
        if self.exit_code is not None:
            return f"exited with code {self.exit_code}"
        return "did not end even after SIGKILL"


def _signal_in_words(number: int, oom_kills: int | None) -> str:
    try:
        known = signals.Signals(number)
    except ValueError:
        return f"signal {number}"
    words = SIGNAL_WORDS.get(known)
    if known is signals.SIGKILL and oom_kills is not None:
        words = BY_MEMORY_KILLER if oom_kills else NOT_BY_MEMORY_KILLER
    return f"{known.name} ({words})" if words else known.name
