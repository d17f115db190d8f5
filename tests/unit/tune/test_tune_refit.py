from __future__ import annotations

import math
import random
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from appliance.tune.search.refit import Job, Late, Observation, Term, cholesky, fit, inverse, prior, solve

PRIORS = {"gpu": 0.4, "cpu": 0.4, "fixed": 0.4, "knob": 0.1}


def terms(gpu: float, cpu: float) -> tuple[Term, ...]:
    return (Term(ms=gpu, by=("gpu",)), Term(ms=cpu, by=("cpu",)))


def seen(gpu: float, cpu: float, *, truth: tuple[float, float], noise: float = 0.01, off: float = 1.0) -> Observation:
    return Observation(terms=terms(gpu, cpu), ms=(gpu * truth[0] + cpu * truth[1]) * off, noise=noise)


times = st.floats(0.01, 1e4)
SHAPES = [(10.0, 1.0), (1.0, 10.0), (5.0, 5.0), (8.0, 2.0), (2.0, 8.0), (3.0, 9.0)]


def test_without_measurements_nothing_is_corrected_and_the_priors_are_the_std() -> None:
    found = fit([], PRIORS)
    assert found.predict_ms(terms(3.0, 4.0)) == 7.0
    assert found.std(Job(terms=terms(3.0, 0.0))) == pytest.approx(0.4)


@pytest.mark.parametrize("truth", [(1.0, 1.0), (2.0, 0.5), (0.5, 2.0), (1.3, 0.9)])
def test_rates_that_are_off_are_found_from_a_few_times(truth: tuple[float, float]) -> None:
    found = fit([seen(*shape, truth=truth) for shape in SHAPES], PRIORS)
    assert found.predict_ms(terms(1.0, 0.0)) == pytest.approx(truth[0], rel=0.05)
    assert found.predict_ms(terms(0.0, 1.0)) == pytest.approx(truth[1], rel=0.05)
    assert found.predict_ms(terms(4.0, 7.0)) == pytest.approx(4 * truth[0] + 7 * truth[1], rel=0.03)


def test_one_hiccup_of_the_machine_does_not_bend_the_fit() -> None:
    found = fit([seen(*s, truth=(1.0, 1.0), off=3.0 if s == (5.0, 5.0) else 1.0) for s in SHAPES * 2], PRIORS)
    assert found.predict_ms(terms(10.0, 0.0)) == pytest.approx(10, rel=0.15)


def test_what_scales_both_alike_does_not_tell_which_is_faster() -> None:
    found = fit([], PRIORS)
    assert found.std(Job(terms=terms(10.0, 0.0)), Job(terms=terms(5.0, 0.0))) == 0.0
    assert found.std(Job(terms=terms(10.0, 0.0)), Job(terms=terms(0.0, 5.0))) == pytest.approx(0.4 * math.sqrt(2))


def test_luck_cannot_make_a_part_less_than_nothing() -> None:
    """Only 2 of 10 ms can shrink, so luck is worth at most ln(10 / 8). Two deviations shrink these 2 ms by 1.3 ms."""
    found = fit([], {"gpu": 0.0001, "cpu": 0.5})
    mixed, other = Job(terms=terms(8.0, 2.0)), Job(terms=terms(8.0, 0.0))
    assert found.std(mixed, other) == pytest.approx(0.1, rel=0.01)
    assert found.reach(mixed, other) == pytest.approx(math.log(10 / (8 + 2 * math.exp(-1))) / 2, rel=0.01)


@given(times, times, times)
def test_luck_is_worth_no_more_than_what_can_vanish_and_no_more_than_the_slope_says(
    gpu: float, cpu: float, other: float
) -> None:
    found = fit([], {"gpu": 1e-6, "cpu": 2.0})
    mixed, fixed = Job(terms=terms(gpu, cpu)), Job(terms=terms(other, 0.0))
    reach = found.reach(mixed, fixed)
    assert 0.0 <= reach <= math.log((gpu + cpu) / gpu) / 2 + 1e-4
    assert reach <= found.std(mixed, fixed) + 1e-4
    assert found.reach(mixed, mixed) == 0.0


@given(times, times, st.floats(0.1, 1e4))
def test_what_is_late_counts_tenfold_and_makes_the_job_as_much_less_certain(
    gpu: float, cpu: float, limit: float
) -> None:
    found = fit([], PRIORS)
    job = Job(terms=terms(gpu, cpu), late=(Late(terms=terms(gpu, 0.0), limit_ms=limit, weight=9.0),))
    assert found.job_ms(job) == pytest.approx(gpu + cpu + 9 * max(0.0, gpu - limit))
    longer = Job(terms=terms(gpu * 1.0001, cpu * 1.0001), late=(replace(job.late[0], terms=terms(gpu * 1.0001, 0.0)),))
    if abs(gpu / limit - 1) > 0.001:  # but for the corner
        slope = math.log(found.job_ms(longer) / found.job_ms(job)) / math.log(1.0001)
        assert found.leverage(job) == pytest.approx(slope, rel=0.01)
        gpu_share = (gpu * (10 if gpu > limit else 1)) / found.job_ms(job)
        assert found.std(job) == pytest.approx(0.4 * math.hypot(gpu_share, cpu / found.job_ms(job)))


def test_residuals_larger_than_the_noise_are_believed() -> None:
    draw = random.Random(1)
    calm = fit([seen(*s, truth=(1.0, 1.0), off=math.exp(draw.gauss(0, 0.01))) for s in SHAPES * 3], PRIORS)
    rough = fit([seen(*s, truth=(1.0, 1.0), off=math.exp(draw.gauss(0, 0.3))) for s in SHAPES * 3], PRIORS)
    assert calm.noise_factor < 1.0 < 2.0 < rough.noise_factor
    assert rough.misfit > calm.misfit


def test_a_prior_is_found_by_name_then_by_what_stands_before_the_colon() -> None:
    assert (prior(PRIORS, "gpu"), prior(PRIORS, "knob"), prior(PRIORS, "never")) == (0.4, 0.1, 0.35)


@given(st.lists(st.tuples(times, times, times), min_size=1, max_size=12))
def test_any_times_at_all_give_finite_corrections_and_each_measurement_only_narrows(
    rows: list[tuple[float, float, float]],
) -> None:
    observations = [Observation(terms=terms(gpu, cpu), ms=ms, noise=0.05) for gpu, cpu, ms in rows]
    found = fit(observations, PRIORS)
    assert all(math.isfinite(value) for value in found.theta)
    assert found.predict_ms(terms(1.0, 1.0)) > 0
    assert 0 <= found.std(Job(terms=terms(1.0, 1.0))) <= 0.4 + 1e-9


@given(st.integers(1, 6), st.integers())
def test_the_solver_solves(size: int, seed: int) -> None:
    draw = random.Random(seed)
    root = [[draw.gauss(0, 1) for _ in range(size)] for _ in range(size)]
    matrix = [[sum(a * b for a, b in zip(p, q, strict=True)) + (p is q) for q in root] for p in root]
    right = [draw.gauss(0, 1) for _ in range(size)]
    found = solve(matrix, right)
    for row, wanted in zip(matrix, right, strict=True):
        assert sum(a * x for a, x in zip(row, found, strict=True)) == pytest.approx(wanted, abs=1e-6)
    assert [row[0] for row in inverse(matrix)] == pytest.approx(solve(matrix, [1.0, *[0.0] * (size - 1)]), abs=1e-6)
    assert all(cholesky(matrix)[i][i] > 0 for i in range(size))
