"""Computes the figures of one row from its answers. Pure.

The terms are defined as in other benchmarks. TTFT: from just before the request is sent to the first token. Prefill =
prompt tokens / TTFT; with parallel requests this includes their waiting time. Decode = (tokens - 1) / (last token -
first token), of one request. Throughput = all tokens of the row / its duration.
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import pairwise

from appliance.host.bench.stream import Answer
from appliance.values import dataclass


@dataclass(frozen=True, kw_only=True)
class Sample:
    """One request: its answer, or why there is none."""

    started_s: float
    ended_s: float
    answer: Answer | None = None
    failure: str | None = None
    too_long: str | None = None  # the server's message if the prompt does not fit its context


@dataclass(frozen=True, kw_only=True)
class Spread:
    mean: float
    p50: float
    p95: float
    p99: float


@dataclass(frozen=True, kw_only=True)
class Row:
    """One prompt length at one concurrency. A figure is None if no request gave it."""

    prompt: int  # requested prompt length in tokens
    concurrency: int
    answered: int = 0
    failures: Mapping[str, int]  # reason -> how often
    skipped: str | None = None
    duration_s: float = 0.0
    prompt_tokens: float | None = None  # prompt tokens counted by the server, median of the requests
    completion_tokens: float | None = None
    cached_share: float = 0.0  # share of prompt tokens that came from the server's prompt cache
    tokens_per_chunk: float | None = None
    prefill_tokens_per_s: Spread | None = None
    decode_tokens_per_s: Spread | None = None
    throughput_tokens_per_s: float | None = None
    ttft_ms: Spread | None = None
    inter_token_ms: Spread | None = None

    @property
    def failed(self) -> int:
        return sum(self.failures.values())


def skipped(prompt: int, concurrency: int, reason: str) -> Row:
    return Row(prompt=prompt, concurrency=concurrency, failures={}, skipped=reason)


def row_of(prompt: int, concurrency: int, samples: Sequence[Sample]) -> Row:
    failures = Counter(sample.failure for sample in samples if sample.failure)
    good = [sample for sample in samples if sample.answer]
    answers = [sample.answer for sample in good if sample.answer]
    if not answers:
        return Row(prompt=prompt, concurrency=concurrency, failures=dict(failures))
    duration_s = max(sample.ended_s for sample in good) - min(sample.started_s for sample in good)
    tokens = sum(answer.completion_tokens for answer in answers)
    return Row(
        prompt=prompt,
        concurrency=concurrency,
        answered=len(answers),
        failures=dict(failures),
        duration_s=duration_s,
        prompt_tokens=statistics.median(answer.prompt_tokens for answer in answers),
        completion_tokens=statistics.median(answer.completion_tokens for answer in answers),
        cached_share=sum(each.cached_tokens for each in answers) / max(1, sum(each.prompt_tokens for each in answers)),
        tokens_per_chunk=tokens / sum(len(answer.chunk_at_s) for answer in answers),
        prefill_tokens_per_s=_spread([each.prompt_tokens / ttft_s(each) for each in answers if ttft_s(each) > 0]),
        decode_tokens_per_s=_spread([1000.0 / ms for ms in _token_ms(answers) if ms > 0]),
        throughput_tokens_per_s=tokens / duration_s if duration_s > 0 else None,
        ttft_ms=_spread([1000.0 * ttft_s(answer) for answer in answers]),
        inter_token_ms=_inter_token_ms(answers),
    )


def ttft_s(answer: Answer) -> float:
    return answer.chunk_at_s[0]


def percentile(values: Sequence[float], share: float) -> float:
    """Return the percentile, linear between the two nearest values, as numpy's default."""
    ordered = sorted(values)
    place = share * (len(ordered) - 1)
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def _spread(values: Sequence[float]) -> Spread | None:
    if not values:
        return None
    p50, p95, p99 = (percentile(values, share) for share in (0.50, 0.95, 0.99))
    return Spread(mean=statistics.fmean(values), p50=p50, p95=p95, p99=p99)


def _token_ms(answers: Sequence[Answer]) -> list[float]:
    """Return the average time per token of each request with two tokens or more; exact for any number of tokens in a
    chunk."""
    return [
        1000.0 * (answer.chunk_at_s[-1] - answer.chunk_at_s[0]) / (answer.completion_tokens - 1)
        for answer in answers
        if answer.completion_tokens > 1 and len(answer.chunk_at_s) > 1
    ]


def _inter_token_ms(answers: Sequence[Answer]) -> Spread | None:
    """Return inter-token latency. The mean is per token; the percentiles are of the gaps between chunks, in which a
    stall shows."""
    gaps = [1000.0 * (after - before) for answer in answers for before, after in pairwise(answer.chunk_at_s)]
    means = _token_ms(answers)
    if not gaps or not means:
        return None
    p50, p95, p99 = (percentile(gaps, share) for share in (0.50, 0.95, 0.99))
    return Spread(mean=statistics.fmean(means), p50=p50, p95=p95, p99=p99)
