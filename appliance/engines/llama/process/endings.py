"""How a llama-server (or another of its programs) ended, as one of the errors of DESIGN.md section 6.

Nearly every bad start exits with 1, and the cause stands some lines above the last. What decides, and in which order,
is in engines/endings.py; what a line means in ending_rules.py. tests/endings holds real ones.
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

# What was refused above such a line was asked for again, in another way: src/llama-context.cpp sched_reserve,
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
    """Which error an ending is; `served` when the engine had been ready before, if not this time.

    `name` is of another of the engine's programs: all print the same lines.

    Only evidence decides: a time-out, a bad flag or a plain SIGKILL is never called memory.
    """
    message = f"engine {name} {ending.describe()}"
    found = None if ending.stalled else _judge(ending)  # whatever it said, the stall timer ended it
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
    """What an engine lacked that ran out of memory as it loaded; None for any other ending, and where its log tells no
    size or no GPU. `lines` are its whole log: what was free stands at its beginning."""
    if not isinstance(error, MEMORY) or error.needed_mib is None:
        return None
    if isinstance(error, EngineHostMemoryError):
        return Shortage(refused_mib=error.needed_mib)
    if error.device is None:
        return None
    free = (found for line in lines if (found := _FREE.search(line)) and found[1] == error.device)
    first = next(free, None)  # a draft model that is loaded after it says so again
    free_mib = float(first[2]) if first else None
    return Shortage(refused_mib=error.needed_mib, device=error.device, free_mib=free_mib)


def _judge(ending: Ending) -> Judged | None:
    """None for what is not understood."""
    if ending.signal in DECISIVE:
        return judge_signal(ending)
    lines = _error_lines(ending)
    if found := _first(lines, _after_retry(ending.log)):
        return found
    vague = ((line, meaning(line, RULES, vague=True)) for line in lines)
    return next(((rule.kind, rule.remedy, line) for line, rule in vague if rule), None)


def _first(lines: Sequence[str], fresh: Collection[str] | None) -> Judged | None:
    """What the first line means that is understood. Of refused allocations the last one counts, if it is among `fresh`
    or that is None, and what is understood after it as something else counts more."""
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
    """True if both name refused buffers, and not the same one in other words."""
    size, other = _size(line), _size(before)
    if size is None:
        return False
    devices = {found[1] or found[2] for text in (line, before) if (found := _DEVICE.search(text))}
    return other is None or not math.isclose(size, other, abs_tol=0.01) or len(devices) > 1


def _after_retry(log: Sequence[str]) -> Collection[str] | None:
    """The lines below the last one that says that something was tried again; None if nothing was."""
    last = max((number for number, line in enumerate(log) if _RETRIED.search(line)), default=None)
    return None if last is None else log[last + 1 :]


def _error_lines(ending: Ending) -> Sequence[str]:
    """From the first error on, without what the engine mended and without lines that it marks as no error."""
    log = ending.log
    if ending.first_error is None:  # what a dynamic linker says need not look like an error
        return () if ending.was_ready else [line for line in log if _may_be_cause(line)]
    # A cause that has left the kept lines still counts; what follows it may have been kept.
    begin = log.index(ending.first_error) if ending.first_error in log else None
    kept = [line for line in log[begin or 0 :] if _may_be_cause(line)]
    return [ending.first_error, *kept] if begin is None else kept


def _may_be_cause(line: str) -> bool:
    return may_be_error(line) and not is_mended(line)


def _needed_mib(line: str | None, log: tuple[str, ...]) -> float | None:
    """The size of the buffer that was refused: at most so much was missing. None where the log tells no size."""
    if line is None:
        return None
    said = (line, *log[log.index(line) if line in log else 0 :])
    return next((size for each in said if (size := _size(each)) is not None), None)


def _size(line: str) -> float | None:
    return next((mib_of(found[1], unit) for pattern, unit in _SIZES if (found := pattern.search(line))), None)


def _device(line: str | None, log: tuple[str, ...]) -> str | None:
    """The engine's name of the GPU whose memory was refused; None for the host's, and where the log names none."""
    for text in (line or "", *reversed(log)):
        if found := _DEVICE.search(text):
            return f"CUDA{found[1] or found[2]}"
    return None
