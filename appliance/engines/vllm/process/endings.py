"""The end of a vLLM process as one of the errors of DESIGN.md section 6.

The exit code says nothing: if EngineCore or a worker is killed, the API server still ends with 0. The order of
decisions is in engines/endings.py, the meaning of lines in ending_rules.py. If several processes logged a cause, the
deepest process counts: worker, then EngineCore, then API server.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Iterable, Iterator, Sequence

from appliance.engines.endings import (
    CUT,
    DECISIVE,
    MEMORY,
    MORE,
    OLDER_CPU,
    Judged,
    Rule,
    hint_of_unknown,
    hint_while_serving,
    judge_signal,
    meaning,
    mib_of,
)
from appliance.engines.engine import Ending
from appliance.engines.vllm.process.ending_rules import RULES
from appliance.engines.vllm.process.log import Statement, parse_line, statements
from appliance.errors import (
    CpuUnsupportedError,
    EngineDiedError,
    EngineError,
    EngineHostMemoryError,
    EngineNotReadyError,
    FatalError,
)
from appliance.plan import Shortage

# The exit code None: vLLM noticed the end before the exit code was known. Seen in two of three kills on one machine.
_KILLED = re.compile(r"died unexpectedly \(exit code: (?:-9|None)\)|Failed core proc\(s\): \{[^}]*: -9\b")
_BY_SIGNAL = re.compile(r"died unexpectedly \(exit code: -(\d+)\)|Failed core proc\(s\): \{[^}]*: -(\d+)\b")
_NO_DEVICE = "no device"
_NO_DEVICE_SINCE = re.compile(r"Warning: (CUDA initialization: .*)")  # torch c10/cuda/CUDAFunctions.cpp device_count
_LOST = re.compile(r"Worker proc \S+ died unexpectedly")
_LONGEST = re.compile(r"the estimated maximum model length is (\d+)")
_SIZE = r"(\d[\d.,]*)"
_KV_NEEDED = re.compile(rf"\({_SIZE} GiB KV cache is needed.*available KV cache memory \({_SIZE} GiB\)")
_FREE_OF = re.compile(rf"Free memory on device (\S+) \({_SIZE}/\S+ GiB\) on startup is less than .*, {_SIZE} GiB\)")
_NODE = re.compile(rf"Available memory on node \d+ \({_SIZE}/\S+ GiB\) .* requested memory for kv \({_SIZE}")
_TRIED = re.compile(
    rf"Tried to allocate {_SIZE} (bytes|KiB|MiB|GiB)\. GPU (\d+) .*? of which {_SIZE} (bytes|KiB|MiB|GiB) is free"
)
_TRIED_HOST = re.compile(r"tried to allocate (\d+) bytes")
_MIB = {"bytes": 2.0**-20, "KiB": 2.0**-10, "MiB": 1.0, "GiB": 1024.0}


def as_error(ending: Ending, *, served: bool = False) -> FatalError:
    """Return the error for an ending. `served` is True if the engine had been ready in an earlier start.

    Once the engine has served, every ending is 45 with its first cause, even with exit code 0.
    """
    message = f"engine vllm {ending.describe()}"
    found = None if ending.stalled else _judge(ending)  # if the stall timer ended the engine, its log does not count
    kind, hint, line = found or (EngineNotReadyError, _unknown(ending), None)
    if line is not None and line != ending.first_error:
        message += f"; the cause is {line}"
    was_memory = issubclass(kind, MEMORY)
    if ending.was_ready or served:
        hint = hint_while_serving(kind if found else None, hint)
        kind = EngineDiedError
    if not issubclass(kind, EngineError):
        return kind(message, hint=hint, log=ending.log)
    lack = _lack(line) if was_memory and line else None
    return kind(
        message,
        hint=hint,
        log=ending.log,
        was_memory=was_memory,
        needed_mib=lack.refused_mib if lack else None,
        device=lack.device if lack else None,
    )


def cause_of(ending: Ending) -> tuple[Rule, str] | None:
    """Return the rule that decides and the log line that it matched, from the deepest process. None if no rule
    matches."""
    causes = [each for each in _causes(ending) if not _is_of_a_request(ending, each)]
    for vague in (False, True):
        for each in causes:
            if found := meaning(each.text, RULES, more=each.more, vague=vague):
                reason = _why_no_device(ending) if found.name == _NO_DEVICE else None
                return reason or (found, each.line)
    return None


def _why_no_device(ending: Ending) -> tuple[Rule, str] | None:
    """Return the rule and line of torch's warning on why it found no GPU. The warning is a cause only if the engine
    ended for lack of a GPU."""
    for line in ending.log:
        if warned := _NO_DEVICE_SINCE.search(line):
            found = meaning(warned[1], RULES)
            if found is not None:
                return found, line
    return None


def _is_of_a_request(ending: Ending, statement: Statement) -> bool:
    """True for lines of the API server once it serves: they may contain what clients send, and it uses no GPU."""
    return ending.was_ready and statement.process == "APIServer"


def shortage_of(error: FatalError, lines: Iterable[str]) -> Shortage | None:
    """Return the memory that was missing when the engine ran out while loading. None for any other error, or if the log
    contains no size. `lines` are the whole log."""
    if not isinstance(error, MEMORY):
        return None
    log = (*error.log, *lines)
    causes = [line for line in (error.message, *log) if line is error.message or parse_line(line).is_cause]
    return next((found for line in causes if (found := _lack(line))), None)


def _lack(line: str) -> Shortage | None:
    """Return the sizes in a log line about missing memory, or None. Free memory is taken as printed."""
    if found := _KV_NEEDED.search(line):
        longest = _LONGEST.search(line)
        return Shortage(
            refused_mib=max(0.0, mib_of(found[1]) - mib_of(found[2])) * _MIB["GiB"],
            context=int(longest[1]) if longest else None,
        )
    if found := _FREE_OF.search(line):
        wanted, free = mib_of(found[3], _MIB["GiB"]), mib_of(found[2], _MIB["GiB"])
        return Shortage(refused_mib=wanted, device=found[1], free_mib=free, is_whole=True)
    if found := _TRIED.search(line):
        refused, free = mib_of(found[1], _MIB[found[2]]), mib_of(found[4], _MIB[found[5]])
        return Shortage(refused_mib=refused, device=f"cuda:{found[3]}", free_mib=free)
    if found := _NODE.search(line):
        return Shortage(refused_mib=mib_of(found[2], _MIB["GiB"]), free_mib=mib_of(found[1], _MIB["GiB"]))
    if found := _TRIED_HOST.search(line):
        return Shortage(refused_mib=float(found[1]) * 2.0**-20)
    return None


def _judge(ending: Ending) -> Judged | None:
    """Return class, hint and deciding line of an ending, or None if nothing explains it."""
    if ending.signal in DECISIVE:
        return judge_signal(ending)
    number, by_signal = _signal_of_a_part(ending.log)
    if number == signal.SIGILL:
        return CpuUnsupportedError, OLDER_CPU, by_signal
    if ending.oom_kills and (killed := _line_of_a_kill(ending.log)):
        return EngineHostMemoryError, MORE, killed
    if found := cause_of(ending):
        return found[0].kind, found[0].remedy, found[1]
    if number == signal.SIGBUS:
        return EngineNotReadyError, CUT, by_signal
    return (EngineNotReadyError, _unknown(ending), killed) if (killed := _line_of_a_kill(ending.log)) else None


def _signal_of_a_part(log: Sequence[str]) -> tuple[int | None, str | None]:
    """Return the signal that ended one of the engine's processes and the line that reports it; None for both if
    none."""
    for line in log:
        if found := _BY_SIGNAL.search(line):
            return int(found[1] or found[2]), line
    return None, None


def _line_of_a_kill(log: Sequence[str]) -> str | None:
    """Return the line that reports a killed process, or None. Only the kernel's count of out-of-memory kills tells who
    killed it."""
    return next((line for line in log if _KILLED.search(line) or "engine core exited unexpectedly" in line), None)


def _unknown(ending: Ending) -> str:
    was_killed = _line_of_a_kill(ending.log) is not None and not any(_is_raised(line) for line in ending.log)
    return hint_of_unknown(ending, lost_a_process=was_killed)


def _is_raised(line: str) -> bool:
    """True if a process behind the API server logged a cause of its own end."""
    found = parse_line(line)
    return found.depth > 0 and found.is_cause and not _LOST.match(found.text)


def _causes(ending: Ending) -> Iterator[Statement]:
    """Yield statements that may be the cause: the deepest process first, then in the order of the log. `first_error` is
    put in front if the log, which keeps only the last lines, has lost it."""
    gone = ending.first_error is not None and ending.first_error not in ending.log
    log = (ending.first_error or "", *ending.log) if gone else ending.log
    # Errors before `first_error` belong to single requests that failed earlier.
    begin = log.index(ending.first_error) if ending.was_ready and ending.first_error in log else 0
    found = [each for each in statements(log)[begin:] if each.is_cause]
    yield from sorted(found, key=lambda each: -each.depth)
