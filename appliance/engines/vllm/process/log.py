"""Parser for lines of vLLM's log: the process that wrote a line, and whether the line may be the cause of an ending.

A line is `(EngineCore pid=117) ERROR 11-22 23:01:07 [core.py:1586] text`. Each line of a traceback has this prefix too.
A traceback of an uncaught exception, which Python itself prints, has no prefix, or only the process (0.32).
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
# In this order: the name of an exception at the beginning of a line, as at the end of a traceback; pydantic's detail
# line; a usage error (`main.py` in our images, since the launcher starts the module); a process that is gone; messages
# of the linker, the C++ and C libraries, and signals; NCCL.
_CAUSE = re.compile(
    r"^(?:[A-Za-z_]\w*\.)*\w*(?:Error|Exception|OutOfResources|TooOldForTriton|CompilerFailed)(?:_\w+)?(?::|$)"
    r"|^  Value error, "
    r"|^(?:vllm|main\.py)(?: \w+)?: error: "
    r"|^Worker proc \S+ died unexpectedly|error while loading shared libraries|symbol lookup error"
    r"|^terminate called |^ +what\(\): |^Fatal Python error: |^(?:Bus error|Illegal instruction)\b"
    r"|^libgomp: |Watchdog caught collective operation timeout"
    r"|NCCL WARN .*(?:shared memory|No space left|Cuda failure)"
)
# Words with which vLLM says that it continues after an error. They precede the traceback and have the same mark.
_MENDED = re.compile(r"(?i)\bfall(?:ing|s)? ?back\b|\bfallback\b|\b(?:continuing|retrying|skipping|ignored|ignoring)\b")
_MORE_LINES = 8
_BARE = re.compile(r"^AssertionError:?$")
_TUPLE = re.compile(r"^((?:\w+\.)*\w+: )(\(['\"].*\))$")
# Consequences of a failure, never its cause: each reports another process's failure, or the end that we asked for.
_CONSEQUENCE = re.compile(
    r"Engine core initialization failed|WorkerProc initialization failed|EngineDeadError"
    r"|EngineCore encountered an issue|^(?:\w+\.)*CancelledError|^RuntimeError: cancelled$"
    r"|Frontend process failed during engine core initialization"
)
# The pattern includes process and source file: the log also contains text from clients, which must not end the engine.
# Every line of such a text gets a prefix of its own, so it cannot begin like these.
_GONE = re.compile(
    r"\(APIServer[^)]*\) WARNING \S+ \S+ \[core_client\.py:\d+\] \[shutdown\] MPClient: engine core exited "
    r"unexpectedly"
    r"|\(EngineCore[^)]*\) ERROR \S+ \S+ \[multiproc_executor\.py:\d+\] Worker proc \S+ died unexpectedly"
)
_DEPTHS = (("Worker", 2), ("EngineCore", 1))  # by a part of the process's name: VllmWorker-0, Worker_TP1, EngineCore


@dataclass(frozen=True, kw_only=True)
class LogLine:
    """One parsed line. `process`, `level` and `mark` are empty if the line lacks them. `mark` is level, time and place
    in the source; all lines of one message share it."""

    process: str
    level: str
    text: str
    mark: str = ""

    @property
    def depth(self) -> int:
        """Depth of the process: 2 for workers, 1 for EngineCore, 0 for the API server. A failure travels upwards."""
        return next((depth for name, depth in _DEPTHS if name in self.process), 0)

    @property
    def is_cause(self) -> bool:
        """True if this line may be why the engine ended. Lines of level DEBUG, INFO and WARNING never are."""
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
    """One log line together with lines that belong to it. In `text`, strings that Python printed as a tuple are joined,
    and a bare AssertionError gets the asserted expression. `more` are the lines below it, up to the next cause."""

    line: str
    process: str
    depth: int
    is_cause: bool
    text: str
    more: str


def statements(lines: Sequence[str]) -> list[Statement]:
    """Return one statement for each line. Errors after which the engine says that it continues are not causes."""
    parsed = [parse_line(line) for line in lines]
    mended: dict[str, tuple[str, bool]] = {}  # by process: last mark; True if the engine continued
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
    """True if the line may be the cause of an ending. The supervisor keeps the first such line, which nearly always
    comes from the deepest process."""
    return parse_line(line).is_cause


# Warnings about things that are as intended, each with the reason.
_AS_IT_SHOULD = re.compile(
    # Printed on every start, whatever the limit of open files is.
    r"Found ulimit of \d+ and failed to automatically increase"
    # Printed every minute while it compiles or quantises.
    r"|No available shared memory broadcast block found"
    # Printed by the CPU build on every start: effects of our own flags and of the missing Triton.
    r"|Enforce eager set, disabling torch\.compile|Inductor compilation was disabled by user settings"
    r"|Triton is not installed\. triton-cpu is expected|Reset SSM cache type to float32"
    r"|Model Runner V2 requires Triton|libiomp is not found in LD_PRELOAD"
    # A client disconnected, or the supervisor asked the engine to end.
    r"|\[shutdown\] "
)


def is_worth_showing(line: str) -> bool:
    """True for warnings and possible causes. Tracebacks are not shown; the supervisor keeps them for a crash."""
    found = parse_line(line)
    if found.level == "WARNING":
        return _AS_IT_SHOULD.search(found.text) is None
    return found.is_cause


def is_waiting(line: str) -> bool:
    """True for the line that vLLM prints every minute while one process waits for another. It is no sign of work, so it
    does not reset the stall timer."""
    return "No available shared memory broadcast block found" in line


def is_fatal(line: str) -> bool:
    """True if the line reports that one of the engine's processes is gone. The engine then answers no request, but
    takes up to six seconds to end."""
    return _GONE.match(_COLOUR.sub("", line)) is not None
