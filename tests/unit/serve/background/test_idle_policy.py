from __future__ import annotations

from collections import deque
from dataclasses import replace
from random import Random

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from appliance.serve.background.idle_policy import (
    CHECK_AGAIN_S,
    JITTER,
    LIKELY,
    NEED_MOST_S,
    SETTLE_S,
    Action,
    Decision,
    IdleState,
    chance,
    decide,
    doubled,
    worth_after_s,
)

IDLE_S = 600.0
AGAIN_S = 60.0
ALONE = {Action.MEASURE_ALONE, Action.SWAP_ALONE}  # requests that come meanwhile wait for a load
SITUATIONS = st.builds(
    IdleState,
    is_ready=st.booleans(),
    running=st.integers(0, 3),
    idle_s=st.floats(0, 2000),
    has_room=st.booleans(),
    is_measured=st.booleans(),
    has_better=st.booleans(),
    was_reloaded_now=st.booleans(),
    pauses=st.lists(st.floats(0.01, 2000), max_size=32).map(tuple),
    need_s=st.floats(0, 600),
    rest_s=st.sampled_from([0.0, 0.0, 7.0]),
    has_baseline=st.booleans(),
    is_calm=st.booleans(),
).map(lambda now: replace(now, has_better=now.has_better and now.is_measured))

QUIET = IdleState(
    is_ready=True,
    running=0,
    idle_s=IDLE_S,
    has_room=False,
    is_measured=False,
    has_better=False,
    was_reloaded_now=False,
)


def do(now: IdleState) -> Action:
    return decide(now, idle_s=IDLE_S).action


@pytest.mark.parametrize(
    ("now", "then"),
    [
        (QUIET, Action.MEASURE_ALONE),
        (replace(QUIET, idle_s=IDLE_S - 1), Action.WAIT),
        (replace(QUIET, has_room=True, idle_s=SETTLE_S), Action.MEASURE_BESIDE),
        (replace(QUIET, has_room=True, idle_s=SETTLE_S - 1), Action.WAIT),
        (replace(QUIET, is_ready=False), Action.WAIT),
        (replace(QUIET, running=1), Action.WAIT),
        (replace(QUIET, has_baseline=False, idle_s=SETTLE_S), Action.MEASURE_SERVING),
        (replace(QUIET, has_baseline=False, idle_s=SETTLE_S, pauses=(4.0,) * 9, need_s=60.0), Action.MEASURE_SERVING),
        (replace(QUIET, has_baseline=False, idle_s=SETTLE_S - 1), Action.WAIT),
        (replace(QUIET, has_baseline=False, running=1), Action.WAIT),
        (replace(QUIET, has_baseline=False, is_calm=False), Action.LOOK),
        (replace(QUIET, has_baseline=False, is_measured=True, has_better=True), Action.SWAP_ALONE),
        (replace(QUIET, is_calm=False), Action.LOOK),
        (replace(QUIET, is_calm=False, rest_s=1.0), Action.WAIT),
        (replace(QUIET, rest_s=1.0), Action.WAIT),
        (replace(QUIET, has_room=True, idle_s=3.0, need_s=1.5, pauses=(5.0,) * 9), Action.MEASURE_BESIDE),
        (replace(QUIET, has_room=True, idle_s=3.0, need_s=2.5, pauses=(5.0,) * 9), Action.WAIT),
        (replace(QUIET, has_room=True, idle_s=6.3, need_s=2.5, pauses=(5.0,) * 9), Action.MEASURE_BESIDE),
        (replace(QUIET, was_reloaded_now=True), Action.WAIT),
        (replace(QUIET, has_room=True, rest_s=1.0), Action.WAIT),
        (replace(QUIET, has_room=True, was_reloaded_now=True), Action.MEASURE_BESIDE),
        (replace(QUIET, is_measured=True, has_better=True, was_reloaded_now=True), Action.WAIT),
        (replace(QUIET, is_measured=True), Action.END),
        (replace(QUIET, is_measured=True, has_better=True), Action.SWAP_ALONE),
        (replace(QUIET, is_measured=True, has_better=True, rest_s=1.0), Action.SWAP_ALONE),
        (replace(QUIET, is_measured=True, has_better=True, has_room=True, running=3, idle_s=0), Action.SWAP_BESIDE),
    ],
)
def test_what_is_done_when(now: IdleState, then: Action) -> None:
    assert do(now) is then


@given(SITUATIONS, st.floats(1, 3600))
def test_nobody_waits_who_need_not(now: IdleState, idle_s: float) -> None:
    step = decide(now, idle_s=idle_s)
    if step.action in ALONE:
        assert not now.running
        assert not now.has_room
        assert now.idle_s >= idle_s
        assert not now.was_reloaded_now
    if step.action is Action.MEASURE_BESIDE:
        assert now.has_room
        assert not now.running
    if step.action in (Action.MEASURE_ALONE, Action.MEASURE_BESIDE):
        assert not now.is_measured
        assert now.is_calm
        assert now.rest_s == 0
        assert chance(now.pauses, now.idle_s, now.need_s) >= LIKELY
    if step.action in (Action.SWAP_ALONE, Action.SWAP_BESIDE):
        assert now.has_better
    if step.action not in (Action.WAIT, Action.END):
        assert now.is_ready
    assert (step.action is Action.END) == (now.is_measured and not now.has_better)
    assert (step.action is Action.WAIT) == (step.wait_s > 0)
    assert step.wait_s <= CHECK_AGAIN_S


@given(SITUATIONS, st.floats(1, 3600))
def test_a_fresh_idle_period_that_is_long_enough_is_used(now: IdleState, idle_s: float) -> None:
    fresh = replace(
        now,
        is_ready=True,
        running=0,
        idle_s=idle_s + SETTLE_S,
        was_reloaded_now=False,
        pauses=(),
        rest_s=0.0,
    )
    assert decide(fresh, idle_s=idle_s).action is not Action.WAIT


