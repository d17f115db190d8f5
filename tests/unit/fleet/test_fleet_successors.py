"""Which model follows which: teams are learned, coincidence hardly counts, and what holds for all requests."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from appliance.fleet.admit import Evict, Resident, Variant, admit
from appliance.fleet.successors import NEAR_S, PAUSE_S, Successors
from appliance.fleet.use import NEVER_USED, UseHistory, Uses, use_chance
from tests.builders import examples
from tests.unit.fleet.pretenders import Memory, Pretender, ask, running, until

every = settings(max_examples=examples(200), deadline=None)
names = st.sampled_from("abcd")
requests = st.lists(st.tuples(names, st.floats(0, 1000)), max_size=60)  # a model, and seconds since the last request


def learned(order: list[tuple[str, float]]) -> tuple[Successors, float]:
    """Return what these requests teach, and the time of the last one."""
    found, now_s = Successors(), 0.0
    for name, after_s in order:
        now_s += after_s
        found.note(name, now_s)
    return found, now_s


def sessions(team: str, count: int) -> list[tuple[str, float]]:
    """Return sessions of three rounds each, an hour apart."""
    first, *others = list(team * 3)
    return [(first, 3600.0), *((name, 5.0) for name in others)] * count


def test_a_team_is_learned_whoever_is_first() -> None:
    found, _ = learned(sessions("abc", 20))
    assert found.chance("b", "a") > 0.7
    assert found.chance("c", "a") > 0.7
    assert found.chance("c", "b") > 0.7


def test_one_meeting_counts_little_and_strangers_nothing() -> None:
    once, _ = learned([("b", 0.0), ("a", PAUSE_S), ("b", 1.0)])
    assert 0 < once.chance("b", "a") < 0.2
    assert once.chance("a", "b") == once.chance("d", "a") == once.chance("a", "d") == once.chance("a", "a") == 0


@pytest.mark.parametrize(("after_s", "is_near"), [(NEAR_S, True), (NEAR_S + 1, False)])
def test_a_model_that_comes_late_is_no_successor(after_s: float, is_near: bool) -> None:
    found, _ = learned([("b", 0.0), ("a", 500.0), ("b", after_s)])
    assert (found.chance("b", "a") > 0) is is_near


def test_two_chats_at_once_are_no_team() -> None:
    """Requests that alternate without a pause are one meeting, however many they are."""
    found, _ = learned([("b", 0.0), ("a", PAUSE_S), *[("b", 1.0), ("a", 1.0)] * 500])
    assert found.chance("b", "a") < 0.2


def test_models_that_meet_by_chance_hardly_count() -> None:
    rng = random.Random(1)
    found, _ = learned([(rng.choice("abcdef"), rng.expovariate(1 / 60)) for _ in range(3000)])
    assert max(found.chance(one, other) for one in "abcdef" for other in "abcdef") < 0.2


def test_a_team_that_parts_is_forgotten() -> None:
    apart = [("a", 3600.0), ("b", 3600.0)] * 100
    found, _ = learned([*sessions("ab", 20), *apart])
    assert found.chance("b", "a") < 1e-6


def test_a_clock_that_goes_back_is_no_pause() -> None:
    back, _ = learned([("b", 0.0), ("a", 1000.0)])
    back.note("b", 5.0)
    then, _ = learned([("b", 0.0), ("a", 1000.0), ("b", 0.0)])
    assert back.chance("b", "a") == then.chance("b", "a") > 0


@every
@given(requests)
def test_chances_are_chances_and_no_model_follows_itself(order: list[tuple[str, float]]) -> None:
    found, _ = learned(order)
    for wanted in "abcde":
        assert found.chance(wanted, wanted) == 0
        for name in "abcde":
            assert 0 <= found.chance(name, wanted) < 1


@every
@given(requests, names, names)
def test_a_successor_is_never_less_likely_than_by_its_own_intervals(
    order: list[tuple[str, float]], name: str, wanted: str
) -> None:
    uses, own, now_s = Uses(), UseHistory(), 0.0
    for asked, after_s in order:
        now_s += after_s
        uses.note(asked, now_s)
        if asked == name:
            own.note(now_s)
    least = use_chance(own, now_s)
    assert least - 1e-12 <= uses.chance(name, wanted, now_s) <= 1
    if wanted not in [asked for asked, _ in order]:
        assert uses.chance(name, wanted, now_s) == least


def test_a_model_that_was_never_asked_has_a_small_chance() -> None:
    assert Uses().chance("a", "b", 0.0) == pytest.approx(NEVER_USED)


def test_a_team_that_wakes_up_evicts_the_stranger() -> None:
    """The first model of a team needs memory, an hour after its last session. A stranger was asked a moment ago."""
    uses, now_s = Uses(), 0.0
    for asked, after_s in [*sessions("ab", 20), ("x", 3500.0), ("x", 40.0), ("x", 40.0), ("a", 60.0)]:
        now_s += after_s
        uses.note(asked, now_s)
    for wanted, victim in (("a", "x"), ("y", "b")):
        residents = [
            Resident(name=name, holds={"host": 10.0}, reload_s=5.0, use_chance=uses.chance(name, wanted, now_s))
            for name in "bx"
        ]
        variant = Variant(key="only", needs={"host": 10.0}, speed=1.0)
        assert admit(wanted, [variant], residents, {"host": 0.0}) == Evict(victims=(victim,), variant=variant)


async def test_the_fleet_keeps_the_next_model_of_a_team_that_wakes_up() -> None:
    memory, now_s = Memory(), 0.0
    members = [Pretender(name, 40, memory) for name in "abx"]
    async with running(*members, clock=lambda: now_s) as fleet:
        for name, after_s in sessions("ab", 20):
            now_s += after_s
            await ask(fleet, name)
        fleet.unload("a")
        await until(lambda: fleet.loaded == ("b",))
        for after_s in (3500.0, 40.0, 40.0):
            now_s += after_s
            await ask(fleet, "x")
        assert fleet.loaded == ("b", "x")
        now_s += 60.0
        await ask(fleet, "a")
        assert fleet.loaded == ("a", "b")


def test_memory_is_bounded_by_pairs_that_were_seen_lately() -> None:
    """A leader keeps no model that has not come after it for a hundred starts."""
    found, now_s = Successors(), 0.0
    for number in range(300):
        other = f"m{number % 60}"
        for name, after_s in (("late", 3600.0), (other, 3600.0), ("leader", 3600.0), (other, 5.0)):
            now_s += after_s
            found.note(name, now_s)
    for _ in range(100):
        for name in ("leader", "late"):
            now_s += 3600.0
            found.note(name, now_s)
    assert sum(len(each.pairs) for each in found._leaders.values()) <= 1
