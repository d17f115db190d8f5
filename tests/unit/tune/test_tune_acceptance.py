"""How many tokens to guess: the law, what is measured next, and what is never chosen."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from appliance.plan import SpeculationGoal, SpeedupModel, best_tokens
from appliance.tune.figures.acceptance import (
    NOISE,
    NOISE_OF_A_KIND,
    SpeculationResult,
    chosen,
    fit_speedup,
    is_looping,
    next_tokens,
)

SIZES = tuple(range(1, 9))
# llama.cpp PR 22673: MTP of Qwen3.6-35B-A3B with its experts in RAM, tok/s and aggregated acceptance.
BASE, PUBLISHED = 22.92, ((1, 27.58, 0.884), (2, 29.39, 0.815), (3, 27.78, 0.713), (4, 26.09, 0.642))


def of_every_step(tokens: int, ms: float, acceptance: float) -> SpeculationResult:
    """Return the result of a speculation that drafts `tokens` in every step; `acceptance` is the share that is
    right."""
    steps = 1 / (1 + tokens * acceptance)
    return SpeculationResult(tokens=tokens, ms=ms, drafted=tokens * steps, accepted=tokens * acceptance * steps)


def published(count: int) -> list[SpeculationResult]:
    return [of_every_step(tokens, 1000 / speed, share) for tokens, speed, share in PUBLISHED[:count]]


def true_rate(speedup_model: SpeedupModel, tokens: int, base_ms: float = 100.0) -> SpeculationResult:
    right = sum(speedup_model.chance(i) for i in range(1, tokens + 1))
    return of_every_step(tokens, base_ms / speedup_model.speedup(tokens), right / tokens)


def test_one_parameter_says_the_four_published_speeds() -> None:
    speedup_model = fit_speedup(1000 / BASE, published(4))
    assert speedup_model.b == pytest.approx(0.532, abs=0.005)
    for tokens, speed, _ in PUBLISHED:
        assert BASE * speedup_model.speedup(tokens) == pytest.approx(speed, rel=0.022)
    assert best_tokens(speedup_model, SIZES) == 2


def test_the_first_of_the_published_points_finds_the_best() -> None:
    assert best_tokens(fit_speedup(1000 / BASE, published(1)), SIZES) == 2


def test_what_is_measured_in_turn() -> None:
    base_ms = 1000 / BASE
    assert next_tokens(None, [], SIZES) == 0
    assert next_tokens(base_ms, [], SIZES) == 1
    assert next_tokens(base_ms, published(1), SIZES) == 2
    assert next_tokens(base_ms, published(2), SIZES) == 3
    assert next_tokens(base_ms, published(3), SIZES) is None
    best = chosen(base_ms, published(3))
    assert best is not None
    assert best.tokens == 2


def of_kinds(tokens: int, chat: float, edit: float) -> SpeculationResult:
    """Return a result with the time of each kind of request, relative to the time without speculation."""
    rate = of_every_step(tokens, 100 * (chat + edit) / 2, 0.5)
    return replace(rate, by_kind=(("chat", chat), ("edit", edit)))


@pytest.mark.parametrize(("goal", "tokens"), [("auto", 2), ("stable", 1), ("fast", 4)])
def test_what_is_wanted_of_guessing_decides(goal: SpeculationGoal, tokens: int) -> None:
    found = chosen(100.0, [of_kinds(1, 0.99, 0.9), of_kinds(2, 1.1, 0.5), of_kinds(4, 1.6, 0.4)], goal)
    assert found is not None
    assert found.tokens == tokens


def test_a_gain_of_one_kind_within_its_noise_or_without_guesses_is_none() -> None:
    within = of_kinds(2, 1.2, 1.01 - NOISE_OF_A_KIND)
    rare = replace(of_kinds(2, 1.0, 0.5), drafted=0.0)
    assert chosen(100.0, [within, rare], "fast") is None
    assert chosen(100.0, [], "fast") is None


def test_a_first_guess_that_does_not_pay_ends_it() -> None:
    slow = of_every_step(1, 120.0, 0.3)
    assert next_tokens(100.0, [slow], SIZES) is None
    assert chosen(100.0, [slow]) is None


def test_guesses_that_hardly_ever_come_end_it() -> None:
    quicker = SpeculationResult(
        tokens=8, ms=50.0, drafted=0.01, accepted=0.01
    )  # as on a machine that others left meanwhile
    assert next_tokens(100.0, [quicker], (8, 16)) is None
    assert chosen(100.0, [quicker]) is None
    assert next_tokens(100.0, [SpeculationResult(tokens=8, ms=99.0, drafted=0.0, accepted=0.0)], (8, 16)) is None


def test_rare_guesses_have_the_same_law() -> None:
    """A tenth of the steps guess 8, 6 of them right: each guess costs 0.1 of a step."""
    steps = 1 / (1 + 0.1 * 6)
    rate = SpeculationResult(tokens=8, ms=100 * steps * (1 + 0.1 * 8 * 0.1), drafted=steps * 0.8, accepted=steps * 0.6)
    assert fit_speedup(100.0, [rate]).b == pytest.approx(0.1)


laws = st.builds(lambda b, first: SpeedupModel(b=b, acceptance=(first,)), st.floats(0.0, 1.5), st.floats(0.05, 0.99))


@given(laws)
def test_the_law_is_found_again_and_its_best(speedup_model: SpeedupModel) -> None:
    found = fit_speedup(100.0, [true_rate(speedup_model, 1)])
    assert found.b == pytest.approx(speedup_model.b, abs=1e-6)
    assert found.acceptance == pytest.approx(speedup_model.acceptance, abs=1e-6)
    best = best_tokens(found, SIZES)
    fastest = max(1.0, *(speedup_model.speedup(tokens) for tokens in SIZES))
    assert (speedup_model.speedup(best) if best else 1.0) == pytest.approx(fastest, rel=1e-6)


@given(st.floats(0.0, 1.0), st.lists(st.floats(0.1, 1.0), min_size=8, max_size=8))
def test_every_chance_that_was_measured_is_found_again(b: float, ratios: list[float]) -> None:
    chances, product = [], 1.0
    for ratio in ratios:
        product *= ratio
        chances.append(product)
    speedup_model = SpeedupModel(b=b, acceptance=tuple(chances))
    found = fit_speedup(100.0, [true_rate(speedup_model, tokens) for tokens in SIZES])
    assert found.acceptance == pytest.approx(speedup_model.acceptance, abs=1e-4)
    assert found.b == pytest.approx(b, abs=1e-4)


@given(laws, st.integers(0, 2**32))
def test_following_the_law_never_ends_with_something_slower(speedup_model: SpeedupModel, seed: int) -> None:
    """Every measurement has noise. Nothing is measured twice; the choice is near the best and not slower than without
    speculation."""
    chance, base_ms = random.Random(seed), 100.0

    def measured(tokens: int) -> SpeculationResult:
        true = true_rate(speedup_model, tokens)
        return SpeculationResult(**{**vars(true), "ms": true.ms * chance.uniform(0.99, 1.01)})

    seen: list[SpeculationResult] = []
    while tokens := next_tokens(base_ms, seen, SIZES):
        assert tokens not in {rate.tokens for rate in seen}
        seen.append(measured(tokens))
    best = chosen(base_ms, seen)
    speedup = speedup_model.speedup(best.tokens) if best else 1.0
    assert speedup >= 1 - NOISE
    assert speedup >= 0.9 * max(1.0, *(speedup_model.speedup(tokens) for tokens in SIZES))


words = st.lists(st.integers(0, 50_000), min_size=1, max_size=12)


@given(words, st.lists(st.integers(0, 50_000), max_size=60))
def test_going_round_is_seen_wherever_it_begins(cycle: list[int], before: list[int]) -> None:
    assert is_looping([*before, *(cycle * 60)[:64]])


@pytest.mark.parametrize("read", [lambda text: text.split(), lambda text: list(text)], ids=["words", "letters"])
def test_text_that_people_wrote_does_not_go_round(read: Callable[[str], list[str]]) -> None:
    text = Path("appliance/tune/trials/text.txt").read_text()
    numbers = {word: number for number, word in enumerate(sorted(set(read(text))))}
    assert not is_looping([numbers[word] for word in read(text)])


def test_short_answers_are_no_loops_and_one_of_exactly_a_stretch_may_be_one() -> None:
    assert not is_looping([1] * 47)
    assert is_looping([1] * 48)
    assert not is_looping([])
