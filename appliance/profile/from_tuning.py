"""Make a profile from the result of a tuning. Pure, except for the current time."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime

from appliance.profile.record import Key, Profile
from appliance.settings import Settings
from appliance.tune.figures.speeds import speeds_on
from appliance.tune.figures.workload import parse_mix
from appliance.tune.session import MeasuredPlans, TuningResult


def make_profile(
    result: TuningResult, *, key: Key, settings: Settings, gpu_uuids: tuple[str, ...], before: Profile | None
) -> Profile:
    """Return the profile. `before` is the one that it would replace; it is used to count disturbed tunings in a row."""
    tuned = result.tuned
    curve = tuned.chosen.scored.curve
    disturbed_before = before.disturbed_times if before is not None and before.key == key else 0
    return Profile(
        key=key,
        plan=result.plan,
        plans=tuned.plans,
        measurements=tuned.measurements,
        kv_checks=result.kv_checks,
        notes=result.notes,
        mode=settings.mode,
        workload=settings.workload,
        native=result.native,
        job_s=tuned.job_s,
        speed=speeds_on(curve, result.plan, parse_mix(settings.workload)).describe(),
        seconds=result.seconds,
        stopped_by=tuned.stopped_by,
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        allocated=tuned.allocated,
        disturbance=tuned.disturbance,
        disturbed_times=disturbed_before + 1 if tuned.disturbance else 0,
        goes_on_from=result.goes_on_from,
        gpu_uuids=gpu_uuids,
    )


def measured_of(profile: Profile) -> MeasuredPlans:
    return MeasuredPlans(plans=profile.plans, measurements=profile.measurements, kv_checks=profile.kv_checks)


def with_more(profile: Profile, found: MeasuredPlans, mode: str | None) -> Profile:
    """Return the profile with the measurements that were added later, for another mode if `mode` is given."""
    modes = (*profile.other_modes, *((mode,) if mode else ()))
    return replace(profile, plans=found.plans, measurements=found.measurements, other_modes=modes)
