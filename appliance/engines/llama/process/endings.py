"""The ending of llama-server, or of another engine program, as one of the errors of DESIGN.md section 6.

Nearly every failed start exits with 1, and the cause is some lines above the last. engines/endings.py decides in which
order evidence counts, ending_rules.py what a line means. tests/endings holds real logs.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterable, Sequence

from appliance.engines.endings import (
    DECISIVE,
    MEMORY,
    Judged,
    hint_of_unknown,
    hint_while_serving,
    judge_signal,
    meaning,
    mib_of,
)
from appliance.engines.engine import Ending
from appliance.engines.llama.process.ending_rules import RULES
from appliance.engines.llama.process.log import is_mended, may_be_error
from appliance.errors import (
    EngineDiedError,
    EngineError,
    EngineHostMemoryError,
    EngineNotReadyError,
    FatalError,
)
from appliance.plan import Shortage

_NAME = "llama-server"

# After such a line the engine repeats a refused allocation in another way: src/llama-context.cpp sched_reserve,
# common/fit.cpp common_fit_params.
_RETRIED = re.compile(r"\b(?:retry|retrying|trying again) with(?:out)?\b|\bretry succeeded\b|\bto fit params\b")
_DEVICE = re.compile(r"on device (\d+)|\bCUDA(\d+) buffer")
_FREE = re.compile(r"using device (CUDA\d+) .* - (\d+) MiB free")
_SIZES: tuple[tuple[re.Pattern[str], float], ...] = (
    (re.compile(r"allocating ([0-9][0-9.,]*) MiB on device"), 1.0),
    (re.compile(r"allocate +([0-9][0-9.,]*) Mi?B"), 1.0),  # it says MB and means 2^20 bytes
    (re.compile(r"buffer of size ([0-9][0-9.,]*) MiB"), 1.0),
    (re.compile(r"buffer of size ([0-9]+)"), 2.0**-20),
)


def as_error(ending: Ending, *, served: bool = False, name: str = _NAME) -> FatalError:
    """Return the error for an ending.

    `served`: an earlier process of this engine was ready. `name` is the program's; all programs print the same lines.
    Only evidence decides: a time-out, a bad flag or a plain SIGKILL is never called a lack of memory.
    """
    message = f"engine {name} {ending.describe()}"
    found = None if ending.stalled else _judge(ending)  # the stall timer ended it, so its log does not count
    kind, hint, line = found or (EngineNotReadyError, hint_of_unknown(ending), None)
    if line is not None and line != ending.first_error:
        message += f"; the cause is {line}"
    was_memory = issubclass(kind, MEMORY)
    needed_mib = _needed_mib(line, ending.log) if was_memory else None
    if ending.was_ready or served:
        hint = hint_while_serving(kind if found else None, hint)
        kind = EngineDiedError
    if issubclass(kind, EngineError):
        device = _device(line, ending.log) if was_memory else None
        return kind(message, hint=hint, log=ending.log, was_memory=was_memory, needed_mib=needed_mib, device=device)
    return kind(message, hint=hint, log=ending.log)


def shortage_of(error: FatalError, lines: Iterable[str]) -> Shortage | None:
    """Return the memory that an engine lacked while it loaded.

    None for any other ending, and if the log does not tell the size or the GPU. `lines` is the whole log, because the
    free memory is at its beginning.
    """
    if not isinstance(error, MEMORY) or error.needed_mib is None:
        return None
    if isinstance(error, EngineHostMemoryError):
        return Shortage(refused_mib=error.needed_mib)
    if error.device is None:
        return None
    free = (found for line in lines if (found := _FREE.search(line)) and found[1] == error.device)
    first = next(free, None)  # the first: a draft model, which is loaded later, prints such a line too
    free_mib = float(first[2]) if first else None
    return Shortage(refused_mib=error.needed_mib, device=error.device, free_mib=free_mib)


def _judge(ending: Ending) -> Judged | None:
    """Return the error kind, the remedy and the line of the cause; None if nothing in the log is understood."""
    if ending.signal in DECISIVE:
        return judge_signal(ending)
    lines = _error_lines(ending)
    if found := _first(lines, _after_retry(ending.log)):
        return found
    vague = ((line, meaning(line, RULES, vague=True)) for line in lines)
    return next(((rule.kind, rule.remedy, line) for line, rule in vague if rule), None)


def _first(lines: Sequence[str], fresh: Collection[str] | None) -> Judged | None:
    """Return the meaning of the first line that a rule understands; None if there is none.

    Refused allocations are different: the last one counts, and a later line with another meaning counts more. A refused
    allocation counts only if its line is in `fresh`; if `fresh` is None, every one counts.
    """
    found: Judged | None = None
    for line in lines:
        rule = meaning(line, RULES)
        if rule is None:
            continue
        judged = rule.kind, rule.remedy, line
        if not issubclass(rule.kind, MEMORY):
            return judged
        if (fresh is None or line in fresh) and (found is None or _is_another(line, found[2] or "")):
            found = judged
    return found


def _is_another(line: str, before: str) -> bool:
    """Return True if both lines name refused buffers, and not the same buffer in other words."""
    size, other = _size(line), _size(before)
    if size is None:
        return False
    devices = {found[1] or found[2] for text in (line, before) if (found := _DEVICE.search(text))}
    return other is None or not math.isclose(size, other, abs_tol=0.01) or len(devices) > 1


def _after_retry(log: Sequence[str]) -> Collection[str] | None:
    """Return the lines after the engine's last retry; None if it did not retry."""
    last = max((number for number, line in enumerate(log) if _RETRIED.search(line)), default=None)
    return None if last is None else log[last + 1 :]


def _error_lines(ending: Ending) -> Sequence[str]:
    """Return the log from the first error on, without lines that are no error or that the engine recovered from."""
    log = ending.log
    if ending.first_error is None:  # lines of a dynamic linker may not look like errors
        return () if ending.was_ready else [line for line in log if _may_be_cause(line)]
    # The first error counts even if it is no longer among the kept lines.
    begin = log.index(ending.first_error) if ending.first_error in log else None
    kept = [line for line in log[begin or 0 :] if _may_be_cause(line)]
    return [ending.first_error, *kept] if begin is None else kept


def _may_be_cause(line: str) -> bool:
    return may_be_error(line) and not is_mended(line)


def _needed_mib(line: str | None, log: tuple[str, ...]) -> float | None:
    """Return the MiB of the refused buffer, which is the most that was missing; None if the log tells no size."""
    if line is None:
        return None
    said = (line, *log[log.index(line) if line in log else 0 :])
    return next((size for each in said if (size := _size(each)) is not None), None)


def _size(line: str) -> float | None:
    return next((mib_of(found[1], unit) for pattern, unit in _SIZES if (found := pattern.search(line))), None)


def _device(line: str | None, log: tuple[str, ...]) -> str | None:
    """Return the engine's name of the GPU that refused memory; None if the log names none."""
    for text in (line or "", *reversed(log)):
        if found := _DEVICE.search(text):
            return f"CUDA{found[1] or found[2]}"
    return None
