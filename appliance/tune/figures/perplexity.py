"""What a smaller type of the cache costs, from two runs over the same text, and whether that is harmless: pure.

Both runs foretell the same tokens, so each token has a difference of its own, and what makes a text hard or easy falls
out. Tokens of one piece share their context and are no independent draws; pieces start from an empty cache. So the
standard error is that of the means of pieces (non-overlapping batch means: Schmeiser, Operations Research 30, 1982):

    d_i = nll_i(type) - nll_i(f16);  difference = mean(d);  standard error = sd(d) / sqrt(n), sd with n - 1;
    95 % interval: difference -+ t(0.975, n - 1) * standard error.

"Within 1 %" is of the perplexity, exp(difference) - 1: it says by how much the probability of the next token falls, in
the geometric mean. One per cent of the nats would be 2 to 4 % of perplexity, and more of it the harder the text is.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean, stdev

from appliance.engines.engine import ChunkSpec
from appliance.plan import KvCheck

LIMIT = math.log(1.01)  # nats for each token
CHUNKS_MIN = 12  # with fewer the interval is wide, and its own width a guess
PIECES_GOOD = 24  # from here on longer pieces tell more than more of them: a long context is what the cache is for
PIECE_TOKENS = (1024, 512, 256)
BYTES_PER_TOKEN = 5.0  # of English, at most: so much text is surely there
SLOWER = 1.5  # a quantized cache beside f16, in prefill on a CPU: 1.4 was seen
BUDGET_SHARE = 0.8  # of the seconds, what is planned to be used: the rest is for a machine that is slower than it was


def extent_for(*, seconds: float, prefill_tokens_per_s: float, text_bytes: int, context: int) -> ChunkSpec | None:
    """What two runs can read in so many seconds; None when that is too little for a verdict.

    The longest pieces of which there are enough; the shortest where there are not.
    """
    each_s = seconds * BUDGET_SHARE / (1 + SLOWER)
    tokens = int(min(each_s * prefill_tokens_per_s, text_bytes / BYTES_PER_TOKEN))
    sizes = [size for size in PIECE_TOKENS if size <= context]
    size = next((size for size in sizes if tokens >= PIECES_GOOD * size), min(sizes, default=0))
    if not size or tokens < CHUNKS_MIN * size:
        return None
    return ChunkSpec(chunk_tokens=size, chunks=tokens // size)


@dataclass(frozen=True, kw_only=True)
class ScoredChunk:
    """What one run read: the mean nats of each piece, the first of them being piece `first` of the text.

    `key` is that of the plan it was read with, the cache's type among it. Passages are of the same tokens where they
    begin at the same piece, and pieces are as long. With `error` nothing counts: the engine ended, in these words.
    """

    key: str
    chunk_tokens: int
    first: int
    nll: tuple[float, ...] = ()
    seconds: float = 0.0
    error: str | None = None


def perplexity(exact: Sequence[ScoredChunk], other: Sequence[ScoredChunk]) -> dict[int, tuple[float, float]]:
    """Of each piece that both have read in a passage with the same beginning, by its number in the text: what f16 said
    and what the other type did. All passages are of pieces as long."""
    found: dict[int, tuple[float, float]] = {}
    for one in other:
        for base in (scored_chunk for scored_chunk in exact if scored_chunk.first == one.first):
            for number, pair in enumerate(zip(base.nll, one.nll, strict=False), one.first):
                found.setdefault(number, pair)
    return found


def next_gap(there: Collection[int], chunks: int) -> range:
    """The first pieces in a row that are missing of so many; empty where none is."""
    first = next((number for number in range(chunks) if number not in there), chunks)
    end = next((number for number in range(first, chunks) if number in there), chunks)
    return range(first, end)


def judge(
    kv_type: str, chunk_spec: ChunkSpec, pairs: Iterable[tuple[float, float]], *, seconds: float = 0.0
) -> KvCheck:
    """Of pieces as long as the extent's, f16's figure first. Accepted only when all of the 95 % interval is below the
    limit; what cannot be told is refused."""
    differences = [other - exact for exact, other in pairs]
    count = len(differences)
    if count < CHUNKS_MIN:
        return refused(kv_type, f"too little text was read: {count} chunks of at least {CHUNKS_MIN}", seconds=seconds)
    if not all(math.isfinite(d) for d in differences):
        return refused(kv_type, "the model's probabilities of the text are no numbers", seconds=seconds)
    difference, error = fmean(differences), stdev(differences) / math.sqrt(count)
    low, high = (difference + sign * t_975(count - 1) * error for sign in (-1, 1))
    tokens = count * chunk_spec.scored_in_chunk
    return KvCheck(
        kv_type=kv_type,
        is_accepted=high < LIMIT,
        why=f"{_rule(low, high)}: perplexity {percent(difference)} against f16 "
        f"({percent(low)} to {percent(high)} with 95 %) over {tokens:,} tokens in {count} chunks",
        tokens=tokens,
        chunks=count,
        difference=difference,
        standard_error=error,
        seconds=seconds,
    )


def refused(kv_type: str, why: str, *, seconds: float = 0.0) -> KvCheck:
    return KvCheck(kv_type=kv_type, is_accepted=False, why=f"refused, {why}", seconds=seconds)


def _rule(low: float, high: float) -> str:
    if high < LIMIT:
        return "accepted, it costs less than 1 %"
    return "refused, it costs more than 1 %" if low > LIMIT else "refused, inconclusive whether it costs less than 1 %"


def percent(nats: float) -> str:
    return f"{100 * math.expm1(min(nats, 100.0)):+.2f} %"


def t_975(freedom: int) -> float:
    """Student's t, two-sided 95 %, to 0.001 from 4 degrees of freedom on (Abramowitz and Stegun 26.7.5)."""
    z = 1.959964
    terms = (
        z,
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
        (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / 92160,
    )
    return sum(term / float(freedom) ** power for power, term in enumerate(terms))
