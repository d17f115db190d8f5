"""Preview of a start: the plan that it would serve, and the profile that the plan is from, if any."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from functools import cache, cached_property, partial

from appliance.abilities import Abilities
from appliance.abilities.expert_loss import KeptExpertLoss
from appliance.abilities.kept import KeptAbilities
from appliance.engines.engine import Space
from appliance.errors import ConfigError, FatalError, ModelAwayError
from appliance.model import Model
from appliance.model.files.quantized import Loss
from appliance.model.shapes.published import PublishedShape, find_shape, shape_called
from appliance.plan import LargerContext, Plan
from appliance.plan.memory_kill import why_smaller
from appliance.preview.cell_facts import Stand, contents_of_cell, has_image, unknown_model
from appliance.preview.outlook import larger_contexts, to_measure
from appliance.probe import Hardware, probe
from appliance.profile import Picked, Profile, ProfileStatus, ProfileStore, pick
from appliance.profile.starting import Foreign, first_plan
from appliance.selection.candidates import (
    Chosen,
    Option,
    choose_located,
    choose_or_reuse,
    choose_variant,
    choose_with_saved,
)
from appliance.selection.forecast import without_profile
from appliance.selection.quantized import planned, start_of
from appliance.selection.request import FromHub, FromRecipe, Request, read_request
from appliance.selection.saved_choice import Saved
from appliance.settings import Settings
from appliance.start.attachments import with_attachments
from appliance.start.image import ImageContents, read_contents
from appliance.start.inputs import Located, StartInputs, inputs_of
from appliance.start.machine import UsableMachine, look_at_machine, machine_of
from appliance.values import dataclass


@dataclass(frozen=True, kw_only=True)
class Preview:
    """The plan of a start that was not made."""

    plan: Plan
    start: StartInputs
    space: Space
    profile: Profile | None = None
    status: ProfileStatus | None = None
    foreign: Foreign | None = None  # the plan is from it
    abilities: Abilities | None = None  # that were checked on this machine
    experts_loss: Loss | None = None  # by fewer experts a token, measured on this machine
    fetches: Option | None = None  # the candidate that a start would fetch first
    shape: PublishedShape | None = None  # planned instead of a file
    stand: Stand | None = None  # stands for an image that is not here

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
        """The warnings about the machine that a start logs."""
        return (*self.start.inputs.hardware.gpus.warnings, *self.start.warnings)


def preview(
    settings: Settings, environment: Mapping[str, str], hardware: Hardware | None = None, *, cell: str | None = None
) -> Preview:
    """Plan a start without making it. Writes nothing and starts nothing.

    For a model that is not here, some MiB of its header may be read from the hub. `hardware` describes another machine.
    `cell` names an image to plan for instead of the one that this runs in; without an image the cell is chosen for the
    machine.
    """
    contents, stand, hardware = _contents(settings, environment, hardware, cell)
    return replace(_preview(contents, environment, hardware, stand), stand=stand)


def _preview(
    contents: ImageContents, environment: Mapping[str, str], hardware: Hardware | None, stand: Stand | None
) -> Preview:
    look = cache(partial(_look, contents, environment, hardware))
    found = _requested(contents, environment, stand)
    if isinstance(found, PublishedShape):
        return _preview_shape(contents, found, look())
    if isinstance(found, Located):
        return preview_of(start_of(contents, found, look))
    made = _made(contents, found, environment, look(), is_here=hardware is None)
    if isinstance(made, Saved):
        return preview_of(start_of(contents, made.located, look))
    if made.pick.located:
        return preview_of(start_of(contents, made.pick.located, look))
    return _preview_away(contents, made.pick, look())


def preview_files(
    settings: Settings, environment: Mapping[str, str], hardware: Hardware | None = None, *, cell: str | None = None
) -> Chosen:
    """Judge all files that the request could mean, and choose one as a start would. `cell` as in `preview`."""
    contents, stand, hardware = _contents(settings, environment, hardware, cell)
    machine = _look(contents, environment, hardware)
    found = _requested(contents, environment, stand)
    if isinstance(found, PublishedShape):
        message = f"--files compares files, and this is a shape without a file: {found.name}"
        raise ConfigError(message, hint="leave out --files")
    if isinstance(found, Located):
        return choose_located(contents, found, environment, machine)
    if isinstance(found, FromRecipe) and hardware is None:
        return choose_with_saved(contents, found, environment, machine)
    return _chosen(contents, found, environment, machine)


def _contents(
    settings: Settings, environment: Mapping[str, str], hardware: Hardware | None, cell: str | None
) -> tuple[ImageContents, Stand | None, Hardware | None]:
    """Return the image's contents, the cell that stands for a missing image, and the hardware it was chosen for."""
    if cell is None and has_image(settings):
        return read_contents(settings), None, hardware
    hardware = hardware or probe(settings.data_dir, environment)
    return *contents_of_cell(settings, hardware, cell), hardware


