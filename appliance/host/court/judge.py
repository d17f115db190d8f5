"""Judges paired times of an old and a new build. Pure.

The slowdown is the Hodges-Lehmann estimate over the pairs' log ratios, with the confidence interval of Wilcoxon's
signed-rank test (Hodges and Lehmann, 1963, Annals of Mathematical Statistics 34; Hollander and Wolfe, Nonparametric
Statistical Methods, 3.2 and 3.3): a few pairs that something slowed down do not move it. Measuring stops when the
interval is short enough, whatever its middle is (Chow and Robbins, 1965, Annals of Mathematical Statistics 36). A stop
at the first good result would favour that result.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from enum import StrEnum
from statistics import NormalDist, median

from appliance.values import dataclass

SLOWER = 0.05  # slowdown that has to be found
LIMIT = SLOWER / 2  # a slowdown above it counts: a true 0 and a true 5 % are equally far away
PRECISE = 0.02  # half of the interval at which measuring stops; each figure is then wrong in less than 1 % of courts
ENOUGH = LIMIT  # half of the interval that still decides: 0 and 5 % cannot both lie in it
WIDEST = 0.10  # half of the interval; above, the machine was not quiet, whatever was seen of other programs
LEAST_PAIRS = 8  # below, the interval of 95 % is that of the two outermost pairs
_Z = NormalDist().inv_cdf(0.975)


class Verdict(StrEnum):
    AS_GOOD = "as good"
    LOST = "lost"
    NOT_DECIDED = "not decided"


@dataclass(frozen=True, kw_only=True)
class Times:
    """Seconds that one build took for the jobs of one pass."""

    prefill_s: float  # from each request to its first token
    decode_s: float  # from the first to the last token


@dataclass(frozen=True, kw_only=True)
class Pair:
    """The same jobs on both builds, one right after the other. It counts only if `disturbance` is empty."""

    old: Times
    new: Times
    disturbance: str = ""


@dataclass(frozen=True, kw_only=True)
class Slowdown:
    """Share by which the new build is slower, with its interval of 95 %; negative if it is faster."""

    what: str
    share: float
    low: float
    high: float

    @property
    def half(self) -> float:
        """Half of the interval's width."""
        return (self.high - self.low) / 2

    @property
    def is_precise(self) -> bool:
        return self.half <= PRECISE

    @property
    def verdict(self) -> Verdict:
        """A wide interval still decides if the limit lies outside of it."""
        is_outside = self.low > LIMIT or self.high < LIMIT
        if self.half > (WIDEST if is_outside else ENOUGH):
            return Verdict.NOT_DECIDED
        return Verdict.LOST if self.share > LIMIT else Verdict.AS_GOOD


@dataclass(frozen=True, kw_only=True)
class Speeds:
    """What the pairs say. `slowdowns` is empty if fewer than `LEAST_PAIRS` of them count."""

    pairs: int
    disturbed: int
    slowdowns: tuple[Slowdown, ...]
    disturbance: str  # the most frequent one; empty if there was none

    @property
    def is_precise(self) -> bool:
        """True if more pairs would change nothing."""
        return bool(self.slowdowns) and all(each.is_precise for each in self.slowdowns)

    @property
    def verdict(self) -> Verdict:
        found = {each.verdict for each in self.slowdowns} or {Verdict.NOT_DECIDED}
        return next(each for each in (Verdict.LOST, Verdict.NOT_DECIDED, Verdict.AS_GOOD) if each in found)

    @property
    def why(self) -> str:
        """Why the speeds are not decided; empty if they are."""
        if self.verdict is not Verdict.NOT_DECIDED:
            return ""
        if self.disturbed:
            return f"{self.disturbed} of {self.pairs + self.disturbed} pairs were disturbed: {self.disturbance}"
        if not self.slowdowns:
            return f"only {self.pairs} of at least {LEAST_PAIRS} pairs were measured in the time limit"
        return "the times of equal work differ too much"


def judge(pairs: Sequence[Pair]) -> Speeds:
    """Judge the pairs so far."""
    good = [pair for pair in pairs if not pair.disturbance]
    disturbances = Counter(pair.disturbance for pair in pairs if pair.disturbance)
    slowdowns: tuple[Slowdown, ...] = ()
    if len(good) >= LEAST_PAIRS:
        slowdowns = (
            _slowdown("prefill", [math.log(pair.new.prefill_s / pair.old.prefill_s) for pair in good]),
            _slowdown("decode", [math.log(pair.new.decode_s / pair.old.decode_s) for pair in good]),
        )
    return Speeds(
        pairs=len(good),
        disturbed=len(pairs) - len(good),
        slowdowns=slowdowns,
        disturbance=disturbances.most_common(1)[0][0] if disturbances else "",
    )


def _slowdown(what: str, logs: Sequence[float]) -> Slowdown:
    """Estimate from the logarithms of new time / old time. The means of all pairs of them, each with itself included,
    are Walsh's averages: their median is the estimate, and the interval ends at the k-th from either side."""
    n = len(logs)
    walsh = sorted((logs[i] + logs[j]) / 2 for i in range(n) for j in range(i, n))
    # The normal approximation of the signed-rank distribution; for 8 values it gives the exact table's k of 4.
    k = max(1, round(n * (n + 1) / 4 - _Z * math.sqrt(n * (n + 1) * (2 * n + 1) / 24)))
    share, low, high = (math.expm1(each) for each in (median(walsh), walsh[k - 1], walsh[-k]))
    return Slowdown(what=what, share=share, low=low, high=high)
