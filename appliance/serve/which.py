"""Which model a start serves: a path where it is here, else what it is chosen from."""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from appliance.errors import ConfigError, FatalError
from appliance.image_facts import BAKED_MODELS_PATH, Recipe, Rung, folders_by_hand
from appliance.model import Format, find_model, only_model, resolve_model
from appliance.settings import HubSettings, Settings, parse_folders
from appliance.values import dataclass

if TYPE_CHECKING:
    from appliance.reference import Reference
    from appliance.weights.cache.download_set import Wanted


@dataclass(frozen=True, kw_only=True)
class Located:
    """Weights that are here. `names` mean them in the API, beside the file's own."""

    path: Path
    names: tuple[str, ...] = ()
    called: str | None = None  # by the tool whose blob it is; its projector is then a blob, too
    projector: Path | None = None


@dataclass(frozen=True, kw_only=True)
class FromRecipe:
    """Rungs of the image's recipe, of which one is chosen; never none."""

    recipe: Recipe
    rungs: tuple[Rung, ...]
    here: tuple[tuple[Rung, Path], ...]  # those of them that are here, with the file that the engine is given

    @property
    def name(self) -> str:
        return self.recipe.name


@dataclass(frozen=True, kw_only=True)
class FromHub:
    """A repository or an address of which nothing is here."""

    reference: Reference

    @property
    def name(self) -> str:
        return self.reference.text


Which = Located | FromRecipe | FromHub


def which_model(settings: Settings, recipe: Recipe | None, serves: Format, hub: Callable[[], HubSettings]) -> Which:
    """What was asked for, else what the recipe has, else the only model on the volume.

    Raises ConfigError (10) where nothing says which, ModelUnreadableError (30) where it cannot be one. Asks no network.
    """
    request, models_dir = settings.model, settings.models_dir
    if not request and recipe is None:
        if path := only_model(models_dir, serves=serves):
            return Located(path=path)
        return _elsewhere("", settings, serves) or Located(path=_refused("", settings, serves, recipe))
    if request and (path := find_model(request, models_dir)):
        return Located(path=path, names=(request,) if _is_fetched(path, models_dir) else ())
    try:
        rungs = rungs_meant(request or recipe.name, recipe, serves) if recipe else ()
    except ConfigError as error:
        if found := ollamas_own(settings, recipe):
            error.hint = f"{found}; {error.hint}"
        raise
    if recipe and rungs:
        return _of_recipe(recipe, rungs, models_dir, hub)
    return _of_hub(request or "", settings, serves, hub, recipe)


def _of_recipe(
    recipe: Recipe, rungs: tuple[Rung, ...], models_dir: Path, hub: Callable[[], HubSettings]
) -> Located | FromRecipe:
    here = tuple((rung, path) for rung in rungs if (path := path_of(rung, models_dir, hub)))
    if len(rungs) == 1 and here:
        return Located(path=here[0][1], names=names_of(recipe, rungs[0]))
    there = [rung for rung, _ in here]
    possible = tuple(rung for rung in rungs if rung in there or rung.repo or rung.url)
    if not possible:
        path = models_dir / rungs[0].files[0].path
        message = f"the model of this image's recipe is not on the volume: {path}"
        raise ConfigError(message, hint="put it there, or name another with APPLIANCE_MODEL; its recipe has no address")
    return FromRecipe(recipe=recipe, rungs=possible, here=here)


def ollamas_own(settings: Settings, recipe: Recipe | None) -> str | None:
    """Where a mounted folder of Ollama's has a model whose name means the recipe's here: how to ask for that one."""
    request = settings.model or ""
    if recipe is None or request.partition(":")[0].casefold() != recipe.name.casefold():
        return None
    tops = settings.usual_model_dirs if settings.model_dirs is None else parse_folders(settings.model_dirs)
    places = [place for top in tops for place in (top, top / "models") if _is_folder(place / "blobs")]
    if not places:
        return None
    # here: a start without such a folder must not pay for it
    from appliance.weights.stores.stores import find_stored, ollama_stores

    found = find_stored(request, ollama_stores(places))
    return f"{found[0].where} has one of that name, too: `--model library/{found[0].name}`" if found else None


