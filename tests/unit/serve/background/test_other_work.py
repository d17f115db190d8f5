from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from appliance.serve.background.other_work import SLOW, slow_beside

CROWD = "other programs took 52% of 2 CPUs (1.0 cores)"


def test_it_says_how_slow_and_why() -> None:
    words = f"decodes 31.0 tok/s, at least 104.4 by its profile: {CROWD}"
    assert slow_beside(31.0, 104.4, CROWD) == words


@given(st.floats(0, 1e4), st.none() | st.floats(0.1, 1e4), st.sampled_from([None, CROWD]))
def test_it_is_said_only_of_a_slow_engine_beside_others(rate: float, measured: float | None, crowd: str | None) -> None:
    is_slow = measured is not None and 0 < rate < SLOW * measured
    assert (slow_beside(rate, measured, crowd) is not None) == (is_slow and crowd is not None)
