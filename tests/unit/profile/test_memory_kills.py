from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from appliance.plan import MemoryKill, most_mib, remembered
from appliance.plan.memory_kill import KILLS, REMEMBERED_S

KILL = st.builds(
    MemoryKill, at_s=st.floats(1, 1e9), held_mib=st.floats(1, 1e6), usable_mib=st.floats(1, 1e6)
)  # in whatever order, as clocks are
KILLS_SEEN = st.lists(KILL, max_size=8).map(tuple)


@given(KILLS_SEEN)
def test_each_figure_is_less_than_what_was_killed(kills: tuple[MemoryKill, ...]) -> None:
    found = list(most_mib(kills))
    assert bool(found) == (len(kills) >= KILLS)
    assert found == sorted(found)
    assert all(0 < mib < kill.held_mib for mib in found for kill in kills)


@given(KILLS_SEEN, KILL)
def test_one_kill_more_never_allows_more(kills: tuple[MemoryKill, ...], another: MemoryKill) -> None:
    before, after = list(most_mib(kills)), list(most_mib((*kills, another)))
    assert not before or after[0] <= before[0]


@given(KILLS_SEEN, st.floats(0, 2e9), st.floats(1, 1e6))
def test_what_counts_was_seen_lately_with_no_less_memory(
    kills: tuple[MemoryKill, ...], now_s: float, usable_mib: float
) -> None:
    found = remembered(kills, now_s=now_s, usable_mib=usable_mib)
    assert set(found) <= set(kills)
    assert all(usable_mib <= 1.125 * kill.usable_mib for kill in found)
    if found:
        assert 0 <= now_s - max(kill.at_s for kill in kills) < REMEMBERED_S
    assert remembered(kills, now_s=now_s + 2e9, usable_mib=usable_mib) == (), "at last each is forgotten"


@given(st.lists(KILL, min_size=1, max_size=8).map(tuple))
def test_a_kill_just_now_on_the_same_machine_counts(kills: tuple[MemoryKill, ...]) -> None:
    last = max(kills, key=lambda kill: kill.at_s)
    assert last in remembered(kills, now_s=last.at_s, usable_mib=last.usable_mib)
