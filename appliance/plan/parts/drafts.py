"""Speculative decoding: the law of its speed-up, and the speed-up expected before anything was measured. Pure.

A step that checks g draft tokens takes 1 + a + b g times as long as one that checks none. It yields 1 + A1 + ... + Ag
tokens, where Ai is the probability that the first i draft tokens are all accepted:

    speedup(g) = (1 + A1 + ... + Ag) / (1 + a + b g)

b is the time of drafting and checking one token. a is the time that any drafting step takes in addition; measuring fits
b alone, since two measurements do not tell the two apart.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Literal

from appliance.plan.parts.speeds import rate
from appliance.values import dataclass

# The goal by which measuring chooses a kind if the user names none. auto: all requests together are faster; stable: no
# kind of request is slower; fast: some kind of request is as fast as possible.
SpeculationGoal = Literal["auto", "stable", "fast"]
# A1, A2, A3 of a model's own draft layers (MTP), by the text that the goal judges by. Published, Qwen3.6-27B in 4 bits;
# sources are in docs/2080ti.md.
# stable: an essay on two RTX 3090, by position 75, 47, 27 %.
# auto: the mean of that and of code, science and prose on two RTX 2080 Ti, where 87.0, 77.2 and 67.9 % of 1, 2 and 3
#   draft tokens were accepted, so 87, 67, 49 % by position.
# fast: 95.5 % of 2 draft tokens, the highest that the log of a published run on two RTX 2080 Ti has.
MTP_ACCEPTED: Mapping[SpeculationGoal, tuple[float, ...]] = MappingProxyType({
    "stable": (0.75, 0.47, 0.27),
    "auto": (0.81, 0.57, 0.38),
    "fast": (0.97, 0.94, 0.91),
})  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class SpeedupModel:
    """The law with its values. `acceptance` is A1, A2, ... as far as known; beyond, the sequence continues
    geometrically."""

    b: float
    acceptance: tuple[float, ...]
    a: float = 0.0

    def chance(self, first: int) -> float:
        """Return the probability that the first `first` draft tokens are all accepted."""
        known = len(self.acceptance)
        if not known or not self.acceptance[-1]:
            return self.acceptance[first - 1] if first <= known else 0.0
        if first <= known:
            return self.acceptance[first - 1]
        return float(self.acceptance[-1] ** (first / known))

    def speedup(self, tokens: int) -> float:
        made = 1 + sum(self.chance(i) for i in range(1, tokens + 1))
        return made / (1 + self.a + self.b * tokens)


def best_tokens(speedup_model: SpeedupModel, sizes: Sequence[int]) -> int:
    """Return the fastest of `sizes` by the law; 0 if none is faster than without draft tokens."""
    best = max(sizes, key=lambda tokens: (speedup_model.speedup(tokens), -tokens))
    return best if speedup_model.speedup(best) > 1 else 0


@dataclass(frozen=True, kw_only=True)
class StepCost:
    """Time of a step that drafts, in steps that do not: `a` and `b` of the law."""

    a: float
    b: float


@dataclass(frozen=True, kw_only=True)
class ExpectedGain:
    """Speed-up by `tokens` draft tokens, expected from published results and not measured.

    `stable`, `auto` and `fast` are the speed-ups of the text that each goal judges by: the kind that gains least, all
    requests, the kind that gains most. `low` and `high` are the limits, over texts and step costs.
    """

    tokens: int
    stable: float
    auto: float
    fast: float
    low: float
    high: float

    def describe(self) -> str:
        """Return words like "1.50 x (1.11 to 2.66) expected with 3 draft tokens"."""
        return f"{self.auto:.2f} x ({self.low:.2f} to {self.high:.2f}) expected with {_tokens(self.tokens)}"

    def describe_speeds(self, tokens_per_s: float, spread: float) -> str:
        """Return words like "56 tok/s (33 to 116) expected with 3 draft tokens, stable 51, fast 78".

        `tokens_per_s` is the predicted speed without draft tokens, off by a factor between e^-`spread` and e^`spread`.
        Both errors are taken as independent.
        """
        below, above = (math.hypot(spread, math.log(end / self.auto)) for end in (self.low, self.high))
        middle = tokens_per_s * self.auto
        ends = f"{rate(middle * math.exp(-below))} to {rate(middle * math.exp(above))}"
        modes = f"stable {rate(tokens_per_s * self.stable)}, fast {rate(tokens_per_s * self.fast)}"
        return f"{rate(middle)} tok/s ({ends}) expected with {_tokens(self.tokens)}, {modes}"


def expected_gain(tokens: int, *, cost: StepCost, cheap: StepCost, dear: StepCost) -> ExpectedGain:
    """Return what `tokens` draft tokens of a model's own draft layers are expected to gain. Published step costs lie
    between `cheap` and `dear`."""
    return ExpectedGain(
        tokens=tokens,
        stable=_speedup(cost, "stable", tokens),
        auto=_speedup(cost, "auto", tokens),
        fast=_speedup(cost, "fast", tokens),
        low=_speedup(dear, "stable", tokens),
        high=_speedup(cheap, "fast", tokens),
    )


def _speedup(cost: StepCost, goal: SpeculationGoal, tokens: int) -> float:
    return SpeedupModel(a=cost.a, b=cost.b, acceptance=MTP_ACCEPTED[goal]).speedup(tokens)


def _tokens(count: int) -> str:
    return f"{count} draft token{'s' * (count > 1)}"
