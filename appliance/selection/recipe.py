"""The variants of the image's recipe: which of them a name means, and where each lies."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from appliance.errors import ConfigError
from appliance.image_facts import BAKED_MODELS_PATH, Recipe, Rung, folders_by_hand
from appliance.model import Format
from appliance.settings import HubSettings

if TYPE_CHECKING:
    from appliance.weights.cache.download_set import Wanted


def variants_called(wanted: str, ladder: Sequence[Rung], recipe: str) -> tuple[Rung, ...]:
    """Return the variant of that name, else those whose names begin with it; all for an empty name.

    Raises ConfigError (10) if there is none.
    """
    found = [variant for variant in ladder if _plain(variant.name) == _plain(wanted)]
    found = found or [variant for variant in ladder if _plain(variant.name).startswith(_plain(wanted))]
    if found:
        return tuple(found)
    near = difflib.get_close_matches(wanted.casefold(), [variant.name for variant in ladder], 1)
    message = f"recipe {recipe} has no such model for this engine: {wanted or 'none at all'}"
    known = ", ".join(f"{recipe}:{variant.name}" for variant in ladder) or "the image of another engine"
    raise ConfigError(message, hint=f"perhaps you meant {recipe}:{near[0]}" if near else f"there are {known}")


def variants_meant(request: str, recipe: Recipe | None, serves: Format) -> tuple[Rung, ...]:
    """Return the variants that a name such as `qwen` or `qwen:8b` means; empty if it names another model.

    Raises ConfigError (10) if the recipe is named and the variant does not exist.
    """
    name, _, wanted = request.partition(":")
    if recipe is None or name.casefold() != recipe.name.casefold():
        return ()
    return variants_called(wanted, [variant for variant in recipe.rungs if variant.format == serves], recipe.name)


def variants_here(
    request: str, recipe: Recipe | None, serves: Format, models_dir: Path, hub: Callable[[], HubSettings]
) -> tuple[tuple[str, Path], ...] | None:
    """Return name and path of the variants that are meant and here; None if the recipe is not named."""
    if recipe is None or not (variants := variants_meant(request, recipe, serves)):
        return None
    found = ((names_of(recipe, variant)[-1], path_of(variant, models_dir, hub)) for variant in variants)
    return tuple((name, path) for name, path in found if path)


def wanted_variant(request: str, recipe: Recipe | None, serves: Format, hub: HubSettings) -> Wanted | None:
    """Return the files to fetch for a name of the recipe; None if the recipe is not named.

    Raises ConfigError (10) if the name means several variants.
    """
    found = variants_meant(request, recipe, serves)
    if recipe is None or not found:
        return None
    if len(found) > 1:
        message = f"name means {len(found)} models of the recipe: {request}"
        names = ", ".join(f"{recipe.name}:{variant.name}" for variant in found)
        raise ConfigError(message, hint=f"one of {names}; `appliance plan --files` says what suits this machine")
    # here: a start that fetches nothing never needs it
    from appliance.weights.cache.variants import of_rung

    return of_rung(found[0], hub, request)


def _plain(name: str) -> str:
    """Return the name without case and punctuation. Dots count: 3.5-9b is another model than 35b."""
    return re.sub(r"[^a-z0-9.]", "", name.casefold())


def names_of(recipe: Recipe, variant: Rung) -> tuple[str, ...]:
    """Return the names of a variant in the API, the fullest last."""
    return recipe.name, f"{recipe.name}:{variant.name}"


def path_of(variant: Rung, models_dir: Path, hub: Callable[[], HubSettings]) -> Path | None:
    """Return what the engine is given of a variant whose files are all here; None if one is missing.

    Files may be put there by hand, baked into the image, fetched, or in a mounted cache of the hub.
    """
    by_hand = [[top / file.path for file in variant.weights] for top in folders_by_hand(models_dir, variant.repo)]
    fetched = [models_dir / variant.place(file) for file in variant.weights]
    baked = [Path(BAKED_MODELS_PATH) / variant.place(file) for file in variant.weights]
    for paths in (*by_hand, fetched, baked):
        if [_size(path) for path in paths] == [file.bytes for file in variant.weights]:
            return paths[0] if variant.format == "gguf" else paths[0].parent
    if not (variant.repo or variant.url):
        # A file of another size is taken: the recipe has no address to fetch the right one from.
        return by_hand[0][0] if _size(by_hand[0][0]) is not None else None
    # here: a start whose weights were put there by hand, baked or fetched at this commit never needs it
    from appliance.weights.cache.hub_layout import find
    from appliance.weights.cache.variants import of_rung

    settings = hub()
    found = find(of_rung(variant, settings), (models_dir, *settings.read_only_roots))
    return (found[0].parent if variant.format == "safetensors" else found[0]) if found else None


def _size(path: Path) -> int | None:
    try:
        return path.stat().st_size
    except OSError:
        return None