def rungs_called(wanted: str, ladder: Sequence[Rung], recipe: str) -> tuple[Rung, ...]:
    """All where nothing is wanted; else the one of that name, else those whose names begin so. Raises ConfigError."""
    found = [rung for rung in ladder if _plain(rung.name) == _plain(wanted)]
    found = found or [rung for rung in ladder if _plain(rung.name).startswith(_plain(wanted))]
    if found:
        return tuple(found)
    near = difflib.get_close_matches(wanted.casefold(), [rung.name for rung in ladder], 1)
    message = f"recipe {recipe} has no such model for this engine: {wanted or 'none at all'}"
    known = ", ".join(f"{recipe}:{rung.name}" for rung in ladder) or "the image of another engine"
    raise ConfigError(message, hint=f"perhaps you meant {recipe}:{near[0]}" if near else f"there are {known}")


def rungs_meant(request: str, recipe: Recipe | None, serves: Format) -> tuple[Rung, ...]:
    """Those that a name of the image's recipe means; none where it is no such name.

    Raises ConfigError (10) for a name of the recipe that means no rung.
    """
    name, _, wanted = request.partition(":")
    if recipe is None or name.casefold() != recipe.name.casefold():
        return ()
    return rungs_called(wanted, [rung for rung in recipe.rungs if rung.format == serves], recipe.name)


def rungs_here(
    request: str, recipe: Recipe | None, serves: Format, models_dir: Path, hub: Callable[[], HubSettings]
) -> tuple[tuple[str, Path], ...] | None:
    """By name, what is here of what a name of the recipe means; None where it is no such name."""
    if recipe is None or not (rungs := rungs_meant(request, recipe, serves)):
        return None
    found = ((names_of(recipe, rung)[-1], path_of(rung, models_dir, hub)) for rung in rungs)
    return tuple((name, path) for name, path in found if path)


def wanted_rung(request: str, recipe: Recipe | None, serves: Format, hub: HubSettings) -> Wanted | None:
    """What to fetch by a name of the image's recipe; None where it is no such name.

    Raises ConfigError (10) for one that means several.
    """
    found = rungs_meant(request, recipe, serves)
    if recipe is None or not found:
        return None
    if len(found) > 1:
        message = f"name means {len(found)} models of the recipe: {request}"
        names = ", ".join(f"{recipe.name}:{rung.name}" for rung in found)
        raise ConfigError(message, hint=f"one of {names}; `appliance plan --files` says what suits this machine")
    # here: a start that fetches nothing never needs it
    from appliance.weights.cache.variants import of_rung

    return of_rung(found[0], hub, request)


def _plain(name: str) -> str:
    """Dots count: 3.5-9b is another model than 35b."""
    return re.sub(r"[^a-z0-9.]", "", name.casefold())


def names_of(recipe: Recipe, rung: Rung) -> tuple[str, ...]:
    return recipe.name, f"{recipe.name}:{rung.name}"


def path_of(rung: Rung, models_dir: Path, hub: Callable[[], HubSettings]) -> Path | None:
    """What the engine is given of a rung that is here whole: put there by hand, or in a cache of the hub."""
    by_hand = [[top / file.path for file in rung.weights] for top in folders_by_hand(models_dir, rung.repo)]
    fetched = [models_dir / rung.place(file) for file in rung.weights]
    baked = [Path(BAKED_MODELS_PATH) / rung.place(file) for file in rung.weights]
    for paths in (*by_hand, fetched, baked):
        if [_size(path) for path in paths] == [file.bytes for file in rung.weights]:
            return paths[0] if rung.format == "gguf" else paths[0].parent
    if not (rung.repo or rung.url):
        # Of another size it is whatever was put there; without an address for the right one it is taken.
        return by_hand[0][0] if _size(by_hand[0][0]) is not None else None
    # here: a start whose weights were put there by hand, baked or fetched at this commit never needs it
    from appliance.weights.cache.hub_layout import find
    from appliance.weights.cache.variants import of_rung

    settings = hub()
    found = find(of_rung(rung, settings), (models_dir, *settings.read_only_roots))
    return (found[0].parent if rung.format == "safetensors" else found[0]) if found else None


def _is_fetched(path: Path, models_dir: Path) -> bool:
    """In the layout of the hub's cache, where a model is called by its repository."""
    return path.is_relative_to(models_dir) and path.relative_to(models_dir).parts[0].startswith("models--")