def _look(contents: ImageContents, environment: Mapping[str, str], hardware: Hardware | None) -> UsableMachine:
    return look_at_machine(contents, environment) if hardware is None else machine_of(contents, hardware)


def _requested(
    contents: ImageContents, environment: Mapping[str, str], stand: Stand | None
) -> Request | PublishedShape:
    """Read the request; a published shape if nothing here has its name."""
    request = contents.settings.model
    try:
        return read_request(contents, environment)
    except FatalError as error:
        shape = (shape_called(request) or find_shape(request)) if request else None
        if shape is None and stand and request:
            raise unknown_model(request) from error
        if shape is None:
            raise
    if contents.engine.model_format != "gguf":
        message = f"shapes describe GGUF files, and this image serves {contents.engine.model_format}: {request}"
        raise ConfigError(message, hint="plan it for an image of GGUF: --cell, or `python -m images select` names one")
    return shape


def _made(
    contents: ImageContents,
    found: FromRecipe | FromHub,
    environment: Mapping[str, str],
    machine: UsableMachine,
    *,
    is_here: bool,
) -> Saved | Chosen:
    """Choose as a start would. A saved choice counts only on this machine."""
    if isinstance(found, FromRecipe) and is_here:
        return choose_or_reuse(contents, found, environment, machine)
    return _chosen(contents, found, environment, machine)


def _chosen(
    contents: ImageContents, found: FromRecipe | FromHub, environment: Mapping[str, str], machine: UsableMachine
) -> Chosen:
    if isinstance(found, FromRecipe):
        return choose_variant(contents, found, environment, machine)
    import asyncio  # here, both: they cost 0.2 s, and few starts look elsewhere

    from appliance.selection.remote import choose_from_hub

    return asyncio.run(choose_from_hub(contents, found, environment, machine, on_wait=lambda _: None))


def preview_of(start: StartInputs) -> Preview:
    """Preview a model that is here, on a machine that was looked at. One that is quantized first has no profile yet."""
    if start.quantization and start.quantization.comes_first:
        start = planned(start)
        space = start.space()
        return Preview(plan=space.predicted, start=start, space=space)
    store = ProfileStore(start.settings.profiles_dir, lambda _: None)
    start = start.with_memory_peaks(store)
    kills = start.memory_kills(store)
    start = start.after_memory_kills(kills)
    if (most_mib := start.inputs.host_mib_max) < math.inf:
        start = replace(start, warnings=(*start.warnings, why_smaller(kills, most_mib)))
    profile = store.peek(start.key)
    kv_checks = profile.kv_checks if profile else ()
    kept = KeptAbilities(start.settings.profiles_dir, start.key.id, lambda _: None).load(start.abilities_digest)
    abilities = kept if kept.rows else None
    is_fewer = start.settings.experts_used is not None
    loss = KeptExpertLoss(start.settings.profiles_dir, start.key, lambda _: None).load() if is_fewer else None
    space = start.space(kv_checks)
    picked = pick(profile, start.settings.mode, space) if profile else None
    if profile is not None and isinstance(picked, Picked):
        status = store.status(profile)
        found = Preview(plan=picked.plan, start=start, space=space, profile=profile, status=status)
    else:
        foreign = first_plan(store, start.key, start.settings.mode, space) if profile is None else None
        found = Preview(plan=foreign.plan if foreign else space.predicted, start=start, space=space, foreign=foreign)
    return replace(found, abilities=abilities, experts_loss=loss)


def _preview_away(contents: ImageContents, offered: Option, machine: UsableMachine) -> Preview:
    """Preview a model that would be fetched. Raises ModelAwayError (10) if its layers are unknown before that."""
    if offered.model is None:
        raise ModelAwayError(offered.candidate.name)
    return replace(_predicted(contents, machine, offered.model), fetches=offered)


def _preview_shape(contents: ImageContents, shape: PublishedShape, machine: UsableMachine) -> Preview:
    model = shape.describe(contents.settings.models_dir)
    return replace(_predicted(contents, machine, model), shape=shape)


def _predicted(contents: ImageContents, machine: UsableMachine, model: Model) -> Preview:
    """Predict for a model that is not here, so that it has no profile. Its attachments may be here."""
    inputs = inputs_of(contents, machine, with_attachments(model, contents.settings, is_here=False))
    start = replace(without_profile(contents.engine, machine.install, inputs), warnings=machine.warnings)
    space = start.space()
    return Preview(plan=space.predicted, start=start, space=space)
