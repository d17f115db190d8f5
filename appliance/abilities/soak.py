"""Requests that are repeated to see whether an engine keeps answering: tools and documents, streamed and whole."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping

from appliance.abilities import judge
from appliance.abilities.answer import Answer
from appliance.abilities.judge import PASSED, Schemas, Verdict
from appliance.abilities.rows import ROWS, Row
from appliance.abilities.suite import ask
from appliance.engines.json_socket import JsonSocket
from appliance.race import first_of

DOCUMENTS = 20  # answers under a schema, with and without speculative decoding
LEAST_WORKERS = 2


def _is_read(_answer: Answer, _tools: Schemas) -> Verdict:
    return PASSED


# Its answer is long, so that other requests come and go while it runs.
_CHAT = Row(
    name="chat",
    words="a long answer",
    body={"messages": [{"role": "user", "content": "Tell me about the sea in ten sentences."}], "max_tokens": 256},
    judge=_is_read,
    then="",
    tools={},
)
_DOCUMENT = next(row for row in ROWS if row.name == "structured")


def soak_rows(abilities: Mapping[str, str]) -> tuple[Row, ...]:
    """Return a plain chat, and the rows that must pass again: a grammar makes them, and this model passed them."""
    return (_CHAT, *(row for row in ROWS if row.is_sure and row.judge and abilities.get(row.name) == "passed"))


async def soak(
    engine: JsonSocket, rows: tuple[Row, ...], model: str, workers: int, on_verdict: Callable[[str, Verdict], None]
) -> None:
    """Ask without an end, `workers` requests at a time. `on_verdict` gets the row's name and each verdict.

    Never returns. Raises EngineNotReadyError (43) if the engine breaks off.
    """
    numbers = itertools.count(1)

    async def work() -> None:
        for number in numbers:
            row = rows[number % len(rows)]
            sampling = {"temperature": 1, "seed": number}
            is_stream = number // len(rows) % 2 == 0
            verdict, _ = await ask(engine, row, row.judge or _is_read, model, sampling, is_stream=is_stream)
            on_verdict(row.name, verdict)

    for ended in await first_of(*(work() for _ in range(max(LEAST_WORKERS, workers)))):
        if not ended.cancelled():
            ended.result()


async def ask_documents(engine: JsonSocket, model: str, known: int, on_document: Callable[[bool], None]) -> None:
    """Ask for the documents from number `known` on. `on_document` gets True for each answer that fits its schema.

    Raises EngineNotReadyError (43) if the engine breaks off.
    """
    check = _DOCUMENT.judge or judge.forced_call
    for number in range(known, DOCUMENTS):
        verdict, _ = await ask(engine, _DOCUMENT, check, model, {"temperature": 1, "seed": number + 1})
        on_document(verdict == PASSED)
