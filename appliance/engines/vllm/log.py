"""Lines of vLLM's log: which process wrote them, and which of them name the cause of an ending.

A line is `(EngineCore pid=117) ERROR 11-22 23:01:07 [core.py:1586] text`, and each line of a traceback has that
beginning too. What Python itself prints of an exception that nobody caught has none, or only the process (0.32).
"""

from __future__ import annotations

import re

from appliance.values import dataclass

_PROCESS = re.compile(r"^\(([A-Za-z]\w*)(?:-\d+)? pid=\d+\) ?")
_MARK = re.compile(r"^(DEBUG|INFO|WARNING|ERROR|CRITICAL) \d\d-\d\d \d\d:\d\d:\d\d \[[^\]]*\] ?")
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
# The name of an exception at the beginning of a line, as Python ends a traceback; what pydantic says below its own; a
# usage error, by `main.py` in our images, whose launcher starts the module; a process that is gone; and what a linker,
# the C library or the kernel's signal leaves.
_CAUSE = re.compile(
    r"^(?:[A-Za-z_]\w*\.)*\w*(?:Error|Exception|OutOfResources)(?::|$)|^  Value error, "
    r"|^(?:vllm|main\.py)(?: \w+)?: error: "
    r"|^Worker proc \S+ died unexpectedly|error while loading shared libraries|symbol lookup error"
    r"|^terminate called |^Fatal Python error: |NCCL WARN .*(?:shared memory|No space left|'out of memory')"
)
# What follows from a failure and never is one: each names another process, or the end that we asked for.
_CONSEQUENCE = re.compile(
    r"Engine core initialization failed|WorkerProc initialization failed|EngineDeadError"
    r"|EngineCore encountered an issue|^(?:\w+\.)*CancelledError|^RuntimeError: cancelled$"
    r"|Frontend process failed during engine core initialization"
)
# With the source that says so: what clients send stands in the log, too, and must end nothing. Each line of it has a
# mark of its own, so that none can begin like these.
_GONE = re.compile(
    r"\(APIServer[^)]*\) WARNING \S+ \S+ \[core_client\.py:\d+\] \[shutdown\] MPClient: engine core exited "
    r"unexpectedly"
    r"|\(EngineCore[^)]*\) ERROR \S+ \S+ \[multiproc_executor\.py:\d+\] Worker proc \S+ died unexpectedly"
)
_DEPTHS = (("Worker", 2), ("EngineCore", 1))  # what a process's name has in it: VllmWorker-0, Worker_TP1, EngineCore


@dataclass(frozen=True, kw_only=True)
class LogLine:
    """`process` and `level` are empty where the line does not tell."""

    process: str
    level: str
    text: str

    @property
    def depth(self) -> int:
        """A worker fails first, then EngineCore for it, then the API server for that one."""
        return next((depth for name, depth in _DEPTHS if name in self.process), 0)

    @property
    def is_cause(self) -> bool:
        """Whether it may be why the engine ended. A line marked as information or warning never is."""
        if self.level not in ("", "ERROR", "CRITICAL"):
            return False
        return _CAUSE.search(self.text) is not None and _CONSEQUENCE.search(self.text) is None


def parse_line(line: str) -> LogLine:
    line = _COLOUR.sub("", line)
    process = _PROCESS.match(line)
    rest = line[process.end() :] if process else line
    mark = _MARK.match(rest)
    text = rest[mark.end() :] if mark else rest
    return LogLine(process=process[1] if process else "", level=mark[1] if mark else "", text=text.rstrip("\r"))


def is_error(line: str) -> bool:
    """Whether it may be the cause of an ending: the first one that is kept is nearly always the deepest process's."""
    return parse_line(line).is_cause


# What it warns of and is as it should be, each with its reason.
_AS_IT_SHOULD = re.compile(
    # On every start, whatever the limit is: what follows in it is no error of anything.
    r"Found ulimit of \d+ and failed to automatically increase"
    # While it compiles or quantises: minutes of silence are said so every minute.
    r"|No available shared memory broadcast block found"
    # Of the CPU build, on every start: what our own flags ask for, and what it does without Triton.
    r"|Enforce eager set, disabling torch\.compile|Inductor compilation was disabled by user settings"
    r"|Triton is not installed\. triton-cpu is expected|Reset SSM cache type to float32"
    r"|Model Runner V2 requires Triton|libiomp is not found in LD_PRELOAD"
    # A client that left; and ours, when it is asked to end.
    r"|\[shutdown\] "
)


def is_worth_showing(line: str) -> bool:
    """Warnings and causes; tracebacks are kept for a crash alone."""
    found = parse_line(line)
    if found.level == "WARNING":
        return _AS_IT_SHOULD.search(found.text) is None
    return found.is_cause


def is_waiting(line: str) -> bool:
    """What it says every minute while one of its processes waits for another: no sign of work, and none of a stall."""
    return "No available shared memory broadcast block found" in line


def is_fatal(line: str) -> bool:
    """Whether one of its processes is gone: it answers nothing more, and takes up to six seconds to end."""
    return _GONE.match(_COLOUR.sub("", line)) is not None
