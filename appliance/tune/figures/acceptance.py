"""Number of draft tokens to use, computed from a few measurements. Pure.

The law is the planner's (`plan/parts/drafts.py`), with a = 0. If only some steps draft, as with n-grams, the same b
applies to the drafted tokens: for n tokens with d drafted and c accepted, ms / base = 1 - c/n + b d/n.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from appliance.plan import SpeculationGoal, SpeedupModel, best_tokens

NOISE = 0.03  # a smaller gain may be chance
NOISE_OF_A_KIND = 0.06  # the same for one kind of request, which has a third of the answers
RARELY = 0.02  # draft tokens per token: with fewer no gain exceeds the noise, and b cannot be fitted
_BISECTIONS = 40
_WINDOWS = (48, 96, 192)
_GRAM = 4


@dataclass(frozen=True, kw_only=True)
class SpeculationResult:
    """Measurement with at most `tokens` draft tokens: ms, draft tokens and accepted ones for each generated token.

    `by_kind` is the time relative to that without draft tokens, for each kind of request (chat, edit, summary).
    """

    tokens: int
    ms: float
    drafted: float
    accepted: float
    by_kind: tuple[tuple[str, float], ...] = ()

    @property
    def acceptance(self) -> float:
        return self.accepted / self.drafted if self.drafted else 0.0


def fit_speedup(base_ms: float, seen: Sequence[SpeculationResult]) -> SpeedupModel:
    """Fit the law: b by least squares over all results with drafts, the probabilities from the fewest draft tokens to
    the most."""
    told = sorted((rate for rate in seen if rate.drafted > 0), key=lambda rate: rate.tokens)
    squares = sum(rate.drafted**2 for rate in told)
    costs = sum(rate.drafted * (rate.ms / base_ms - 1 + rate.accepted) for rate in told)
    chances: tuple[float, ...] = ()
    for rate in told:
        chances = _continued(chances, rate.tokens, rate.tokens * rate.acceptance)
    return SpeedupModel(b=max(0.0, costs / squares) if squares else 0.0, acceptance=chances)


def _continued(chances: tuple[float, ...], tokens: int, right: float) -> tuple[float, ...]:
    """Continue the probabilities up to A`tokens` so that they add up to `right`, the accepted draft tokens per step.
    The new ones form a geometric sequence with a ratio between 0 and 1."""
    more = tokens - len(chances)
    if more < 1:
        return chances
    last, missing = chances[-1] if chances else 1.0, right - sum(chances)
    low, high = 0.0, 1.0
    for _ in range(_BISECTIONS):
        middle = (low + high) / 2
        if last * sum(middle**i for i in range(1, more + 1)) < missing:
            low = middle
        else:
            high = middle
    ratio = low if high < 1.0 else 1.0
    return (*chances, *(last * ratio**i for i in range(1, more + 1)))


def next_tokens(base_ms: float | None, seen: Sequence[SpeculationResult], sizes: Sequence[int]) -> int | None:
    """Return the number of draft tokens to measure next: 0, then the smallest size, then the law's best and its
    neighbours; then None.

    `sizes` are sorted. None also if draft tokens are too rare for any gain.
    """
    if base_ms is None:
        return 0
    if not seen:
        return sizes[0]
    if all(rate.drafted < RARELY for rate in seen):
        return None
    measured = {rate.tokens for rate in seen}
    speedup_model = fit_speedup(base_ms, seen)
    star = best_tokens(speedup_model, sizes)
    if not star:
        return None
    at = sizes.index(star)
    beside = sorted((*sizes[at + 1 : at + 2], *sizes[max(0, at - 1) : at]), key=speedup_model.speedup, reverse=True)
    return next((tokens for tokens in (star, *beside) if tokens not in measured), None)


def chosen(
    base_ms: float, seen: Sequence[SpeculationResult], goal: SpeculationGoal = "auto"
) -> SpeculationResult | None:
    """Return the fastest result, or None if its gain is within the noise. Results with hardly any draft tokens do not
    count, since their gain has another cause.

    Goal `stable` excludes results that made any kind of request slower. Goal `fast` judges by the kind that gains most.
    """
    able = [rate for rate in seen if rate.drafted >= RARELY]
    if goal == "stable":
        able = [rate for rate in able if all(share <= 1 + NOISE for _, share in rate.by_kind)]
    if goal == "fast":
        most = [(min((share for _, share in rate.by_kind), default=1.0), rate) for rate in able]
        share, fastest = min(most, key=lambda pair: pair[0], default=(1.0, None))
        return fastest if share < 1 - NOISE_OF_A_KIND else None
    fastest = min(able, key=lambda rate: rate.ms, default=None)
    return fastest if fastest is not None and fastest.ms < base_ms * (1 - NOISE) else None


def is_looping(tokens: Sequence[int]) -> bool:
    """True if an answer repeats itself: in some stretch of 48, 96 or 192 tokens less than half of all sequences of four
    tokens are distinct. Text and code repeat far less. Loops are excluded since they are drafted perfectly, but are of
    no use."""
    grams = list(zip(*(tokens[i:] for i in range(_GRAM)), strict=False))
    for context in _WINDOWS:
        size = context - _GRAM + 1
        for begin in range(0, len(grams) - size + 1, _GRAM):
            if len(set(itertools.islice(grams, begin, begin + size))) * 2 < size:
                return True
    return False
