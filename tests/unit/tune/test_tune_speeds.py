"""Speeds as numbers, and the sentences that are made of them."""

from __future__ import annotations

import json
import re
from dataclasses import asdict, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from appliance.engines.llama.planning.arguments.launch import launch_of
from appliance.plan import LONG_PROMPTS, with_launch
from appliance.profile import speeds_document, speeds_of
from appliance.tune.figures.curve import Curve, Point
from appliance.tune.figures.measurement import Measurement
from appliance.tune.figures.speeds import measured_speeds, predicted_speeds, speeds_on
from appliance.tune.figures.workload import CHAT, CODING_AGENT, WORKLOADS, Mix, only, parse_mix, scaled
from tests.builders import SPACE, measured, profile
from tests.unit.engines.llama.planning.test_plan_space import laptop_plans

PLAN = SPACE.best


@st.composite
def made_points(draw: st.DrawFn) -> Point:
    depth = draw(st.integers(1, 200_000))
    return Point(
        depth=depth,
        decode_ms=draw(st.floats(0.01, 1e5)),
        prefill_ms=draw(st.floats(0.001, 1e4)),
        prefill_tokens=draw(st.integers(0, min(depth, 4096))),  # more than lie before it cannot be read
        noise_factor=draw(st.floats(1, 5)),
    )


points = made_points()
curves = st.lists(points, min_size=1, max_size=5, unique_by=lambda point: point.depth).map(
    lambda found: Curve(points=tuple(found))
)
weights = st.floats(0.1, 10)
mixes = st.lists(st.tuples(st.sampled_from(sorted(WORKLOADS)), weights), min_size=1, max_size=3).map(
    lambda parts: Mix(parts=tuple((WORKLOADS[name], weight) for name, weight in parts))
)
contexts = st.integers(512, 131_072)


@given(curves, mixes, contexts)
def test_the_figures_at_a_measured_depth_are_those_of_its_point(curve: Curve, mix: Mix, context: int) -> None:
    found = speeds_on(curve, replace(PLAN, context=context), mix)
    assert [at.depth for at in found.at] == sorted(point.depth for point in curve.points)
    for at, point in zip(found.at, curve.ordered, strict=True):
        assert at.decode_tokens_per_s == 1000 / point.decode_ms
        assert at.decode_tokens_per_s == pytest.approx(1000 / curve.decode_ms(point.depth))
        assert at.decode_uncertainty == point.relative_error
        assert at.prefill_tokens == point.prefill_tokens
        assert at.prefill_tokens_per_s == (1000 / point.prefill_ms if point.prefill_tokens else None)
    json.dumps(asdict(found), allow_nan=False)  # as the gateway's answer is written


@given(curves, mixes, contexts)
def test_a_first_token_takes_the_whole_prompt_and_a_step_and_a_job_is_not_shorter(
    curve: Curve, mix: Mix, context: int
) -> None:
    found = speeds_on(curve, replace(PLAN, context=context), mix)
    for job, (workload, _) in zip(found.jobs, mix.parts, strict=True):
        expected = scaled(workload, context)
        assert (job.workload, job.tokens_in, job.tokens_out) == (expected.name, expected.tokens_in, expected.tokens_out)
        assert job.tokens_in + job.tokens_out <= context
        step_s = curve.decode_s(job.tokens_in, 1)
        assert job.ttft_s == pytest.approx(curve.prefill_s(0, job.tokens_in) + step_s)
        reused_s = curve.prefill_s(0, job.tokens_reused)
        assert job.job_s >= (job.ttft_s - reused_s) * (1 - 1e-9) - 1e-9


@given(curves, mixes)
def test_the_sentence_says_the_numbers(curve: Curve, mix: Mix) -> None:
    found = speeds_on(curve, replace(PLAN, context=131_072), mix)
    decoded, _, jobs = found.describe().partition("; ")
    said = [
        (speed, int(depth.replace(",", ""))) for speed, depth in re.findall(r"([\d.]+) tok/s.*? at ([\d,]*\d)", decoded)
    ]
    assert said == [(f"{at.decode_tokens_per_s:.1f}", at.depth) for at in found.at]
    assert re.findall(r"takes ([\d.]+) s", jobs) == [f"{job.job_s:.1f}" for job in found.jobs]
    assert jobs.count("(extrapolated)") == sum(job.is_extrapolated for job in found.jobs)
    assert decoded.count("few tokens") == sum(at.decode_uncertainty > 0 for at in found.at)


