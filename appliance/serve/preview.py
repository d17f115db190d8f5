"""Preview of a start: the plan that it would serve, and the profile which that comes from, if any."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from functools import cache, partial

from appliance.engines.engine import Space
from appliance.errors import ModelAwayError
from appliance.plan import Plan
from appliance.profile import Key, Picked, Profile, ProfileStatus, ProfileStore, pick
from appliance.serve.candidates import Chosen, Offered, choose_located, choose_with_kept, settle
from appliance.serve.inputs import Contents, Machine, StartInputs, inputs_of, look_at_machine, read_contents, with_model
from appliance.serve.kept_choice import Kept
from appliance.serve.which import FromHub, FromRecipe, Located
from appliance.settings import Settings
from appliance.values import dataclass


@dataclass(frozen=True, kw_only=True)
class Preview:
    plan: Plan
    start: StartInputs
    space: Space
    profile: Profile | None = None
    standing: ProfileStatus | None = None
    fetches: Offered | None = None  # what a start would fetch first


def preview(settings: Settings, environment: Mapping[str, str]) -> Preview:
    """Writes nothing and starts nothing. Of a model that is not here its header is looked at, where it is."""
    contents = read_contents(settings)
    look = cache(partial(look_at_machine, contents, environment))
    found = contents.which_model(environment)
    if isinstance(found, Located):
        return _of_start(with_model(contents, found, look))
    if isinstance(found, FromRecipe):
        made = settle(contents, found, environment, look())
    else:
        made = _from_hub(contents, found, environment, look())
    if isinstance(made, Kept):
        return _of_start(with_model(contents, made.located, look))
    if made.pick.located:
        return _of_start(with_model(contents, made.pick.located, look))
    return _of_away(contents, made.pick, look())


def preview_files(settings: Settings, environment: Mapping[str, str]) -> Chosen:
    """All that could be served of what was asked for, and what would be."""
    contents = read_contents(settings)
    machine = look_at_machine(contents, environment)
    found = contents.which_model(environment)
    if isinstance(found, Located):
        return choose_located(contents, found, environment, machine)
    if isinstance(found, FromRecipe):
        return choose_with_kept(contents, found, environment, machine)
    return _from_hub(contents, found, environment, machine)


def _from_hub(contents: Contents, found: FromHub, environment: Mapping[str, str], machine: Machine) -> Chosen:
    from appliance.serve.from_hub import choose_from_hub  # here: it costs 0.2 s, and few starts look elsewhere

    return asyncio.run(choose_from_hub(contents, found, environment, machine, on_wait=lambda _: None))


def _of_start(start: StartInputs) -> Preview:
    store = ProfileStore(start.settings.profiles_dir, lambda _: None)
    profile = store.peek(start.key)
    kv_checks = profile.kv_checks if profile else ()
    space = start.space(kv_checks)
    picked = pick(profile, start.settings.mode, space) if profile else None
    if profile is not None and isinstance(picked, Picked):
        standing = store.status(profile)
        return Preview(plan=picked.plan, start=start, space=space, profile=profile, standing=standing)
    return Preview(plan=space.predicted, start=start, space=space)


def _of_away(contents: Contents, offered: Offered, machine: Machine) -> Preview:
    """Raises ModelAwayError (10) where nothing tells its layers before it is here."""
    if offered.model is None:
        raise ModelAwayError(offered.candidate.name)
    inputs = inputs_of(contents, machine, offered.model)
    start = StartInputs(engine=contents.engine, install=machine.install, inputs=inputs, key=Key(parts={}))
    space = start.space()
    return Preview(plan=space.predicted, start=start, space=space, fetches=offered)
