"""Lines of vLLM's log: which process wrote them, and which of them name the cause of an ending.

A line is `(EngineCore pid=117) ERROR 11-22 23:01:07 [core.py:1586] text`, and each line of a traceback has that
beginning too. What Python itself prints of an exception that nobody caught has none, or only the process (0.32).
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Sequence
from itertools import islice

from appliance.values import dataclass

_PROCESS = re.compile(r"^\(([A-Za-z]\w*)(?:-\d+)? pid=\d+\) ?")
_MARK = re.compile(r"^(DEBUG|INFO|WARNING|ERROR|CRITICAL) \d\d-\d\d \d\d:\d\d:\d\d \[[^\]]*\] ?")
_RANK = re.compile(r"^\[rank\d+\]: ?")  # torch/distributed/distributed_c10d.py puts it before a traceback
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
# The name of an exception at the beginning of a line, as Python ends a traceback; what pydantic says below its own; a
# usage error, by `main.py` in our images, whose launcher starts the module; a process that is gone; and what a linker,
# the C library or the kernel's signal leaves.
_CAUSE = re.compile(
    r"^(?:[A-Za-z_]\w*\.)*\w*(?:Error|Exception|OutOfResources|TooOldForTriton|CompilerFailed)(?:_\w+)?(?::|$)"
    r"|^  Value error, "
    r"|^(?:vllm|main\.py)(?: \w+)?: error: "
    r"|^Worker proc \S+ died unexpectedly|error while loading shared libraries|symbol lookup error"
    r"|^terminate called |^ +what\(\): |^Fatal Python error: |^(?:Bus error|Illegal instruction)\b"
    r"|^libgomp: |Watchdog caught collective operation timeout"
    r"|NCCL WARN .*(?:shared memory|No space left|Cuda failure)"
)
# What the engine goes on from in another way: said above the traceback of what it goes on from, with the same mark.
_MENDED = re.compile(r"(?i)\bfall(?:ing|s)? ?back\b|\bfallback\b|\b(?:continuing|retrying|skipping|ignored|ignoring)\b")
_MORE_LINES = 8
_BARE = re.compile(r"^AssertionError:?$")
_TUPLE = re.compile(r"^((?:\w+\.)*\w+: )(\(['\"].*\))$")
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
    """`process`, `level` and `mark` are empty where the line does not tell. `mark` is the same for all lines of one
    message: time and place in the source."""

    process: str
    level: str
    text: str
    mark: str = ""

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
    text = _RANK.sub("", rest[mark.end() :] if mark else rest)
    return LogLine(
        process=process[1] if process else "",
        level=mark[1] if mark else "",
        text=text.rstrip("\r"),
        mark=mark[0] if mark else "",
    )


@dataclass(frozen=True, kw_only=True)
class Statement:
    """A line with what belongs to it. `text` is its meaning in one line: strings that Python printed as a tuple are
    joined, and a bare AssertionError has what was asserted. `more` are the lines below it, up to the next cause."""

    line: str
    process: str
    depth: int
    is_cause: bool
    text: str
    more: str


def statements(lines: Sequence[str]) -> list[Statement]:
    """One for each line. What the engine says to have mended is no cause."""
    parsed = [parse_line(line) for line in lines]
    mended: dict[str, tuple[str, bool]] = {}  # of each process: the mark of its last message, and whether it was mended
    found = []
    for number, (line, each) in enumerate(zip(lines, parsed, strict=True)):
        mark, was_mended = mended.get(each.process, ("", False)) if each.mark else ("", False)
        if each.mark != mark:
            was_mended = not each.is_cause and _MENDED.search(each.text) is not None
            mended[each.process] = each.mark, was_mended
        found.append(
            Statement(
                line=line,
                process=each.process,
                depth=each.depth,
                is_cause=each.is_cause and not was_mended,
                text=_whole(parsed, number) if each.is_cause else each.text,
                more="\n".join(_below(parsed, number)) if each.is_cause else "",
            )
        )
    return found


def _below(parsed: Sequence[LogLine], number: int) -> Iterator[str]:
    said = parsed[number]
    beside = (each for each in parsed[number + 1 :] if each.process == said.process)
    for each in islice(beside, _MORE_LINES):
        if each.mark != said.mark or each.is_cause or each.text.startswith("Traceback "):
            return
        yield each.text


def _whole(parsed: Sequence[LogLine], number: int) -> str:
    said = parsed[number]
    if _BARE.match(said.text):
        above = (each for each in reversed(parsed[:number]) if (each.process, each.mark) == (said.process, said.mark))
        asserted = next((each.text.strip() for each in islice(above, _MORE_LINES) if "assert " in each.text), None)
        return f"{said.text}: {asserted}" if asserted else said.text
    if printed := _TUPLE.match(said.text):
        try:
            return printed[1] + "".join(map(str, ast.literal_eval(printed[2])))
        except (SyntaxError, ValueError):
            return said.text
    return said.text


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