@given(SITUATIONS, st.floats(1, 3600))
def test_a_wait_that_is_over_is_not_waited_again(now: IdleState, idle_s: float) -> None:
    """It waits again only in states that it looks at again anyway."""
    # What has lasted longer than every pause before it is never waited for again.
    now = replace(now, rest_s=0.0, pauses=tuple(pause for pause in now.pauses if pause <= JITTER * now.idle_s))
    step = decide(now, idle_s=idle_s)
    if step.action is Action.WAIT and step.wait_s < SETTLE_S and not now.running and now.is_ready:
        assert decide(replace(now, idle_s=now.idle_s + step.wait_s + 1e-6), idle_s=idle_s).action is not Action.WAIT


@given(
    gaps=st.lists(st.floats(0.1, 2000), min_size=1, max_size=12),
    has_room=st.booleans(),
    sittings=st.integers(1, 6),
    measure_s=st.floats(1, 900),
    has_better=st.booleans(),
)
def test_a_life_of_requests(
    gaps: list[float], has_room: bool, sittings: int, measure_s: float, has_better: bool
) -> None:
    """Requests come after `gaps` of idleness; a sitting of measuring lasts `measure_s` unless one interrupts it."""
    left = sittings
    is_changed = False
    for gap in gaps:
        now = replace(QUIET, has_room=has_room, idle_s=0.0)
        reloads = 0
        while now.idle_s < gap:
            now = replace(now, is_measured=left == 0, has_better=left == 0 and has_better and not is_changed)
            step = decide(now, idle_s=IDLE_S)
            if step.action is Action.END:
                break
            reloads += step.action in ALONE
            now, left, is_changed = after(now, step, gap, measure_s, left, is_changed, has_better)
        assert reloads <= 1
        if has_room:
            assert reloads == 0
    if has_room and sum(gap >= SETTLE_S + measure_s + 0.01 for gap in gaps) >= sittings:
        assert left == 0  # as many sittings as there were stretches that hold one, or more


def after(
    now: IdleState, step: Decision, gap: float, measure_s: float, left: int, is_changed: bool, has_better: bool
) -> tuple[IdleState, int, bool]:
    """Return state, remaining work and whether something changed, after the step is done."""
    if step.action is Action.WAIT:
        rest_s = max(0.0, now.rest_s - step.wait_s)
        return replace(now, idle_s=now.idle_s + step.wait_s, rest_s=rest_s), left, is_changed
    if step.action in (Action.SWAP_ALONE, Action.SWAP_BESIDE):
        is_reload = step.action is Action.SWAP_ALONE
        return replace(now, was_reloaded_now=now.was_reloaded_now or is_reload, idle_s=now.idle_s + 1), left, True
    is_alone = step.action is Action.MEASURE_ALONE
    is_whole = now.idle_s + measure_s <= gap
    left -= is_whole
    then = replace(
        now,
        idle_s=now.idle_s + measure_s,
        rest_s=AGAIN_S,
        was_reloaded_now=now.was_reloaded_now or is_alone,
    )
    return then, left, is_changed or (is_alone and left == 0 and has_better)


PAUSES = st.lists(st.floats(0.01, 2000), max_size=32)


@given(PAUSES, st.floats(0, 2000), st.floats(0, 600))
def test_a_wait_for_a_longer_pause_ends_and_then_it_is_worth_it(
    pauses: list[float], idle_s: float, need_s: float
) -> None:
    wait_s = worth_after_s(pauses, idle_s, need_s)
    assert wait_s >= 0
    assert wait_s <= max(pauses, default=0.0) / JITTER
    assert chance(pauses, idle_s + wait_s + 1e-6, need_s) >= LIKELY or wait_s == 0
    if wait_s == 0:
        assert chance(pauses, idle_s, need_s) >= LIKELY
    assert worth_after_s([], idle_s, need_s) == 0


@given(PAUSES, st.floats(0, 2000), st.floats(0, 600), st.floats(0, 600))
def test_what_needs_longer_is_never_begun_sooner(
    pauses: list[float], idle_s: float, need_s: float, more_s: float
) -> None:
    assert worth_after_s(pauses, idle_s, need_s) <= worth_after_s(pauses, idle_s, need_s + more_s)


@given(st.floats(0.1, 600), st.integers(0, 1000))
def test_each_wasted_sitting_doubles_what_the_next_needs_up_to_a_bound(need_s: float, wasted: int) -> None:
    assert need_s <= doubled(need_s, wasted) <= doubled(need_s, wasted + 1) <= max(need_s, NEED_MOST_S)


@given(
    every_s=st.floats(1, 60),
    share=st.floats(0, 0.1),
    need_s=st.floats(0.5, 120),
    draws=st.randoms(use_true_random=False),
)
def test_a_steady_client_has_few_loads_wasted(every_s: float, share: float, need_s: float, draws: Random) -> None:
    """The client's pauses vary by a share below JITTER's. A load is wasted if the next request comes before its end.
    Loads that take about as long as a pause are left out: nobody can know if they pay. `doubled` covers them."""
    shortest, longest = every_s * (1 - share), every_s * (1 + share)
    assume(not shortest <= SETTLE_S + need_s <= longest + SETTLE_S)
    pauses: deque[float] = deque(maxlen=32)
    wasted = 0
    for number in range(300):
        pause = every_s * (1 + draws.uniform(-share, share))
        begins = SETTLE_S + worth_after_s(pauses, SETTLE_S, need_s)
        if begins < pause < begins + need_s:
            wasted += number > 0  # of the first nobody could know
        pauses.append(pause)
    assert wasted <= 3
