"""Whether a smaller type of the KV cache is harmless for this model: the real engine reads one text with both.

Refused is whatever was not shown: a crash, a stall, too little time or text, a result that may be chance. Shown is what
it costs up to 1,024 tokens deep, and nothing of deeper contexts: those would take minutes for each of a dozen pieces.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from appliance.command import Command
from appliance.engines.endings import as_error
from appliance.engines.llama_perplexity import BINARY, Extent, Reading, parse_reading
from appliance.errors import EngineError, EngineNotReadyError
from appliance.plan import Plan, Verdict
from appliance.supervisor import Supervisor
from appliance.tune.measure import Step
from appliance.tune.paired import PIECES_MIN, extent_for, judge, pieces_left, refused

TEXT = Path(__file__).with_name("addresses.txt")  # its source is in addresses.md
EXACT = "f16"
LOG_LINES = 5000
Start = Callable[[Plan, Extent], Command]


@dataclass(frozen=True, kw_only=True)
class _Run:
    reading: Reading
    seconds: float


async def check(
    plan: Plan,
    kinds: Sequence[str],
    start: Start,
    *,
    budget_s: float,
    prefill_tokens_per_s: float,
    load_s: float = 0.0,
    tell: Callable[[Step], None],
) -> tuple[Verdict, ...]:
    """One verdict a kind, in this order, up to the first that is accepted: those after it carry less or are worse.

    Nothing else may use the devices meanwhile. It takes `budget_s` at most, and a moment for the engine to end. An
    ending that another type may mend is a refusal; raises FatalError for a model, a GPU or a CPU that will not do.
    """
    began = time.monotonic()
    extent = extent_for(
        seconds=budget_s,
        load_s=load_s,
        prefill_tokens_per_s=prefill_tokens_per_s,
        text_bytes=TEXT.stat().st_size,
        context=plan.context,
    )
    if plan.is_embedding:
        return tuple(refused(kind, "the model gives vectors and foretells no text") for kind in kinds)
    if extent is None:
        why = f"{budget_s:.0f} s are too short at {prefill_tokens_per_s:,.0f} tokens a second of prefill"
        return tuple(refused(kind, why) for kind in kinds)
    try:
        exact = await _read(replace(plan, kv_type=EXACT), extent, start, left_s=budget_s, tell=tell)
    except EngineError as error:
        return tuple(refused(kind, f"with {EXACT} {error.message}") for kind in kinds)
    verdicts: list[Verdict] = []
    for kind in kinds:
        left_s = budget_s - (time.monotonic() - began)
        pieces = pieces_left(extent, took_s=exact.seconds, load_s=load_s, left_s=left_s)
        other = replace(plan, kv_type=kind)
        verdicts.append(await _against(exact, other, replace(extent, pieces=pieces), start, left_s=left_s, tell=tell))
        if verdicts[-1].is_accepted:
            break
    return tuple(verdicts)


async def _against(
    exact: _Run, plan: Plan, extent: Extent, start: Start, *, left_s: float, tell: Callable[[Step], None]
) -> Verdict:
    if extent.pieces < PIECES_MIN:
        why = f"in the {left_s:.0f} s that are left only {extent.pieces} pieces of text can be read, of {PIECES_MIN}"
        return refused(plan.kv_type, f"{why}: {EXACT} took {exact.seconds:.0f} s")
    try:
        other = await _read(plan, extent, start, left_s=left_s, tell=tell)
    except EngineError as error:
        return refused(plan.kv_type, error.message)
    return judge(plan.kv_type, extent, exact.reading, other.reading, seconds=exact.seconds + other.seconds)


async def _read(plan: Plan, extent: Extent, start: Start, *, left_s: float, tell: Callable[[Step], None]) -> _Run:
    """One run to its end. Raises what `as_error` makes of any other, EngineNotReadyError (43) when the time is up or
    fewer pieces were read than announced: the program ends with 0 all the same."""
    began = time.monotonic()
    tell(Step(plan=plan, what=f"reading {extent.read:,} tokens of text with a KV cache of {plan.kv_type}"))
    lines: deque[str] = deque(maxlen=LOG_LINES)
    supervisor = Supervisor(on_line=lines.append)
    try:
        supervisor.start(start(plan, extent))
        async with asyncio.timeout(max(0.0, left_s)):
            crash = await supervisor.wait_ready() or await supervisor.wait_failed()  # it is never ready
    except TimeoutError as error:
        message = f"engine {BINARY} did not read the text within {left_s:.0f} s"
        raise EngineNotReadyError(message, log=supervisor.log_tail) from error
    finally:
        await supervisor.stop()
    if crash.exit_code != 0 or crash.stalled:
        raise as_error(crash, name=BINARY)
    reading = parse_reading(lines)
    if reading.pieces is None or len(reading.nll) < reading.pieces:
        of = "an unknown number of" if reading.pieces is None else f"{reading.pieces}"
        message = f"engine {BINARY} read {len(reading.nll)} of {of} pieces of text and ended"
        raise EngineNotReadyError(message, hint="its last lines are above", log=crash.log)
    return _Run(reading=reading, seconds=time.monotonic() - began)
