"""How many tokens to draft, from a few measurements: pure.

A step that checks g draft tokens takes 1 + b g times as long as one that checks none, and gives 1 + A1 + ... + Ag
tokens, Ai being the chance that the first i draft tokens are all right: speedup(g) = (1 + sum A) / (1 + b g). Where a
step drafts only now and then, as n-grams do, the same b counts for the tokens that were drafted: of n tokens, d
drafted and c of those right, ms / base = 1 - c/n + b d/n.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from appliance.plan import SpeculationGoal

NOISE = 0.03  # a gain below it may be chance
NOISE_OF_A_KIND = 0.06  # of one kind of request: a third of the answers
RARELY = 0.02  # draft tokens a token: fewer cannot gain more than noise, and say nothing of b
_BISECTIONS = 40
_WINDOWS = (48, 96, 192)
_GRAM = 4


@dataclass(frozen=True, kw_only=True)
class SpeculationResult:
    """What was measured with `tokens` drafted at most: milliseconds, draft tokens and right ones for each token made.

    `by_kind` is, of each kind of request (chat, edit, summary), the time as a share of that without draft tokens.
    """

    tokens: int
    ms: float
    drafted: float
    accepted: float
    by_kind: tuple[tuple[str, float], ...] = ()

    @property
    def acceptance(self) -> float:
        return self.accepted / self.drafted if self.drafted else 0.0


@dataclass(frozen=True, kw_only=True)
class SpeedupModel:
    """`acceptance` are A1, A2, ... as far as they were measured; beyond, each is the one before times the same."""

    b: float
    acceptance: tuple[float, ...]

    def chance(self, first: int) -> float:
        """That the first `first` draft tokens are all right."""
        known = len(self.acceptance)
        if not known or not self.acceptance[-1]:
            return self.acceptance[first - 1] if first <= known else 0.0
        if first <= known:
            return self.acceptance[first - 1]
        return float(self.acceptance[-1] ** (first / known))

    def speedup(self, tokens: int) -> float:
        return (1 + sum(self.chance(i) for i in range(1, tokens + 1))) / (1 + self.b * tokens)


def fit_speedup(base_ms: float, seen: Sequence[SpeculationResult]) -> SpeedupModel:
    """b by least squares over all that drafted, and the chances from the fewest draft tokens to the most."""
    told = sorted((rate for rate in seen if rate.drafted > 0), key=lambda rate: rate.tokens)
    squares = sum(rate.drafted**2 for rate in told)
    costs = sum(rate.drafted * (rate.ms / base_ms - 1 + rate.accepted) for rate in told)
    chances: tuple[float, ...] = ()
    for rate in told:
        chances = _continued(chances, rate.tokens, rate.tokens * rate.acceptance)
    return SpeedupModel(b=max(0.0, costs / squares) if squares else 0.0, acceptance=chances)


def _continued(chances: tuple[float, ...], tokens: int, right: float) -> tuple[float, ...]:
    """On to A`tokens`, so that all add up to `right`, the draft tokens that were right in a step; each the one before
    times the same, which lies between 0 and 1."""
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


def best_tokens(speedup_model: SpeedupModel, sizes: Sequence[int]) -> int:
    """The fastest of `sizes` by the law; 0 where none is faster than drafting nothing."""
    best = max(sizes, key=lambda tokens: (speedup_model.speedup(tokens), -tokens))
    return best if speedup_model.speedup(best) > 1 else 0


def next_tokens(base_ms: float | None, seen: Sequence[SpeculationResult], sizes: Sequence[int]) -> int | None:
    """What to measure next: without draft tokens, the smallest, the law's best, and those beside it; then None.

    `sizes` are in order. None also when draft tokens are too rare for anything to be won.
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
    """The fastest measured; None when it is not faster than without draft tokens by more than the noise, or hardly
    drafted: then something else made it faster. `stable` leaves out what made any kind of request slower, and `fast`
    goes by the kind that gains most."""
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
    """Whether an answer goes round in circles: in some stretch of 48, 96 or 192 tokens less than half of all sequences
    of four are new. What loops is drafted perfectly, and nobody wants it; text and code repeat far less."""
    grams = list(zip(*(tokens[i:] for i in range(_GRAM)), strict=False))
    for context in _WINDOWS:
        size = context - _GRAM + 1
        for begin in range(0, len(grams) - size + 1, _GRAM):
            if len(set(itertools.islice(grams, begin, begin + size))) * 2 < size:
                return True
    return False
