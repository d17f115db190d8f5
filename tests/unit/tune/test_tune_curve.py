from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from appliance.tune.figures.curve import Curve, Point

KNEE = {32: 14.5, 512: 17.7, 1024: 25.6, 2048: 55.5, 4096: 94.0}  # ms by depth, seen on a CPU


def curve(decode: dict[int, float]) -> Curve:
    points, done = [], 0
    for depth, ms in decode.items():
        points.append(Point(depth=depth, decode_ms=ms, prefill_ms=2.0, prefill_tokens=depth - done))
        done = depth
    return Curve(points=tuple(points))


def read(*stretches: tuple[int, int, float]) -> Curve:
    """Return the curve of a prompt that was read in stretches (first, last, ms a token)."""
    points = (Point(depth=b, decode_ms=1.0, prefill_ms=ms, prefill_tokens=b - a) for a, b, ms in stretches)
    return Curve(points=tuple(points))


def test_decode_is_linear_between_points_and_level_before_the_first() -> None:
    found = curve({512: 20.0, 32: 10.0, 2048: 50.0})  # the order does not matter
    assert [found.decode_ms(depth) for depth in (0, 32, 272, 512, 1280, 2048)] == [10, 10, 15, 20, 35, 50]


def test_a_measured_depth_is_quoted_without_an_interval() -> None:
    figure = curve(KNEE).decode(4096)
    assert (figure.low_ms, figure.ms, figure.high_ms, figure.is_extrapolated) == (94.0, 94.0, 94.0, False)
    assert figure.describe() == "10.6 tok/s"


def test_beyond_the_deepest_the_figure_says_so_and_carries_its_interval() -> None:
    figure = curve(KNEE).decode(8192)
    assert figure.is_extrapolated
    assert figure.ms == pytest.approx(94 + 4096 * (94 - 55.5) / 2048)
    assert figure.low_ms < figure.ms < figure.high_ms
    assert figure.describe().startswith(f"{1000 / figure.ms:.1f} tok/s (extrapolated: ")


def test_a_knee_that_has_begun_widens_the_interval() -> None:
    straight, bent = curve({0: 10, 512: 20, 1024: 30}), curve({0: 10, 512: 12, 1024: 30})
    assert bent.decode(2048).high_ms - bent.decode(2048).ms > straight.decode(2048).high_ms - straight.decode(2048).ms


def test_one_point_may_be_level_or_proportional_to_depth_beyond_it() -> None:
    figure = curve({100: 10.0}).decode(300)
    assert (figure.low_ms, figure.ms, figure.high_ms) == (10.0, 10.0, pytest.approx(30.0))


def test_decode_is_integrated_over_the_depths_of_a_job_corners_included() -> None:
    found = curve({0: 10, 1000: 20, 2000: 50})
    assert found.decode_s(0, 1000) == pytest.approx(15.0)
    assert found.decode_s(500, 1000) == pytest.approx((500 * 17.5 + 500 * 27.5) / 1000)
    assert found.decode_s(2000, 1000) == pytest.approx(65.0)


def test_prefill_is_fitted_as_p1_n_plus_p2_n_squared() -> None:
    p1, p2 = 1.5, 0.0004
    found = read(*((a, b, p1 + p2 * (a + b)) for a, b in pairwise((0, 32, 512, 4096))))
    assert found.prefill == pytest.approx((p1, p2))
    assert found.prefill_s(0, 10_000) == pytest.approx((p1 * 10_000 + p2 * 1e8) / 1000)
    assert found.prefill_s(4096, 8192) == pytest.approx(found.prefill_s(0, 8192) - found.prefill_s(0, 4096))


def test_a_few_slow_first_tokens_hardly_bend_the_fit() -> None:
    found = read((0, 32, 20.0), (32, 512, 2.0), (512, 4096, 2.0))
    assert found.prefill_s(0, 4096) == pytest.approx(4096 * 2 / 1000, rel=0.02)


