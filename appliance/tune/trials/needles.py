"""Facts that are hidden in a long text and asked for at its end (needles), to see whether a context holds.

A needle is judged against the same model at a short context: a model that cannot answer there says nothing about the
long one. The answer is judged by token ids, so neither a chat template nor a sampler is needed. The text ends within
the sentence that repeats the fact, and the greedy continuation must be its number.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from appliance.engines.engine import Client
from appliance.plan import NEEDLE_DEPTHS, NeedleRow
from appliance.tune.trials.kv_quality import TEXT

SHORT_TOKENS = 2000
SEED = 20_000
ROW_LIMIT_S = 900.0
_MARGIN_TOKENS = 64  # of the context, for the end of a prompt that was cut at another token, and the answer
_CITIES = ("Valdemar", "Ostrava", "Kilmore", "Tarragona", "Brindisi", "Halmstad")


@dataclass(frozen=True, kw_only=True)
class _Needle:
    fact: str
    ask: str
    answer: str


async def find_needles(
    client: Client,
    context: int,
    *,
    known: Sequence[NeedleRow] = (),
    row_limit_s: float = ROW_LIMIT_S,
    on_row: Callable[[NeedleRow], None] = lambda _: None,
) -> tuple[NeedleRow, ...]:
    """Return a row for each share of NEEDLE_DEPTHS. `context` is the promised length of one request, in tokens.

    `on_row` gets each row at once, and `known` are rows of a check that was interrupted: they are not asked again. A
    row that takes longer than `row_limit_s` is not judged. The caller cancels this when a request comes. Raises what
    the client raises.
    """
    text = await client.tokenize(TEXT.read_text(encoding="utf-8"))
    rows = {row.share: row for row in known if row.context == context}
    for share, needle in zip(NEEDLE_DEPTHS, _needles(), strict=True):
        if share in rows:
            continue
        try:
            async with asyncio.timeout(row_limit_s):
                row = await _judged(client, text, context, share, needle)
        except TimeoutError:
            words = f"reading {context:,} tokens takes more than {row_limit_s / 60:.0f} min here"
            row = NeedleRow(context=context, share=share, verdict="not judged", words=words)
        rows[share] = row
        on_row(row)
    return tuple(rows[share] for share in sorted(NEEDLE_DEPTHS))


async def _judged(client: Client, text: Sequence[int], context: int, share: float, needle: _Needle) -> NeedleRow:
    where = f"at {share:.0%} of {context:,} tokens"
    if context > SHORT_TOKENS and not await _answers(client, text, SHORT_TOKENS, share, needle):
        words = f"the model does not find it at {share:.0%} of {SHORT_TOKENS:,} tokens either"
        return NeedleRow(context=context, share=share, verdict="not judged", words=words)
    if await _answers(client, text, context, share, needle):
        return NeedleRow(context=context, share=share, verdict="passed", words=f"found {where}")
    if context <= SHORT_TOKENS:
        words = f"not found {where}, and no shorter context tells whether the model can"
        return NeedleRow(context=context, share=share, verdict="not judged", words=words)
    words = f"not found {where}, but at {SHORT_TOKENS:,} tokens"
    return NeedleRow(context=context, share=share, verdict="failed", words=words)


async def _answers(client: Client, text: Sequence[int], context: int, share: float, needle: _Needle) -> bool:
    """True if the greedy continuation is the number of the needle."""
    fact, ask = await client.tokenize(needle.fact), await client.tokenize(needle.ask)
    # The number's own tokens depend on what stands before it: they are those that it adds to the question.
    whole = await client.tokenize(needle.ask + needle.answer)
    wanted = _added(ask, whole)
    hay = haystack(text, context - len(fact) - len(whole) - _MARGIN_TOKENS)
    at = int(len(hay) * share)
    prompt = [*hay[:at], *fact, *hay[at:], *whole[: len(whole) - len(wanted)]]
    done = await client.complete(prompt, len(wanted))
    return done.tokens[: len(wanted)] == wanted


def haystack(text: Sequence[int], tokens: int) -> list[int]:
    """Return so many tokens of the text, repeated if it is shorter. Raises ValueError for a context without room."""
    if tokens < 1 or not text:
        message = f"context has no room for a needle: {tokens} tokens are left for the text around it"
        raise ValueError(message)
    return [text[position % len(text)] for position in range(tokens)]


def _added(ask: Sequence[int], whole: Sequence[int]) -> tuple[int, ...]:
    """Return the tokens of `whole` from the first that differs from `ask`."""
    same = next((at for at, (one, other) in enumerate(zip(ask, whole, strict=False)) if one != other), len(ask))
    return tuple(whole[same:])


def _needles() -> tuple[_Needle, ...]:
    """Return a needle for each depth. Different facts, so that no answer can come from an earlier prompt's cache."""
    rng = random.Random(SEED)  # noqa: S311 - the same facts in every check
    cities = rng.sample(_CITIES, len(NEEDLE_DEPTHS))
    numbers = [rng.randrange(100_000, 1_000_000) for _ in NEEDLE_DEPTHS]
    return tuple(
        _Needle(
            fact=f"\n\nRemember this. The secret number of {city} is {number}. It is {number}.\n\n",
            ask=f"\n\nQuestion: What is the secret number of {city}?\nAnswer: The secret number of {city} is",
            answer=f" {number}",
        )
        for city, number in zip(cities, numbers, strict=True)
    )
