"""Loss of quality by a smaller KV cache type, from two runs over the same text, and the verdict. Pure.

Both runs predict the same tokens, so they are compared token by token, and the difficulty of the text cancels out.
Tokens of one chunk share their context, so they are not independent. Chunks start with an empty cache. So the standard
error is that of the means of chunks (non-overlapping batch means: Schmeiser, Operations Research 30, 1982):

    d_i = nll_i(type) - nll_i(f16);  difference = mean(d);  standard error = sd(d) / sqrt(n), sd with n - 1;
    95 % interval: difference -+ t(0.975, n - 1) * standard error.

"Within 1 %" refers to the perplexity, exp(difference) - 1: the geometric mean of how much the probability of the next
token falls. One percent of the nats would be 2 to 4 % of perplexity, and more the harder the text is.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean, stdev

from appliance.engines.engine import ChunkSpec
from appliance.plan import KvCheck

LIMIT = math.log(1.01)  # nats per token
CHUNKS_MIN = 12  # with fewer chunks the interval is wide and its width uncertain
PIECES_GOOD = 24  # from here on longer chunks are better than more of them, since the cache is for long contexts
PIECE_TOKENS = (1024, 512, 256)
BYTES_PER_TOKEN = 5.0  # upper bound for English, so that the text surely has enough tokens
SLOWER = 1.5  # slowdown of prefill by a quantized cache against f16 on a CPU: 1.4 was seen
BUDGET_SHARE = 0.8  # share of the seconds that is planned; the rest is a margin for a slower machine


def extent_for(*, seconds: float, prefill_tokens_per_s: float, text_bytes: int, context: int) -> ChunkSpec | None:
    """Return the amount of text that two runs can read in so many seconds; None if it is too little for a verdict.

    Chunks are as long as possible with at least PIECES_GOOD of them, else of the shortest length.
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
    """Result of one run: the mean nats of each chunk. The first of them is chunk number `first` of the text.

    `key` is that of the plan, including the KV cache type. Two results cover the same tokens if they begin at the same
    chunk and their chunks have the same length. If the engine failed, `error` is its message and nothing else counts.
    """

    key: str
    chunk_tokens: int
    first: int
    nll: tuple[float, ...] = ()
    seconds: float = 0.0
    error: str | None = None


def perplexity(exact: Sequence[ScoredChunk], other: Sequence[ScoredChunk]) -> dict[int, tuple[float, float]]:
    """Return the nats with f16 and with the other type for each chunk that both have read, by its number in the text.

    Only results that begin at the same chunk are compared. All results must have chunks of the same length.
    """
    found: dict[int, tuple[float, float]] = {}
    for one in other:
        for base in (scored_chunk for scored_chunk in exact if scored_chunk.first == one.first):
            for number, pair in enumerate(zip(base.nll, one.nll, strict=False), one.first):
                found.setdefault(number, pair)
    return found


def next_gap(there: Collection[int], chunks: int) -> range:
    """Return the first consecutive chunks out of `chunks` that are missing in `there`; empty if none is missing."""
    first = next((number for number in range(chunks) if number not in there), chunks)
    end = next((number for number in range(first, chunks) if number in there), chunks)
    return range(first, end)


def judge(
    kv_type: str, chunk_spec: ChunkSpec, pairs: Iterable[tuple[float, float]], *, seconds: float = 0.0
) -> KvCheck:
    """Return the verdict. `pairs` are the nats of each chunk, f16 first. The type is accepted only if the whole 95 %
    interval is below the limit; an inconclusive result is a refusal."""
    differences = [other - exact for exact, other in pairs]
    count = len(differences)
    if count < CHUNKS_MIN:
        return refused(kv_type, f"too little text was read: {count} chunks of at least {CHUNKS_MIN}", seconds=seconds)
    if not all(math.isfinite(d) for d in differences):
        return refused(kv_type, "the model's probabilities of the text are not finite numbers", seconds=seconds)
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
    """Return Student's t for a two-sided 95 % interval, exact to 0.001 from 4 degrees of freedom on (Abramowitz and
    Stegun 26.7.5)."""
    z = 1.959964
    terms = (
        z,
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
        (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / 92160,
    )
    return sum(term / float(freedom) ** power for power, term in enumerate(terms))
