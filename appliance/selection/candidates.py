"""The candidates of a choice: variants of a recipe or a file that is here, each with the planner's forecast."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from appliance.errors import (
    ConfigError,
    DownloadError,
    FatalError,
    ModelDoesNotFitError,
    ModelUnreadableError,
    VolumeError,
)
from appliance.image_facts import Recipe, Rung, is_projector
from appliance.model import Model, Projector, plain_name, read_model, unread_projector
from appliance.model.shapes.described import describe_model
from appliance.selection.forecast import forecast, without_profile
from appliance.selection.rank import Candidate, Choice, Forecast, Tier, Wants, choose, prefer, usual_context
from appliance.selection.recipe import names_of
from appliance.selection.request import FromRecipe
from appliance.selection.saved_choice import Better, Saved, SavedChoice
from appliance.settings import HubSettings, Settings, hub_settings
from appliance.start.image import ImageContents
from appliance.start.inputs import Located, inputs_of
from appliance.start.machine import UsableMachine
from appliance.values import dataclass
from appliance.weights.cache.download_set import Wanted
from appliance.weights.cache.hub_layout import RepoFolder
from appliance.weights.cache.variants import of_rung
from appliance.weights.download.disk_space import SPARED_BYTES, bytes_missing

_GENERATION = re.compile(r"(\d+\.\d+)-")  # at the beginning of a newer model's name: 3.5-9b
_MIB = 2**20
CORE_GB_S = 7.0  # two threads decode a model of 98 MB at 116 tok/s, which is 0.8 of a stream: measured


@dataclass(frozen=True, kw_only=True)
class Option:
    """One candidate with its files. `wanted` is None without an address, `path` is None if it is not here."""

    candidate: Candidate
    model: Model | None  # None: its layers are unknown before it is here
    wanted: Wanted | None
    path: Path | None
    names: tuple[str, ...] = ()

    @property
    def located(self) -> Located | None:
        """The weights; None if they are not here."""
        return Located(path=self.path, names=self.names) if self.path else None


@dataclass(frozen=True, kw_only=True)
class Chosen:
    """All candidates in order, and the choice among them."""

    offered: tuple[Option, ...]
    choice: Choice

    @property
    def exit_code(self) -> int:
        """The exit code of a start that would serve this."""
        return 0 if self.choice.chosen else _nothing(self.choice).exit_code

    @property
    def pick(self) -> Option:
        """The chosen candidate. Raises the reason if none can be served: code 30, 31, 32 or 50."""
        row = self.choice.chosen
        if row is None:
            raise _nothing(self.choice)
        return next(each for each in self.offered if each.candidate is row.candidate)

    @property
    def better(self) -> Better | None:
        """A better candidate than the chosen one; None without one."""
        row = self.choice.better
        if row is None:
            return None
        return Better(name=row.candidate.name, bytes=row.candidate.bytes, is_here=row.candidate.is_here)


def choose_variant(
    contents: ImageContents, found: FromRecipe, environment: Mapping[str, str], machine: UsableMachine
) -> Chosen:
    hub = hub_settings(contents.settings, environment)
    offered = tuple(_offered(contents, found, variant, hub) for variant in found.variants)
    default = f"{found.recipe.name}:{found.recipe.default}"
    return choose_offered(contents, machine, hub, offered, default=default)


def choose_located(
    contents: ImageContents, found: Located, environment: Mapping[str, str], machine: UsableMachine
) -> Chosen:
    """Judge one model that is here: whether it fits, and how fast it would be."""
    model = read_model(found.path, serves=contents.engine.model_format)
    all_b = model.parameters / 1e9
    candidate = Candidate(
        name=found.names[-1] if found.names else plain_name(found.path),
        tier="balanced",
        quantization=model.label,
        parameters_b=all_b,
        active_b=all_b,
        bytes=model.file_bytes,
        missing_bytes=0,
    )
    offered = Option(candidate=candidate, model=model, wanted=None, path=found.path, names=found.names)
    return choose_offered(contents, machine, hub_settings(contents.settings, environment), (offered,))


def choose_offered(
    contents: ImageContents,
    machine: UsableMachine,
    hub: HubSettings,
    offered: tuple[Option, ...],
    *,
    default: str = "",
) -> Chosen:
    settings = contents.settings
    native = max((each.model.native_context for each in offered if each.model), default=2**31)
    wanted = settings.ctx_size or usual_context(settings.mode, native)
    forecasts = {each.candidate.name: _forecast(contents, machine, each, wanted) for each in offered}
    volume = machine.hardware.volume
    free = None if volume.free_mib is None else max(0, volume.free_mib * _MIB - SPARED_BYTES)
    tiers: Mapping[str, Tier | None] = {"quality": "quality", "balanced": "balanced", "compact": "compact"}
    wants = Wants(context=wanted, free_bytes=free, is_offline=hub.offline, tier=tiers.get(settings.tier))
    choice = choose([each.candidate for each in offered], forecasts, wants, default=default)
    return Chosen(offered=offered, choice=choice)


def choose_or_reuse(
    contents: ImageContents, found: FromRecipe, environment: Mapping[str, str], machine: UsableMachine
) -> Saved | Chosen:
    """Choose as a start does: take the earlier choice if nothing has changed since."""
    kept = saved_choice(contents, found, machine).load()
    return kept if kept and kept.is_current else choose_with_saved(contents, found, environment, machine)


def choose_with_saved(
    contents: ImageContents, found: FromRecipe, environment: Mapping[str, str], machine: UsableMachine
) -> Chosen:
    """Judge all candidates anew; the earlier choice is served as long as it fits."""
    chosen = choose_variant(contents, found, environment, machine)
    kept = saved_choice(contents, found, machine).load()
    return replace(chosen, choice=prefer(chosen.choice, kept.name)) if kept else chosen


def save_choice(
    contents: ImageContents, found: FromRecipe, machine: UsableMachine, chosen: Chosen, located: Located
) -> None:
    """Save the choice for the next start. `located` is the chosen model, perhaps fetched since."""
    pick = chosen.pick
    saved_choice(contents, found, machine).save(
        pick.candidate.name, located, better=chosen.better, fetched_bytes=pick.candidate.missing_bytes
    )


def saved_choice(contents: ImageContents, found: FromRecipe, machine: UsableMachine) -> SavedChoice:
    """Return access to the choice of an earlier start on this volume."""
    here = {names_of(found.recipe, variant)[-1]: (variant, path) for variant, path in found.here}
    return SavedChoice(
        folder=contents.settings.data_dir / "cache" / contents.image.build_id,
        settings=contents.settings,
        hardware=machine.hardware,
        here={
            name: Located(path=path, names=names_of(found.recipe, variant)) for name, (variant, path) in here.items()
        },
    )


def _offered(contents: ImageContents, found: FromRecipe, variant: Rung, hub: HubSettings) -> Option:
    recipe, settings = found.recipe, contents.settings
    path = next((path for each, path in found.here if each is variant), None)
    names = names_of(recipe, variant)
    has_address = bool(variant.repo or variant.url)
    wanted = of_rung(variant, hub, names[-1]) if has_address else None
    model, problem = _model(variant, path, names[-1], contents, wanted)
    candidate = Candidate(
        name=names[-1],
        tier=variant.tier,
        quantization=str((variant.shape or {}).get("quantization", "")),
        parameters_b=variant.parameters_b,
        active_b=variant.active_b,
        bytes=variant.bytes,
        missing_bytes=0 if path else _missing(variant, wanted, settings),
        generation=_generation(variant, recipe),
        problem=problem,
    )
    return Option(candidate=candidate, model=model, wanted=wanted, path=path, names=names)


def _missing(variant: Rung, wanted: Wanted | None, settings: Settings) -> int:
    """Return the bytes to fetch, at least one: the variant is incomplete. All of them without an address."""
    if wanted is None:
        return variant.bytes
    return max(1, bytes_missing(wanted.files, RepoFolder(root=settings.models_dir, name=wanted.folder)))


def _model(
    variant: Rung, path: Path | None, name: str, contents: ImageContents, wanted: Wanted | None
) -> tuple[Model | None, str | None]:
    """Read or describe the model; the text says why a file that is here cannot be read.

    A damaged file is no error here: another candidate can be served.

    Raises ConfigError (10) for a shape from which no tensors follow.
    """
    if path is not None:
        try:
            return read_model(path, serves=contents.engine.model_format), None
        except ModelUnreadableError as error:
            return None, error.message
    if variant.shape is None or variant.format != "gguf" or wanted is None:
        return None, None
    weights = sum(file.bytes for file in variant.weights)
    try:
        return describe_model(name, variant.shape, path_to_be(wanted, contents.settings), file_bytes=weights), None
    except ValueError as error:
        message = f"model {name} of the recipe cannot be planned: {error}"
        raise ConfigError(
            message, hint="name another model, or a GGUF file that is here, whose header tells it"
        ) from error


def path_to_be(wanted: Wanted, settings: Settings) -> Path:
    """Return the path of the first file once it is fetched."""
    folder = RepoFolder(root=settings.models_dir, name=wanted.folder)
    return folder.snapshot(wanted.revision) / wanted.files[0].path


def _generation(variant: Rung, recipe: Recipe) -> float:
    """Return the model's generation relative to the oldest of the recipe, such as 3.5 / 3.

    Names without a number count as the whole number below the oldest.
    """
    known = {each.name: found for each in recipe.rungs if (found := _GENERATION.match(each.name))}
    if not known:
        return 1.0
    oldest = math.floor(min(float(found[1]) for found in known.values()))
    return float(known[variant.name][1]) / oldest if variant.name in known and oldest else 1.0


def _forecast(contents: ImageContents, machine: UsableMachine, each: Option, wanted: int) -> Forecast | str:
    if each.model is None:
        return ""
    model = each.model if each.model.projector else replace(each.model, projector=_projector_to_come(each.wanted))
    # The planner assumes a desktop. Without measured bandwidths, a choice counts on what these cores can read.
    inputs = replace(inputs_of(contents, machine, model), dram_gb_s_max=CORE_GB_S * machine.hardware.cpu.cores)
    return forecast(without_profile(contents.engine, machine.install, inputs), wanted)


def _projector_to_come(wanted: Wanted | None) -> Projector | None:
    """Return the projector that would be fetched with the weights; None without one."""
    files = wanted.files if wanted else ()
    file = next((each for each in files if is_projector(each.path)), None)
    return unread_projector(Path(file.path), file.bytes or 0) if file else None


def _nothing(choice: Choice) -> FatalError:
    lines = "".join(f"\n  {row.candidate.name}: {row.verdict}: {row.reason}" for row in choice.rows)
    verdicts = {row.verdict for row in choice.rows} - {"other tier"}
    if verdicts == {"damaged"}:
        message = f"none of the models that are here can be read{lines}"
        return ModelUnreadableError(message, hint="`appliance models rm` takes a damaged file away, `pull` fetches it")
    verdicts -= {"damaged"}
    hint = "`appliance plan --files` shows all; take a smaller one with --model, or fewer tokens with --ctx-size"
    if verdicts == {"no room"}:
        return VolumeError(f"none of the models has room on the volume{lines}", hint=f"free some space; {hint}")
    if verdicts == {"offline"}:
        message = f"none of the models is on the volume, and nothing is fetched offline{lines}"
        return DownloadError(message, hint="`appliance models pull` fetches one where there is a network")
    return ModelDoesNotFitError(f"none of the models can be served here{lines}", hint=hint)
