"""Speeds of a plan as numbers, from its measurements or from its prediction. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from appliance.plan import JobSpeed, Plan, SpeedAt, Speeds
from appliance.tune.figures.curve import Curve
from appliance.tune.figures.measurement import Measurement, curve_of
from appliance.tune.figures.workload import CHAT, Mix, Workload, job_s, scaled_mix

COVERED = 1.2  # a job up to so many times the deepest measured depth does not count as extrapolated


def measured_speeds(plan: Plan, measurements: Iterable[Measurement], mix: Mix) -> Speeds | None:
    """Return the measured speeds of a plan, or None if it was not measured."""
    looks = [look for look in measurements if look.key in plan.keys and look.points]
    return speeds_on(curve_of(looks), plan, mix) if looks else None


def speeds_on(curve: Curve, plan: Plan, mix: Mix) -> Speeds:
    """Return the speeds of a plan from its curve. The mix is scaled to the plan's context."""
    jobs = tuple(_job_on(curve, job) for job, _ in scaled_mix(mix, plan.context).parts)
    return Speeds(plan=plan.key, at=tuple(point.speed for point in curve.ordered), jobs=jobs)


def predicted_speeds(plan: Plan) -> Speeds | None:
    """Return the predicted speeds of a plan, or None if it has no prediction. They are for the chat job with the prompt
    length of the prediction, whatever the workload."""
    speed = plan.speed
    if speed is None:
        return None
    at = SpeedAt(
        depth=CHAT.depth,
        decode_tokens_per_s=speed.decode_tokens_per_s,
        prefill_tokens=speed.prompt_tokens,
        prefill_tokens_per_s=speed.prefill_tokens_per_s,
    )
    ttft_s = speed.prompt_tokens / speed.prefill_tokens_per_s + 1 / speed.decode_tokens_per_s
    job = replace(CHAT, tokens_in=speed.prompt_tokens)
    return Speeds(plan=plan.key, at=(at,), jobs=(_job(job, ttft_s, speed.job_s),))


def _job_on(curve: Curve, job: Workload) -> JobSpeed:
    first_token = replace(job, tokens_reused=0, tokens_out=1)
    is_extrapolated = job.tokens_in + job.tokens_out > curve.deepest * COVERED
    return _job(job, job_s(curve, first_token), job_s(curve, job), is_extrapolated=is_extrapolated)


def _job(job: Workload, ttft_s: float, job_s: float, *, is_extrapolated: bool = False) -> JobSpeed:
    return JobSpeed(
        workload=job.name,
        tokens_in=job.tokens_in,
        tokens_reused=job.tokens_reused,
        tokens_out=job.tokens_out,
        ttft_s=ttft_s,
        job_s=job_s,
        is_extrapolated=is_extrapolated,
    )
