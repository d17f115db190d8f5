"""Sends the rows of the suite to an engine, whole and streamed, and judges its answers."""

from __future__ import annotations

import asyncio
from typing import Protocol

from appliance.abilities.answer import UNREADABLE, BrokenAnswerError, read_answer, read_count
from appliance.abilities.judge import PASSED, Verdict, failed, not_judged
from appliance.abilities.record import Ability, Result
from appliance.abilities.rows import Body, Judge, Row
from appliance.values import dataclass

ROUTE = "/v1/chat/completions"
COUNT_ROUTE = "/v1/messages/count_tokens"
EXCHANGE_S = 120.0  # limit of one answer
# Greedy first: two runs then give one answer. A small model that repeats itself for ever may end with other numbers.
_SAMPLINGS: tuple[Body, ...] = ({"temperature": 0}, {"temperature": 1, "seed": 1}, {"temperature": 1, "seed": 2})


class Exchanger(Protocol):
    """The way to an engine: its socket, or a gateway before it."""

    async def exchange(self, route: str, body: Body) -> tuple[int, bytes]:
        """Post `body`; return the status and the whole body of the answer. Raises EngineNotReadyError (43)."""
        ...


@dataclass(frozen=True, kw_only=True)
class Offered:
    """What the served model's chat template and the engine's parsers offer; a reason for what they do not."""

    why_no_tools: str = ""
    why_no_reasoning: str = ""


async def check(engine: Exchanger, row: Row, model: str, offered: Offered, *, limit_s: float = EXCHANGE_S) -> Ability:
    """Check one ability. `model` is the name that the engine knows.

    Raises EngineNotReadyError (43) if the engine breaks off, which tells nothing of the model.
    """
    why_not = (offered.why_no_tools if row.tools else "") or (offered.why_no_reasoning if row.needs_reasoning else "")
    if why_not:
        return Ability(name=row.name, whole=Result.NOT_OFFERED, streamed=Result.NOT_OFFERED, reason=why_not)
    if row.judge is None:
        whole = streamed = await _counted(engine, row, model, limit_s=limit_s)
    else:
        whole = await _judged(engine, row, row.judge, model, is_stream=False, limit_s=limit_s)
        streamed = await _judged(engine, row, row.judge, model, is_stream=True, limit_s=limit_s)
    is_failed = Result.FAILED in (whole.result, streamed.result)
    return Ability(
        name=row.name,
        whole=whole.result,
        streamed=streamed.result,
        reason=_reason(whole, streamed),
        then=row.then if is_failed else "",
    )


def _reason(whole: Verdict, streamed: Verdict) -> str:
    if whole.reason == streamed.reason:
        return whole.reason
    told = (whole.reason, f"streamed: {streamed.reason}" if streamed.reason else "")
    return "; ".join(filter(None, told))


async def _counted(engine: Exchanger, row: Row, model: str, *, limit_s: float) -> Verdict:
    """Judge whether a tool's result reaches the prompt: a longer one must make more tokens."""
    counts: list[int] = []
    for body in (row.body, row.longer):
        data = await _asked(engine, COUNT_ROUTE, {"model": model, **body}, limit_s=limit_s)
        if isinstance(data, Verdict):
            return data
        try:
            counts.append(read_count(data))
        except BrokenAnswerError as error:
            return not_judged(str(error))
    return PASSED if counts[0] < counts[1] else failed("the chat template leaves out the results of tools")


async def _judged(engine: Exchanger, row: Row, judge: Judge, model: str, *, is_stream: bool, limit_s: float) -> Verdict:
    """Judge one answer. One that its limit of tokens cut is asked for again, with other random numbers."""
    verdict = PASSED
    for sampling in _SAMPLINGS:
        verdict, is_cut = await ask(engine, row, judge, model, sampling, is_stream=is_stream, limit_s=limit_s)
        if verdict.result is Result.PASSED or not (is_cut and row.is_sure):
            break
    return verdict


async def ask(
    engine: Exchanger,
    row: Row,
    judge: Judge,
    model: str,
    sampling: Body,
    *,
    is_stream: bool = False,
    limit_s: float = EXCHANGE_S,
) -> tuple[Verdict, bool]:
    """Ask once and return the verdict, and True if the answer's limit of tokens cut it.

    Raises EngineNotReadyError (43) if the engine breaks off.
    """
    body: Body = {"model": model, **row.body, **sampling}
    if is_stream:
        body = {**body, "stream": True, "stream_options": {"include_usage": True}}
    data = await _asked(engine, ROUTE, body, limit_s=limit_s)
    if isinstance(data, Verdict):
        return data, False
    try:
        answer = read_answer(data, is_stream=is_stream)
    except BrokenAnswerError as error:
        return failed(str(error)), False
    return judge(answer, row.tools), answer.is_cut


async def _asked(engine: Exchanger, route: str, body: Body, *, limit_s: float) -> bytes | Verdict:
    try:
        async with asyncio.timeout(limit_s):
            status, data = await engine.exchange(route, body)
    except TimeoutError:
        return not_judged(f"the answer took more than {limit_s:.0f} s")
    if status == 500:
        return failed(UNREADABLE)
    return data if status == 200 else failed(f"the engine refused the request with {status}")