def test_a_sentence_and_the_numbers_that_it_is_made_of() -> None:
    shallow = Point(depth=32, decode_ms=8.0, prefill_ms=4.0, prefill_tokens=32)
    deep = Point(depth=2048, decode_ms=25.0, prefill_ms=2.0, prefill_tokens=2016, noise_factor=2.0)
    found = speeds_on(Curve(points=(deep, shallow)), replace(PLAN, context=32768), parse_mix("chat,agent"))
    assert found.describe() == (
        "decodes 125.0 tok/s at 32 tokens of context, 40.0 tok/s (within 14 %: few tokens) at 2,048; "
        f"a chat job takes {found.jobs[0].job_s:.1f} s, "
        f"a coding agent job takes {found.jobs[1].job_s:.1f} s (extrapolated)"
    )
    assert [at.prefill_tokens_per_s for at in found.at] == [250.0, 500.0]


def test_what_is_reused_shortens_the_job_and_not_the_first_token() -> None:
    flat = Curve(points=(Point(depth=512, decode_ms=20.0, prefill_ms=2.0, prefill_tokens=512),))
    (job,) = speeds_on(flat, replace(PLAN, context=32768), only(CODING_AGENT)).jobs
    assert job.ttft_s == pytest.approx(16384 * 0.002 + 0.020)
    assert job.job_s == pytest.approx((16384 - 14336) * 0.002 + 512 * 0.020)


def test_only_what_was_measured_of_the_plan_counts() -> None:
    best, second, failed, *_ = SPACE.all()
    looks = (measured(best), measured(second, faster=0.5), Measurement(key=failed.key, error="no memory"))
    fast, slow = (measured_speeds(plan, looks, only(CHAT)) for plan in (best, second))
    assert fast is not None
    assert slow is not None
    assert (fast.plan, slow.plan) == (best.key, second.key)
    assert [at.decode_tokens_per_s / 2 for at in fast.at] == [at.decode_tokens_per_s for at in slow.at]
    assert measured_speeds(failed, looks, only(CHAT)) is None


def test_any_plan_of_a_profile_has_its_own_speeds() -> None:
    found = profile()
    second = found.plans[1]
    speeds = speeds_of(second, found)
    assert speeds is not None
    document = speeds_document(second, speeds)
    assert document["measured"] == asdict(speeds)
    assert document["measured"]["plan"] == document["predicted"]["plan"] == second.key
    assert document["measured"]["at"][0]["decode_tokens_per_s"] == pytest.approx(1000 / (32 / 7 / 0.9))
    stranger = with_launch(second, threads=launch_of(second).threads + 100)
    assert speeds_of(stranger, found) is None
    assert speeds_document(second, None) == {"measured": None, "predicted": document["predicted"]}
    assert speeds_document(None, speeds_of(None, found)) == {"measured": None, "predicted": None}


@pytest.mark.parametrize("part", range(20))
def test_a_prediction_has_the_planners_figures(part: int) -> None:
    plan = laptop_plans()[part * len(laptop_plans()) // 20]
    found = predicted_speeds(plan)
    assert found is not None
    assert plan.speed is not None
    (at,), (job,) = found.at, found.jobs
    assert (at.depth, at.decode_tokens_per_s) == (CHAT.depth, plan.speed.decode_tokens_per_s)
    assert (at.prefill_tokens, at.prefill_tokens_per_s) == (job.tokens_in, plan.speed.prefill_tokens_per_s)
    assert job.tokens_in == (LONG_PROMPTS["chat"] if plan.placement.copies_weights else CHAT.tokens_in)
    prefill_s = job.tokens_in / plan.speed.prefill_tokens_per_s
    assert job.ttft_s == pytest.approx(prefill_s + 1 / plan.speed.decode_tokens_per_s)
    assert job.job_s == pytest.approx(prefill_s + CHAT.tokens_out / plan.speed.decode_tokens_per_s)  # the same chat job
    decode, prefill = f"{at.decode_tokens_per_s:.0f} tok/s of decode", f"{at.prefill_tokens_per_s:.0f} of prefill"
    bare = replace(plan.speed, decode_interval=None, prefill_interval=None)
    assert bare.describe() == f"{decode}, {prefill}"


def test_a_plan_without_a_prediction_has_none() -> None:
    assert predicted_speeds(replace(PLAN, speed=None)) is None
