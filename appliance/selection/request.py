"""The model that a start is asked for: a path if it is here, else what the model is chosen from."""

from __future__ import annotations

import difflib
import os
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from appliance.errors import ConfigError, FatalError
from appliance.image_facts import Recipe, Rung
from appliance.model import Format, find_model, only_model, resolve_model
from appliance.selection.recipe import names_of, path_of, variants_meant
from appliance.settings import HubSettings, Settings, hub_settings, parse_folders
from appliance.start.image import ImageContents
from appliance.start.inputs import Located
from appliance.values import dataclass

if TYPE_CHECKING:
    from appliance.reference import Reference


@dataclass(frozen=True, kw_only=True)
class FromRecipe:
    """Variants of the image's recipe, at least one. One of them is chosen later."""

    recipe: Recipe
    variants: tuple[Rung, ...]
    here: tuple[tuple[Rung, Path], ...]  # the variants that are here, with the file that the engine is given

    @property
    def name(self) -> str:
        return self.recipe.name


@dataclass(frozen=True, kw_only=True)
class FromHub:
    """A repository or an address, and nothing of it is here."""

    reference: Reference

    @property
    def name(self) -> str:
        return self.reference.text


Request = Located | FromRecipe | FromHub


def read_request(contents: ImageContents, environment: Mapping[str, str]) -> Request:
    """Find out which model this start is asked for. Raises as `which_model`."""
    hub = cache(lambda: hub_settings(contents.settings, environment))
    return which_model(contents.settings, contents.recipe, contents.engine.model_format, hub)


def which_model(settings: Settings, recipe: Recipe | None, serves: Format, hub: Callable[[], HubSettings]) -> Request:
    """Return the model that the settings name, else what the recipe has, else the only model on the volume.

    Asks no network. Raises ConfigError (10) if nothing names a model, ModelUnreadableError (30) if the named file is
    not a model.
    """
    request, models_dir = settings.model, settings.models_dir
    if not request and recipe is None:
        if path := only_model(models_dir, serves=serves):
            return Located(path=path)
        return _elsewhere("", settings, serves) or Located(path=_refused("", settings, serves, recipe))
    if request and (path := find_model(request, models_dir)):
        return Located(path=path, names=(request,) if _is_in_hub_cache(path, models_dir) else ())
    try:
        variants = variants_meant(request or recipe.name, recipe, serves) if recipe else ()
    except ConfigError as error:
        if found := ollama_hint(settings, recipe):
            error.hint = f"{found}; {error.hint}"
        raise
    if recipe and variants:
        return _from_recipe(recipe, variants, models_dir, hub)
    return _remote(request or "", settings, serves, hub, recipe)


def _from_recipe(
    recipe: Recipe, variants: tuple[Rung, ...], models_dir: Path, hub: Callable[[], HubSettings]
) -> Located | FromRecipe:
    """Return the path if one variant is meant and here, else the variants to choose from. Raises ConfigError (10)."""
    here = tuple((variant, path) for variant in variants if (path := path_of(variant, models_dir, hub)))
    if len(variants) == 1 and here:
        return Located(path=here[0][1], names=names_of(recipe, variants[0]))
    there = [variant for variant, _ in here]
    possible = tuple(variant for variant in variants if variant in there or variant.repo or variant.url)
    if not possible:
        path = models_dir / variants[0].files[0].path
        message = f"the model of this image's recipe is not on the volume: {path}"
        raise ConfigError(message, hint="put it there, or name another with APPLIANCE_MODEL; its recipe has no address")
    return FromRecipe(recipe=recipe, variants=possible, here=here)


def ollama_hint(settings: Settings, recipe: Recipe | None) -> str | None:
    """Return how to ask for Ollama's model if a mounted folder of Ollama has one of the recipe's name; else None."""
    request = settings.model or ""
    if recipe is None or request.partition(":")[0].casefold() != recipe.name.casefold():
        return None
    tops = settings.usual_model_dirs if settings.model_dirs is None else parse_folders(settings.model_dirs)
    places = [place for top in tops for place in (top, top / "models") if _is_folder(place / "blobs")]
    if not places:
        return None
    # here: it would delay each start without such a folder
    from appliance.weights.stores.stores import find_stored, ollama_stores

    found = find_stored(request, ollama_stores(places))
    return f"{found[0].where} has one of that name, too: `--model library/{found[0].name}`" if found else None


def _is_in_hub_cache(path: Path, models_dir: Path) -> bool:
    """True for a file in the layout of the hub's cache: there a model is called by its repository."""
    return path.is_relative_to(models_dir) and path.relative_to(models_dir).parts[0].startswith("models--")


def _is_folder(path: Path) -> bool:
    return os.path.isdir(path)  # noqa: PTH112 - pathlib's raises for what may not be looked at


def _remote(
    request: str, settings: Settings, serves: Format, hub: Callable[[], HubSettings], recipe: Recipe | None
) -> Request:
    """Look in folders of other tools and caches, then take the request as a repository or an address."""
    # here: a start whose model is a file of the volume never needs it
    from appliance.reference import looks_remote, parse_reference

    if found_folder := _in_folder(request, settings.models_dir):
        return found_folder
    if found_elsewhere := _elsewhere(request, settings, serves):
        return found_elsewhere
    is_file = request.count("/") == 1 and request.lower().endswith(".gguf")  # a file in a folder on the volume
    if is_file or not looks_remote(request):
        if recipe and (variants := _variants_published(request, recipe, serves)):
            return _from_recipe(recipe, variants, settings.models_dir, hub)
        return Located(path=_refused(request, settings, serves, recipe))
    from appliance.weights.stores.stores import lookup  # here: it would delay each start that fetches nothing

    found_hub = hub()
    reference = parse_reference(request, found_hub.endpoint)
    roots = (settings.models_dir, *found_hub.read_only_roots)
    is_folder = serves == "safetensors"
    if found := lookup(reference, roots, serves):
        return Located(path=found[0].parent if is_folder else found[0], names=(request,))
    return FromHub(reference=reference)


def _variants_published(request: str, recipe: Recipe, serves: Format) -> tuple[Rung, ...]:
    """Return the variants with this published name, such as Qwen3-8B; empty if no variant has it."""
    # here: a start whose model is found by its own name never needs it
    from appliance.model_names import NamedRecipe, NamedRung, rungs_named

    ladder = [variant for variant in recipe.rungs if variant.format == serves]
    named = tuple(NamedRung(name=variant.name, published=variant.published) for variant in ladder)
    found = rungs_named(request, NamedRecipe(name=recipe.name, vendors=(), rungs=named))
    return tuple(variant for variant in ladder if variant.name in found)


def _in_folder(request: str, models_dir: Path) -> Located | None:
    """Find a GGUF file in a folder `publisher/repository` of the volume, named as a repository is."""
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
    """Find the model in a mounted folder of another tool. Raises ConfigError (10) for an artifact of a registry."""
    # here: it would delay each start from the volume
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
    """Raise ConfigError (10) for a name that nothing on the volume has, with the near miss of the recipe."""
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
