"""The comparison of answers with and without speculative decoding, on a client whose answers are known."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from appliance.plan import (
    NEEDLE_DEPTHS,
    Checks,
    ComparedPrompt,
    NeedleRow,
    NeedleVerdict,
    SoakCount,
    SpeculationCheck,
    sign_test,
)
from appliance.plan.observed.checks import SIGNIFICANT
from appliance.tune.harmless import ANSWER, WINDOW, answer_plainly, continue_windows
from tests.unit.tune.answering import Answering

EMPTY = SpeculationCheck(of="up to 8 tokens drafted by n-grams", window=WINDOW)
KIND = "f16"
WINDOWS = 12 * ANSWER // WINDOW


@dataclass
class Placed(Answering):
    """A client whose next token depends on the place and on the last token; `changed` says which places differ.

    A difference changes all that follows it in one answer, as it does in a model.
    """

    changed: Callable[[int], bool] = lambda _: False
    asked: list[int] = field(default_factory=list)

    async def answer(self, prompt: Sequence[int], tokens: int) -> Sequence[int]:
        self.asked.append(len(prompt))
        made = [prompt[-1]]
        for place in range(len(prompt), len(prompt) + tokens):
            made.append(made[-1] + (2 if self.changed(place) else 1))
        return made[1:]

    def drafted(self, tokens: int) -> int:
        return tokens


async def compared(
    *, again: Placed | None = None, speculating: Placed | None = None, context: int = 4096
) -> SpeculationCheck:
    found = EMPTY

    def keep(check: SpeculationCheck) -> None:
        nonlocal found
        found = check

    await answer_plainly(Placed(), found, context, keep)
    await continue_windows(again or Placed(), found, keep, speculates=False)
    await continue_windows(speculating or Placed(), found, keep, speculates=True)
    return found


async def test_one_difference_costs_one_window() -> None:
    found = await compared(speculating=Placed(changed=lambda place: place == 300))
    assert found.windows == WINDOWS
    reached = [each for each in found.prompts if each.speculating]
    assert reached
    assert all(len(each.speculating or ()) == 1 for each in reached)
    assert found.judged(is_asked_for=False).verdict == "harmless"


async def test_speculation_that_changes_answers_is_refused_unless_asked_for() -> None:
    found = await compared(speculating=Placed(changed=lambda place: place % 97 == 0))
    assert found.differing[0] == 0
    assert found.differing[1] >= 7
    assert found.judged(is_asked_for=False).verdict == "refused"
    assert found.judged(is_asked_for=True).verdict == "asked for"
    assert "changes greedy answers" in found.judged(is_asked_for=False).describe()


async def test_differences_that_come_without_it_as_well_are_no_reason() -> None:
    noisy = lambda place: place % 97 == 0  # noqa: E731
    found = await compared(again=Placed(changed=noisy), speculating=Placed(changed=noisy))
    assert found.differing[0] == found.differing[1] >= 7
    assert found.only == (0, 0)
    assert found.judged(is_asked_for=False).verdict == "harmless"


async def test_an_interrupted_comparison_goes_on() -> None:
    class StopError(Exception):
        pass

    kept = EMPTY

    def keep_two(check: SpeculationCheck) -> None:
        nonlocal kept
        kept = check
        if len(check.prompts) == 2:
            raise StopError

    first, second = Placed(), Placed()
    with pytest.raises(StopError):
        await answer_plainly(first, kept, 4096, keep_two)

    def keep(check: SpeculationCheck) -> None:
        nonlocal kept
        kept = check

    await answer_plainly(second, kept, 4096, keep)
    assert (len(first.asked), len(second.asked)) == (2, 10)
    assert len({each.name for each in kept.prompts}) == 12


async def test_prompts_that_do_not_fit_are_left_out() -> None:
    found = await compared(context=300)
    assert 0 < len(found.prompts) < 12
    none = await compared(context=100)
    assert (none.windows, none.judged(is_asked_for=False).verdict) == (0, "not checked")


def simulated(rng: random.Random, changes: float) -> SpeculationCheck:
    """Return a comparison in which each window has its own chance of a near-tie. `changes` is a rate of tokens."""
    ties = [rng.betavariate(0.1, 0.6) for _ in range(WINDOWS)]
    again = tuple(at for at, chance in enumerate(ties) if rng.random() < chance)
    more = 1 - (1 - changes) ** WINDOW
    speculating = tuple(at for at, chance in enumerate(ties) if rng.random() < chance or rng.random() < more)
    answer = tuple(range(WINDOWS * WINDOW))
    return replace(EMPTY, prompts=(ComparedPrompt(name="a", answer=answer, again=again, speculating=speculating),))


def refused_of(changes: float, runs: int) -> float:
    rng = random.Random(20_000)
    found = [simulated(rng, changes).judged(is_asked_for=False).verdict for _ in range(runs)]
    return found.count("refused") / runs


def test_at_most_one_harmless_kind_in_a_hundred_is_refused() -> None:
    assert refused_of(0.0, 2000) <= SIGNIFICANT


def test_one_changed_token_in_a_hundred_is_found() -> None:
    assert refused_of(0.01, 200) >= 0.8
    assert refused_of(0.02, 200) >= 0.99


def test_the_test_is_exact() -> None:
    assert sign_test(7, 0) == 1 / 128 < SIGNIFICANT < sign_test(6, 0)
    assert sign_test(0, 0) == sign_test(0, 5) == 1.0
    assert sign_test(3, 1) == 5 / 16


def test_a_document_that_breaks_only_with_it_is_a_reason() -> None:
    answered = (ComparedPrompt(name="a", answer=tuple(range(WINDOW)), again=(), speculating=()),)
    whole = replace(EMPTY, prompts=answered, plain_documents=(True, False), documents=(True, False))
    assert whole.judged(is_asked_for=False).verdict == "harmless"
    broken = replace(whole, documents=(False, False))
    assert broken.judged(is_asked_for=False).verdict == "refused"


@given(served=st.integers(512, 300_000), holds=st.integers(0, 300_000), least=st.sampled_from([4096, 8192]))
def test_needles_are_looked_for_in_smaller_contexts_until_one_holds(served: int, holds: int, least: int) -> None:
    checks, asked = Checks(), list[int]()
    while (context := checks.next_for_needles(served, least, KIND)) is not None:
        assert not checks.is_judged(context, KIND)
        asked.append(context)
        verdict: NeedleVerdict = "passed" if context <= holds else "failed"
        for share in NEEDLE_DEPTHS:
            checks = checks.with_needle(
                NeedleRow(context=context, share=share, verdict=verdict, words="", kv_type=KIND)
            )
    assert asked[0] == served
    assert all(context & (context - 1) == 0 and least <= context < before for before, context in pairwise(asked))
    assert len(asked) <= 8
    if asked[-1] <= holds:
        assert checks.holding(KIND) == asked[-1]
        assert checks.has_failed(served, KIND) is (served > holds)
    else:
        assert checks.holding(KIND) is None
        assert asked[-1] < 2 * max(least, 1) or asked[-1] == served < least


def test_answers_without_tokens_prove_nothing() -> None:
    found = replace(EMPTY, prompts=(ComparedPrompt(name="a", answer=(), again=(), speculating=()),))
    judged = found.judged(is_asked_for=False)
    assert judged.verdict == "not checked"
    assert "not checked, since no answer has tokens to compare" in judged.describe()


def test_words() -> None:
    rows = (
        NeedleRow(context=4096, share=0.1, verdict="passed", words=""),
        NeedleRow(context=8192, share=0.1, verdict="failed", words=""),
    )
    soak = SoakCount(seconds=600, answers=1200, failed=1, errors=("chat: why",))
    found = Checks(speculation=EMPTY.judged(is_asked_for=False), soak=soak)
    for row in rows:
        found = found.with_needle(row)
    assert [*found.lines()][1:] == [
        "needles in 4,096 tokens: passed at 10%",
        "needles in 8,192 tokens: failed at 10%; this context does not hold: use a smaller --ctx-size",
        "soak with tools: 1 of 1,200 answers failed in 10.0 min: chat: why",
    ]
    assert [found.has_failed(context, "") for context in (4096, 8191, 8192, 9000)] == [False, False, True, True]
    assert Checks().as_document() is None
    document = found.as_document()
    assert document is not None
    assert document["lines"] == [*found.lines()]
