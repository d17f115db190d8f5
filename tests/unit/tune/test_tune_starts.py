"""What a start is expected to take: the load that was seen, and what it compiles first."""

from __future__ import annotations

from dataclasses import replace

import pytest

from appliance.plan import Compilation
from appliance.tune.figures.load_times import Start, Starts
from appliance.tune.search.search import Ask, Effort, Search, Trial
from tests.unit.tune.test_tune_search import EFFORT, Box, candidate, searching

COLD, OTHER, WARM = (
    Compilation(key="a", seconds=60.0),
    Compilation(key="b", seconds=60.0),
    Compilation(key="c", seconds=0.0),
)


def start(compilation: Compilation | None, load_s: float, *, served: bool = True) -> Start:
    return Start(compilation=compilation, load_s=load_s, served=served)


def test_before_any_was_seen_only_what_is_to_be_compiled_has_a_price() -> None:
    starts = Starts(())
    assert (starts.load_s, starts.compile_s(COLD), starts.compile_s(WARM), starts.compile_s(None)) == (0, 60, 0, 0)


def test_an_engine_that_compiles_nothing_has_the_mean_of_its_loads() -> None:
    starts = Starts([start(None, 4.0), start(None, 0.0, served=False), start(None, 8.0)])
    assert (starts.load_s, starts.compile_s(None)) == (6.0, 0.0)


def test_a_key_that_served_is_compiled_and_one_that_failed_is_not() -> None:
    starts = Starts([start(COLD, 90.0), start(OTHER, 0.0, served=False)])
    assert (starts.compile_s(COLD), starts.compile_s(OTHER)) == (0.0, 60.0)
    assert starts.load_s == 30.0  # without what was compiled


def test_compiling_took_no_longer_than_the_start_did() -> None:
    starts = Starts([start(COLD, 9.0)])
    assert (starts.load_s, starts.compile_s(OTHER)) == (0.0, 9.0)


def test_what_was_seen_of_both_replaces_the_figure() -> None:
    starts = Starts([start(COLD, 130.0), start(COLD, 30.0), start(WARM, 32.0)])
    assert (starts.load_s, starts.compile_s(OTHER)) == (31.0, 99.0)


def test_a_cache_that_serves_nobody_makes_every_load_as_long() -> None:
    """On CPUs the whole expected time belongs to the load, none to compiling."""
    starts = Starts([start(COLD, 130.0), start(COLD, 131.0)])
    assert (starts.load_s, starts.compile_s(OTHER)) == (131.0, 0.0)


def of_keys(first: Compilation, second: Compilation) -> tuple[Search, Ask]:
    """Return a search over three candidates that differ by steps of one knob, and its next question after the middle
    one was measured."""
    space = [
        replace(candidate(4, 4, 512), compilation=WARM),
        replace(candidate(4, 2, 512), compilation=first),
        replace(candidate(4, 8, 512), compilation=second),
    ]
    alike = [replace(each, work=space[0].work) for each in space]
    search = searching(alike, Effort(depths=EFFORT.depths))
    seen = Box().measure(Ask(candidate=alike[0], is_long=False, seconds=0.0))
    ask = search.ask([seen], left_s=10_000)
    assert isinstance(ask, Ask)
    return search, ask


@pytest.mark.parametrize(("first", "second", "wanted"), [(COLD, WARM, "4/8/512"), (WARM, COLD, "4/2/512")])
def test_of_two_that_are_alike_the_compiled_one_is_asked_for_first(
    first: Compilation, second: Compilation, wanted: str
) -> None:
    search, ask = of_keys(first, second)
    assert ask.candidate.key == wanted
    other = search.candidate("4/2/512" if wanted == "4/8/512" else "4/8/512")
    assert other.compilation == COLD


def test_a_cold_key_is_in_the_price_until_it_has_served() -> None:
    _, cold = of_keys(COLD, COLD)
    _, warm = of_keys(WARM, WARM)
    assert cold.seconds == pytest.approx(warm.seconds + COLD.seconds)


def test_a_measurement_that_failed_compiled_nothing_for_the_next() -> None:
    space = [replace(candidate(4, 4, 512), compilation=COLD), replace(candidate(4, 8, 512), compilation=COLD)]
    ask = searching(space).ask([Trial(key=space[0].key)], left_s=10_000)
    assert isinstance(ask, Ask)
    assert ask.seconds > COLD.seconds