def copied(*stretches: tuple[int, int, float], batch: int) -> Curve:
    """Return a curve of stretches (from, to, milliseconds in total); weights are copied once for `batch` tokens."""
    points = (
        Point(depth=b, decode_ms=10.0, prefill_ms=ms / (b - a), prefill_tokens=b - a, copied_batch=batch)
        for a, b, ms in stretches
    )
    return Curve(points=tuple(points))


def test_copied_weights_cost_a_batch_however_few_its_tokens_are() -> None:
    """DeepSeek-V3 beside one card: 8 s of copies for 32 tokens and for 608."""
    assert copied((0, 32, 8000.0), batch=2048).prefill_s(0, 512) == pytest.approx(8.0)
    found = copied((0, 32, 8032.0), (32, 640, 8608.0), (640, 4736, 20096.0), batch=2048)
    assert found.prefill_s(0, 512) == pytest.approx(8.512)
    assert found.prefill_s(0, 2049) == pytest.approx(18.049)
    assert found.prefill_s(14336, 16384) == pytest.approx(10.048)


@pytest.mark.parametrize("rates", [(5.0, 1.0), (0.001, 5.0)])
def test_no_part_of_a_prefill_is_negative_however_odd_the_times(rates: tuple[float, float]) -> None:
    found = read((0, 512, rates[0]), (512, 1024, rates[1]))
    assert min(found.prefill) >= 0
    assert max(found.prefill) > 0


def test_points_of_the_same_depth_are_refused() -> None:
    point = Point(depth=1, decode_ms=1.0, prefill_ms=1.0, prefill_tokens=1)
    with pytest.raises(ValueError, match="different depths"):
        Curve(points=(point, point))
    with pytest.raises(ValueError, match="different depths"):
        Curve(points=())


points = st.dictionaries(st.integers(1, 5000), st.floats(0.1, 500), min_size=1, max_size=6)


@given(points, st.floats(0, 5000))
def test_inside_what_was_measured_speed_stays_between_slowest_and_fastest(
    found: dict[int, float], depth: float
) -> None:
    at = min(depth, max(found))
    assert min(found.values()) - 1e-6 <= curve(found).decode_ms(at) <= max(found.values()) + 1e-6


@given(points, st.floats(0, 50_000))
def test_the_interval_holds_the_figure_and_never_shrinks_with_depth(found: dict[int, float], beyond: float) -> None:
    shape = curve(found)
    near, far = shape.decode(shape.deepest + beyond), shape.decode(shape.deepest + 2 * beyond)
    for figure in (near, far):
        assert figure.low_ms <= figure.ms + 1e-6
        assert figure.ms <= figure.high_ms + 1e-6
    assert far.ms >= near.ms - 1e-6
    assert far.high_ms - far.low_ms >= near.high_ms - near.low_ms - 1e-6


@given(points, st.integers(0, 6000), st.integers(1, 3000), st.integers(1, 3000))
def test_a_job_decoded_in_two_parts_takes_as_long(found: dict[int, float], first: int, one: int, two: int) -> None:
    whole = curve(found).decode_s(first, one + two)
    assert whole == pytest.approx(curve(found).decode_s(first, one) + curve(found).decode_s(first + one, two))


@given(st.lists(st.tuples(st.integers(1, 4000), st.floats(0.01, 100)), min_size=1, max_size=5), st.integers(0, 9000))
def test_a_longer_prompt_never_takes_less_time(stretches: list[tuple[int, float]], tokens: int) -> None:
    ends = [0]
    for length, _ in stretches:
        ends.append(ends[-1] + length)
    found = read(*((a, b, ms) for (a, b), (_, ms) in zip(pairwise(ends), stretches, strict=True)))
    assert 0 <= found.prefill_s(0, tokens) <= found.prefill_s(0, tokens + 100)
    beside = Curve(points=tuple(replace(point, copied_batch=512) for point in found.points))
    assert 0 <= beside.prefill_s(0, tokens) <= beside.prefill_s(0, tokens + 100)
