"""The comparison of a quantized KV cache with an exact one, on a client whose probabilities are known."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from appliance.plan import CacheCheck, CachePrompt, Checks
from appliance.tune.figures.perplexity import LIMIT
from appliance.tune.harmless import ANSWER, WINDOW
from appliance.tune.kv_compared import answer_exactly, compare_likely, judged, moved_nats
from tests.unit.tune.answering import Answering

EMPTY = CacheCheck(kv_type="fp8")
WINDOWS = ANSWER // WINDOW


@dataclass
class Telling(Answering):
    """A client that tells two likely tokens. The first one's probability depends on the prompt and on `moves`."""

    moves: float = 0.0
    asked: list[int] = field(default_factory=list)  # lengths of prompts

    async def likely(self, prompt: Sequence[int], count: int) -> Mapping[int, float]:
        self.asked.append(len(prompt))
        share = 0.5 + len(prompt) % 7 / 20 + self.moves
        return {1: math.log(share), 2: math.log(1 - share)}


async def compared(moves: float, *, context: int = 4096) -> CacheCheck:
    found = EMPTY

    def keep(check: CacheCheck) -> None:
        nonlocal found
        found = check

    await answer_exactly(Telling(), found, context, keep)
    await compare_likely(Telling(moves), found, keep)
    return found


@pytest.mark.parametrize(("moves", "verdict"), [(0.0, "harmless"), (0.02, "harmless"), (0.15, "refused")])
async def test_a_cache_is_refused_if_probabilities_move_too_far(moves: float, verdict: str) -> None:
    found = judged(await compared(moves))
    assert (found.verdict, found.positions, found.prompts) == (verdict, 12 * WINDOWS, ())
    assert (found.high < LIMIT) is (verdict == "harmless")
    assert "the limit is 0.0100" in found.describe()
    assert (verdict == "refused") is Checks(caches=(found,)).refuses("fp8")
    assert not Checks(caches=(found,)).refuses("bf16")


async def test_a_comparison_goes_on_where_it_was_interrupted() -> None:
    class StopError(Exception):
        pass

    found = await compared(0.0)
    begun = replace(found, prompts=tuple(replace(each, nats=None) for each in found.prompts[:2]))

    def keep(check: CacheCheck) -> None:
        nonlocal begun
        begun = check
        if len([each for each in check.prompts if each.nats is not None]) in (1, 3):
            raise StopError

    first = Telling()
    with pytest.raises(StopError):
        await compare_likely(first, begun, keep)
    assert len(first.asked) == WINDOWS
    second = Telling()
    await compare_likely(second, begun, keep)
    assert len(second.asked) == WINDOWS
    third = Telling()
    await answer_exactly(third, begun, 4096, lambda _: None)
    assert len(third.asked) == 10 * WINDOWS


@pytest.mark.parametrize("context", [100, 200])
async def test_too_few_answers_prove_nothing(context: int) -> None:
    found = judged(await compared(0.0, context=context))
    assert found.verdict == "not checked"
    assert Checks(caches=(found,)).refuses("fp8")
    assert "not checked" in found.describe()


def test_an_engine_without_probabilities_proves_nothing() -> None:
    rows = tuple(CachePrompt(name=str(at), answer=(1,), likely=((),), nats=(math.inf,)) for at in range(12))
    assert judged(replace(EMPTY, prompts=rows)).verdict == "not checked"


@given(st.lists(st.floats(0.01, 1.0), min_size=1, max_size=9), st.lists(st.floats(0.01, 1.0), min_size=1, max_size=9))
def test_what_probabilities_move_by_is_never_negative_and_zero_for_the_same(
    one: list[float], other: list[float]
) -> None:
    before, after = (
        {token: math.log(share / (sum(shares) + 0.1)) for token, share in enumerate(shares)} for shares in (one, other)
    )
    assert moved_nats(before, before) == pytest.approx(0.0, abs=1e-9)
    assert 0 <= moved_nats(before, after) < 40


def test_a_token_that_became_unlikely_counts() -> None:
    before = {1: math.log(0.9), 2: math.log(0.1)}
    assert moved_nats(before, {3: math.log(0.8), 2: math.log(0.1)}) > 1.5
    assert moved_nats(before, {1: math.log(0.8), 2: math.log(0.2)}) == pytest.approx(
        0.9 * math.log(9 / 8) - 0.1 * math.log(2)
    )
    assert moved_nats({}, before) == moved_nats(before, {}) == math.inf
