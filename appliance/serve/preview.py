"""Preview of a start: the plan that it would serve, and the profile which that comes from, if any."""

from __future__ import annotations

from collections.abc import Mapping

from appliance.engines.engine import Space
from appliance.plan import Plan
from appliance.profile import Picked, Profile, ProfileStatus, ProfileStore, pick
from appliance.serve.inputs import StartInputs, read_inputs
from appliance.settings import Settings
from appliance.values import dataclass


@dataclass(frozen=True, kw_only=True)
class Preview:
    plan: Plan
    start: StartInputs
    space: Space
    profile: Profile | None = None
    standing: ProfileStatus | None = None


def preview(settings: Settings, environment: Mapping[str, str]) -> Preview:
    """Writes nothing and starts nothing."""
    start = read_inputs(settings, environment)
    store = ProfileStore(settings.profiles_dir, lambda _: None)
    profile = store.peek(start.key)
    kv_checks = profile.kv_checks if profile else ()
    space = start.space(kv_checks)
    picked = pick(profile, settings.mode, space) if profile else None
    if profile is not None and isinstance(picked, Picked):
        standing = store.status(profile)
        return Preview(plan=picked.plan, start=start, space=space, profile=profile, standing=standing)
    return Preview(plan=space.predicted, start=start, space=space)
