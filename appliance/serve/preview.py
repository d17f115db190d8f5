"""Preview of a start: the plan that it would serve, and the profile which that comes from, if any."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from functools import cache, partial

from appliance.engines.engine import Space
from appliance.errors import ConfigError, FatalError, ModelAwayError
from appliance.model import Model
from appliance.model.shapes.published import PublishedShape, find_shape
from appliance.plan import Plan
from appliance.plan.memory_kill import why_smaller
from appliance.probe import Hardware
from appliance.profile import Picked, Profile, ProfileStatus, ProfileStore, pick
from appliance.serve.beside import with_beside
from appliance.serve.candidates import Chosen, Offered, choose_located, choose_rung, choose_with_kept, settle
from appliance.serve.forecast import without_profile
from appliance.serve.inputs import (
    Contents,
    Machine,
    StartInputs,
    inputs_of,
    look_at_machine,
    machine_of,
    read_contents,
    with_model,
)
from appliance.serve.kept_choice import Kept
from appliance.serve.which import FromHub, FromRecipe, Located, Which
from appliance.settings import Settings
from appliance.values import dataclass


@dataclass(frozen=True, kw_only=True)
class Preview:
    plan: Plan
    start: StartInputs
    space: Space
    profile: Profile | None = None
    status: ProfileStatus | None = None
    fetches: Offered | None = None  # what a start would fetch first
    shape: PublishedShape | None = None  # in place of a file

    @property
    def warnings(self) -> tuple[str, ...]:
        """Of the machine, as a start logs them."""
        return (*self.start.inputs.hardware.gpus.warnings, *self.start.warnings)


def preview(settings: Settings, environment: Mapping[str, str], hardware: Hardware | None = None) -> Preview:
    """Writes nothing and starts nothing. Of a model that is not here its header is looked at, where it is.

    `hardware` of another machine than this.
    """
    contents = read_contents(settings)
    look = cache(partial(_look, contents, environment, hardware))
    found = _which(contents, environment)
    if isinstance(found, PublishedShape):
        return _of_shape(contents, found, look())
    if isinstance(found, Located):
        return preview_of(with_model(contents, found, look))
    made = _made(contents, found, environment, look(), is_here=hardware is None)
    if isinstance(made, Kept):
        return preview_of(with_model(contents, made.located, look))
    if made.pick.located:
        return preview_of(with_model(contents, made.pick.located, look))
    return _of_away(contents, made.pick, look())


def preview_files(settings: Settings, environment: Mapping[str, str], hardware: Hardware | None = None) -> Chosen:
    """All that could be served of what was asked for, and what would be."""
    contents = read_contents(settings)
    machine = _look(contents, environment, hardware)
    found = _which(contents, environment)
    if isinstance(found, PublishedShape):
        message = f"--files compares files, and this is the shape of one: {found.name}"
        raise ConfigError(message, hint="leave out --files")
    if isinstance(found, Located):
        return choose_located(contents, found, environment, machine)
    if isinstance(found, FromRecipe) and hardware is None:
        return choose_with_kept(contents, found, environment, machine)
    return _chosen(contents, found, environment, machine)


def _look(contents: Contents, environment: Mapping[str, str], hardware: Hardware | None) -> Machine:
    return look_at_machine(contents, environment) if hardware is None else machine_of(contents, hardware)


def _which(contents: Contents, environment: Mapping[str, str]) -> Which | PublishedShape:
    """A shape only where nothing here has the name."""
    request = contents.settings.model
    try:
        return contents.which_model(environment)
    except FatalError:
        shape = find_shape(request) if request else None
        if shape is None:
            raise
    if contents.engine.model_format != "gguf":
        message = f"shapes are of GGUF files, and this image serves {contents.engine.model_format}: {request}"
        raise ConfigError(message, hint="plan it in an image for GGUF: `python -m images select` names one")
    return shape


def _made(
    contents: Contents, found: FromRecipe | FromHub, environment: Mapping[str, str], machine: Machine, *, is_here: bool
) -> Kept | Chosen:
    """A choice that is kept was made for this machine, and for no other."""
    if isinstance(found, FromRecipe) and is_here:
        return settle(contents, found, environment, machine)
    return _chosen(contents, found, environment, machine)


def _chosen(
    contents: Contents, found: FromRecipe | FromHub, environment: Mapping[str, str], machine: Machine
) -> Chosen:
    if isinstance(found, FromRecipe):
        return choose_rung(contents, found, environment, machine)
    import asyncio  # here, both: they cost 0.2 s, and few starts look elsewhere

    from appliance.serve.from_hub import choose_from_hub

    return asyncio.run(choose_from_hub(contents, found, environment, machine, on_wait=lambda _: None))


def preview_of(start: StartInputs) -> Preview:
    """Of a model that is here, on a machine that was looked at."""
    store = ProfileStore(start.settings.profiles_dir, lambda _: None)
    start = start.with_memory_peaks(store)
    kills = start.memory_kills(store)
    start = start.after_memory_kills(kills)
    if (most_mib := start.inputs.host_mib_max) < math.inf:
        start = replace(start, warnings=(*start.warnings, why_smaller(kills, most_mib)))
    profile = store.peek(start.key)
    kv_checks = profile.kv_checks if profile else ()
    space = start.space(kv_checks)
    picked = pick(profile, start.settings.mode, space) if profile else None
    if profile is not None and isinstance(picked, Picked):
        status = store.status(profile)
        return Preview(plan=picked.plan, start=start, space=space, profile=profile, status=status)
    return Preview(plan=space.predicted, start=start, space=space)


def _of_away(contents: Contents, offered: Offered, machine: Machine) -> Preview:
    """Raises ModelAwayError (10) where nothing tells its layers before it is here."""
    if offered.model is None:
        raise ModelAwayError(offered.candidate.name)
    return replace(_predicted(contents, machine, offered.model), fetches=offered)


def _of_shape(contents: Contents, shape: PublishedShape, machine: Machine) -> Preview:
    model = shape.describe(contents.settings.models_dir)
    return replace(_predicted(contents, machine, model), shape=shape)


def _predicted(contents: Contents, machine: Machine, model: Model) -> Preview:
    """Of a model that no profile can be of, since it is not here; files named beside it may be."""
    inputs = inputs_of(contents, machine, with_beside(model, contents.settings, is_here=False))
    start = replace(without_profile(contents.engine, machine.install, inputs), warnings=machine.warnings)
    space = start.space()
    return Preview(plan=space.predicted, start=start, space=space)
