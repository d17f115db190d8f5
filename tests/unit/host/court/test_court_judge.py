"""The judge: planted slowdowns are found, equal builds pass, and nothing is decided from disturbed or few pairs."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from statistics import median

import pytest
from hypothesis import given
from hypothesis import strategies as st

from appliance.host.court.judge import LEAST_PAIRS, SLOWER, Pair, Times, Verdict, judge

NOISE, PAIRS = 0.02, 40  # of 3 s in two minutes
LOGS = st.lists(st.floats(-0.5, 0.5), min_size=LEAST_PAIRS, max_size=30)


def pairs_of(logs: Sequence[float], *, disturbance: str = "") -> list[Pair]:
    """Pairs whose new build takes e^log times as long, for both figures."""
    old = Times(prefill_s=0.5, decode_s=1.0)
    return [
        Pair(
            old=old,
            new=Times(prefill_s=old.prefill_s * math.exp(log), decode_s=old.decode_s * math.exp(log)),
            disturbance=disturbance,
        )
        for log in logs
    ]


def noisy(seed: int, planted: float) -> list[Pair]:
    numbers = random.Random(seed)

    def seconds(mean: float) -> float:
        return mean * numbers.lognormvariate(0, NOISE) * (1.25 if numbers.random() < 0.05 else 1)

    slow = 1 + planted
    return [
        Pair(
            old=Times(prefill_s=seconds(0.5), decode_s=seconds(1)),
            new=Times(prefill_s=seconds(0.5 * slow), decode_s=seconds(slow)),
        )
        for _ in range(PAIRS)
    ]


def test_a_planted_slowdown_is_found_in_19_of_20_and_at_most_one_of_20_is_a_false_alarm() -> None:
    planted = [judge(noisy(seed, SLOWER)).verdict for seed in range(20)]
    equal = [judge(noisy(seed, 0)).verdict for seed in range(100, 120)]
    faster = [judge(noisy(seed, -SLOWER)).verdict for seed in range(200, 220)]
    assert planted.count(Verdict.LOST) >= 19
    assert equal.count(Verdict.LOST) <= 1
    assert equal.count(Verdict.AS_GOOD) >= 18
    assert faster.count(Verdict.AS_GOOD) == 20


@pytest.mark.parametrize("what", ["prefill_s", "decode_s"])
def test_one_figure_that_is_slower_is_enough(what: str) -> None:
    old = Times(prefill_s=1.0, decode_s=1.0)
    new = Times(**{"prefill_s": 1.0, "decode_s": 1.0, what: 1.06})
    found = judge([Pair(old=old, new=new)] * LEAST_PAIRS)
    assert found.verdict is Verdict.LOST
    assert [each.what for each in found.slowdowns if each.verdict is Verdict.LOST] == [what.removesuffix("_s")]


@given(LOGS)
def test_the_estimate_is_in_its_interval_and_the_interval_in_the_pairs(logs: list[float]) -> None:
    for each in judge(pairs_of(logs)).slowdowns:
        least, most = math.expm1(min(logs)) - 1e-9, math.expm1(max(logs)) + 1e-9
        assert least <= each.low <= each.share <= each.high <= most


@given(LOGS)
def test_exchanged_builds_give_the_opposite(logs: list[float]) -> None:
    there, back = (judge(pairs_of([sign * log for log in logs])).slowdowns[0] for sign in (1, -1))
    assert (1 + there.share) * (1 + back.share) == pytest.approx(1)
    assert (1 + there.low) * (1 + back.high) == pytest.approx(1)


@given(LOGS, st.randoms())
def test_the_order_of_the_pairs_does_not_matter(logs: list[float], numbers: random.Random) -> None:
    mixed = list(logs)
    numbers.shuffle(mixed)
    assert judge(pairs_of(logs)) == judge(pairs_of(mixed))


@given(LOGS, st.integers(0, 60))
def test_disturbed_pairs_change_no_figure(logs: list[float], count: int) -> None:
    disturbed = pairs_of([3.0] * count, disturbance="a backup ran")
    found = judge([*disturbed, *pairs_of(logs)])
    assert found.slowdowns == judge(pairs_of(logs)).slowdowns
    assert (found.pairs, found.disturbed) == (len(logs), count)


def test_the_estimate_ignores_a_few_late_pairs() -> None:
    logs = [0.001 * (i % 5 - 2) for i in range(20)] + [0.7, 0.7]
    [prefill, _] = judge(pairs_of(logs)).slowdowns
    assert abs(prefill.share - math.expm1(median(logs))) < 0.003


@pytest.mark.parametrize(
    ("pairs", "why"),
    [
        ([], "only 0 of at least 8 pairs were measured in the time limit"),
        (pairs_of([0.3] * (LEAST_PAIRS - 1)), "only 7 of at least 8 pairs were measured in the time limit"),
        (pairs_of([0.3] * 9, disturbance="a backup ran"), "9 of 9 pairs were disturbed: a backup ran"),
        (pairs_of([0.3, -0.3] * 10), "the times of equal work differ too much"),
        (pairs_of([0.3, 0.9] * 10), "the times of equal work differ too much"),
    ],
)
def test_too_little_decides_nothing(pairs: list[Pair], why: str) -> None:
    found = judge(pairs)
    assert (found.verdict, found.why, found.is_precise) == (Verdict.NOT_DECIDED, why, False)


def test_a_wide_interval_decides_if_the_limit_is_outside() -> None:
    wide = [0.30 + 0.02 * (i % 7 - 3) for i in range(12)]
    for sign, verdict in ((1, Verdict.LOST), (-1, Verdict.AS_GOOD)):
        found = judge(pairs_of([sign * log for log in wide]))
        assert (found.verdict, found.is_precise, found.why) == (verdict, False, "")