def _is_folder(path: Path) -> bool:
    return os.path.isdir(path)  # noqa: PTH112 - pathlib's raises for what may not be looked at


def _size(path: Path) -> int | None:
    try:
        return path.stat().st_size
    except OSError:
        return None


def _of_hub(
    request: str, settings: Settings, serves: Format, hub: Callable[[], HubSettings], recipe: Recipe | None
) -> Which:
    # here: a start whose model is a file of the volume never needs it
    from appliance.reference import looks_remote, parse_reference

    if found_folder := _in_folder(request, settings.models_dir):
        return found_folder
    if found_elsewhere := _elsewhere(request, settings, serves):
        return found_elsewhere
    is_file = request.count("/") == 1 and request.lower().endswith(".gguf")  # of a folder on the volume
    if is_file or not looks_remote(request):
        if recipe and (rungs := _rungs_published(request, recipe, serves)):
            return _of_recipe(recipe, rungs, settings.models_dir, hub)
        return Located(path=_refused(request, settings, serves, recipe))
    from appliance.weights.stores.stores import lookup  # here: as above, it costs a start that fetches nothing

    found_hub = hub()
    reference = parse_reference(request, found_hub.endpoint)
    roots = (settings.models_dir, *found_hub.read_only_roots)
    is_folder = serves == "safetensors"
    if found := lookup(reference, roots, serves):
        return Located(path=found[0].parent if is_folder else found[0], names=(request,))
    return FromHub(reference=reference)


def _rungs_published(request: str, recipe: Recipe, serves: Format) -> tuple[Rung, ...]:
    """Return the rungs of a model that is called by its published name, as in Qwen3-8B; empty if it is none."""
    # here: a start whose model is found by its own name never needs it
    from appliance.model_names import NamedRecipe, NamedRung, rungs_named

    ladder = [rung for rung in recipe.rungs if rung.format == serves]
    named = tuple(NamedRung(name=rung.name, published=rung.published) for rung in ladder)
    found = rungs_named(request, NamedRecipe(name=recipe.name, vendors=(), rungs=named))
    return tuple(rung for rung in ladder if rung.name in found)


def _in_folder(request: str, models_dir: Path) -> Located | None:
    """A GGUF file of a folder `publisher/repository` of the volume, asked for as a repository is."""
    # here: a start whose model is a file of the volume never needs it
    from appliance.reference import parse_reference
    from appliance.weights.cache.quants import gguf_sets, pick

    try:
        reference = parse_reference(request)
        folder = models_dir / (reference.repo or "")
        if reference.repo is None or reference.revision or reference.path or not folder.is_dir():
            return None
        sets = [each for each in gguf_sets(path.name for path in folder.glob("*.gguf")) if not each.missing]
        picked = pick(sets, reference.quant, reference.repo, lambda _: "")
    except ConfigError:  # no such quantization here, or no name of a repository: it may be elsewhere
        return None
    return Located(path=folder / picked.paths[0], names=(request,))


def _elsewhere(request: str, settings: Settings, serves: Format) -> Located | None:
    """In a mounted folder of another tool. Raises ConfigError for an artifact of a registry."""
    # here: a start from the volume must not pay for it
    from appliance.reference import refuse_artifact
    from appliance.weights.stores.stores import find_elsewhere

    found = find_elsewhere(request or None, settings, serves)
    if found is None:
        refuse_artifact(request)
        return None
    called = found.name if found.store.tool == "Ollama" else None
    projector = found.projector if called else None
    return Located(path=found.path, names=(found.name,), called=called, projector=projector)


def _refused(request: str, settings: Settings, serves: Format, recipe: Recipe | None) -> Path:
    """Raises ConfigError (10): it is no name of the volume; perhaps one of the recipe was meant."""
    try:
        return resolve_model(request or None, settings.models_dir, serves=serves)
    except FatalError as error:
        # here: only a start that fails costs it
        from appliance.weights.stores.stores import with_stores

        told = with_stores(error, settings)
        near = difflib.get_close_matches(request.partition(":")[0], [recipe.name] if recipe else [], 1)
        if near and recipe:
            told.hint = f"perhaps you meant {recipe.name}"
        raise told from error
