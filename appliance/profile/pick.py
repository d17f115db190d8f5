"""Which plan of a profile a start serves: the best for the mode that the memory which is free now carries. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

from appliance.plan import Plan, Space, with_measured
from appliance.profile.record import Profile
from appliance.tune.measurement import rated
from appliance.tune.modes import Mode, choose
from appliance.tune.workload import parse_mix


@dataclass(frozen=True, kw_only=True)
class Picked:
    """`passed_over` says of each better plan what it lacks now; `why` is the mode's reason."""

    plan: Plan
    why: str
    is_best: bool
    passed_over: tuple[str, ...] = ()


def pick(profile: Profile, mode: str, space: Space) -> Picked | tuple[str, ...]:
    """What each plan lacks, where none fits."""
    plans = {plan.key: plan for plan in (profile.plan, *profile.plans)}
    left = rated(plans.values(), profile.measurements, like=profile.like)
    mix = parse_mix(profile.workload)
    lacking: list[str] = []
    while left:
        chosen = choose(cast("Mode", mode), left, mix, native=profile.native)
        found = space.now(plans[chosen.rated.key])
        if not isinstance(found, str):
            plan = with_measured(found, chosen.why) if found.key != profile.plan.key else found
            return Picked(plan=plan, why=chosen.why, is_best=not lacking, passed_over=tuple(lacking))
        lacking.append(f"{chosen.rated.key}: {found}")
        left = [each for each in left if each.key != chosen.rated.key]
    return tuple(lacking)
