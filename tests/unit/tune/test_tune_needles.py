"""Needles against a model whose sight is known: it continues with what followed the same words before."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest

from appliance.plan import NEEDLE_DEPTHS, NeedleRow
from appliance.tune.trials.needles import find_needles, haystack
from tests.unit.tune.answering import Answering

CONTEXT = 8192


@dataclass
class Seeing(Answering):
    """A client whose model sees the last `window` tokens, which are words."""

    window: int = 10**9
    is_stuck: bool = False
    asked: list[int] = field(default_factory=list)
    ids: dict[str, int] = field(default_factory=dict)

    async def tokenize(self, text: str, *, as_chat: bool = False) -> list[int]:
        del as_chat
        # Words with the space before them, as tokenizers have it.
        pieces = text.replace(" ", "\0 ").split("\0")
        return [self.ids.setdefault(piece, len(self.ids)) for piece in pieces]

    async def answer(self, prompt: Sequence[int], tokens: int) -> Sequence[int]:
        self.asked.append(len(prompt))
        if self.is_stuck:
            await asyncio.Event().wait()
        words = list(self.ids)
        text = "".join(words[token] for token in prompt[-self.window :])
        city = f"{text.rpartition('secret number of ')[2]} nowhere".split()[0]
        number = text.partition(f"The secret number of {city} is ")[2].split(".")[0] or "unknown"
        return (await self.tokenize(f"x {number}"))[1 : tokens + 1]


def verdicts(rows: Sequence[NeedleRow]) -> dict[float, str]:
    return {row.share: row.verdict for row in rows}


async def test_a_model_that_sees_everything_passes() -> None:
    client = Seeing()
    rows = await find_needles(client, CONTEXT)
    assert verdicts(rows) == dict.fromkeys(sorted(NEEDLE_DEPTHS), "passed")
    assert max(client.asked) <= CONTEXT
    assert max(client.asked) > 0.95 * CONTEXT


async def test_a_window_loses_what_lies_before_it() -> None:
    rows = await find_needles(Seeing(window=3000), CONTEXT)
    assert verdicts(rows) == {0.10: "failed", 0.50: "failed", 0.95: "passed"}
    assert "not found at 10% of 8,192 tokens, but at 2,000 tokens" in rows[0].words


async def test_a_model_that_cannot_answer_at_all_is_not_judged() -> None:
    rows = await find_needles(Seeing(window=5), CONTEXT)
    assert verdicts(rows) == dict.fromkeys(sorted(NEEDLE_DEPTHS), "not judged")


async def test_a_short_context_cannot_fail() -> None:
    assert set(verdicts(await find_needles(Seeing(window=5), 1024)).values()) == {"not judged"}
    assert set(verdicts(await find_needles(Seeing(), 1024)).values()) == {"passed"}


async def test_known_rows_are_not_asked_again() -> None:
    client, told = Seeing(), list[NeedleRow]()
    first = await find_needles(client, CONTEXT, on_row=told.append)
    assert [row.share for row in told] == list(NEEDLE_DEPTHS)
    count = len(client.asked)
    assert await find_needles(client, CONTEXT, known=first) == first
    assert len(client.asked) == count
    await find_needles(client, CONTEXT // 2, known=first)  # of another context: nothing is known
    assert len(client.asked) == 2 * count


async def test_a_row_that_takes_too_long_is_not_judged() -> None:
    rows = await find_needles(Seeing(is_stuck=True), CONTEXT, row_limit_s=0.01)
    assert {row.words for row in rows} == {"reading 8,192 tokens takes more than 0 min here"}
    assert set(verdicts(rows).values()) == {"not judged"}


def test_a_context_without_room_is_refused() -> None:
    with pytest.raises(ValueError, match="no room for a needle"):
        haystack([1, 2, 3], 0)
    assert haystack([1, 2, 3], 5) == [1, 2, 3, 1, 2]
