"""Preview of a start: the plan that it would serve, and the profile which that comes from, if any."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from functools import cache, cached_property, partial

from appliance.engines.engine import Space
from appliance.errors import ConfigError, FatalError, ModelAwayError
from appliance.model import Model
from appliance.model.shapes.published import PublishedShape, find_shape, shape_called
from appliance.plan import LargerContext, Plan
from appliance.plan.memory_kill import why_smaller
from appliance.probe import Hardware, probe
from appliance.profile import Picked, Profile, ProfileStatus, ProfileStore, pick
from appliance.serve.beside import with_beside
from appliance.serve.candidates import Chosen, Offered, choose_located, choose_rung, choose_with_kept, settle
from appliance.serve.cell_facts import Stand, contents_of_cell, has_image, unknown_model
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
from appliance.serve.outlook import larger_contexts, to_measure
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
    stand: Stand | None = None  # in place of an image

    @cached_property
    def larger_contexts(self) -> tuple[LargerContext, ...]:
        """Longer contexts that other settings would give."""
        return larger_contexts(self.start, self.space, self.plan)

    @cached_property
    def to_measure(self) -> tuple[str, ...]:
        """What measuring decides: names of knobs."""
        return to_measure(self.start, self.space, self.plan)

    @property
    def warnings(self) -> tuple[str, ...]:
        """Of the machine, as a start logs them."""
        return (*self.start.inputs.hardware.gpus.warnings, *self.start.warnings)


def preview(
    settings: Settings, environment: Mapping[str, str], hardware: Hardware | None = None, *, cell: str | None = None
) -> Preview:
    """Return what a start would serve. Writes and starts nothing; of a model that is not here the header is read.

    `hardware` is of another machine than this. `cell` names an image in place of the one that this runs in; outside of
    an image the cell is chosen for the machine.
    """
    contents, stand, hardware = _contents(settings, environment, hardware, cell)
    return replace(_preview(contents, environment, hardware, stand), stand=stand)


def _preview(
    contents: Contents, environment: Mapping[str, str], hardware: Hardware | None, stand: Stand | None
) -> Preview:
    look = cache(partial(_look, contents, environment, hardware))
    found = _which(contents, environment, stand)
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


def preview_files(
    settings: Settings, environment: Mapping[str, str], hardware: Hardware | None = None, *, cell: str | None = None
) -> Chosen:
    """Return all that could be served of what was asked for, and what would be. `cell` as `preview` takes it."""
    contents, stand, hardware = _contents(settings, environment, hardware, cell)
    machine = _look(contents, environment, hardware)
    found = _which(contents, environment, stand)
    if isinstance(found, PublishedShape):
        message = f"--files compares files, and this is the shape of one: {found.name}"
        raise ConfigError(message, hint="leave out --files")
    if isinstance(found, Located):
        return choose_located(contents, found, environment, machine)
    if isinstance(found, FromRecipe) and hardware is None:
        return choose_with_kept(contents, found, environment, machine)
    return _chosen(contents, found, environment, machine)


def _contents(
    settings: Settings, environment: Mapping[str, str], hardware: Hardware | None, cell: str | None
) -> tuple[Contents, Stand | None, Hardware | None]:
    """What an image holds, and what stands for it if there is none; with the hardware that a cell was chosen for."""
    if cell is None and has_image(settings):
        return read_contents(settings), None, hardware
    hardware = hardware or probe(settings.data_dir, environment)
    return *contents_of_cell(settings, hardware, cell), hardware


def _look(contents: Contents, environment: Mapping[str, str], hardware: Hardware | None) -> Machine:
    return look_at_machine(contents, environment) if hardware is None else machine_of(contents, hardware)


def _which(contents: Contents, environment: Mapping[str, str], stand: Stand | None) -> Which | PublishedShape:
    """A shape only if nothing here has the name."""
    request = contents.settings.model
    try:
        return contents.which_model(environment)
    except FatalError as error:
        shape = (shape_called(request) or find_shape(request)) if request else None
        if shape is None and stand and request:
            raise unknown_model(request) from error
        if shape is None:
            raise
    if contents.engine.model_format != "gguf":
        message = f"shapes are of GGUF files, and this image serves {contents.engine.model_format}: {request}"
        raise ConfigError(message, hint="plan it for an image of GGUF: --cell, or `python -m images select` names one")
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
