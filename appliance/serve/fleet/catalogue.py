"""The models that requests may name: of the settings file, of the recipe, and on the volume."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path

from appliance.errors import FatalError
from appliance.model import find_model, list_models, plain_name
from appliance.serve.gateway.slot import ModelSlot
from appliance.settings import Settings, hub_settings
from appliance.start.attachments import check_files
from appliance.start.image import ImageContents, check_settings
from appliance.values import dataclass


@dataclass(frozen=True, kw_only=True)
class Named:
    """One model that requests may name. `path` is where its weights lie, None if they are not here or not known."""

    name: str
    settings: Settings
    aliases: tuple[str, ...] = ()
    is_pinned: bool = False
    path: Path | None = None
    size_bytes: int | None = None


def of_file(settings: Settings, contents: ImageContents) -> Iterator[Named]:
    """Yield the models of the settings file without the first one. Raises ConfigError (10) for a setting that means
    nothing to the image's engine."""
    _, first = settings.first_model()
    for entry in settings.models:
        if entry is first:
            continue
        own = settings.of_entry(entry)
        check_settings(own, contents.engine)
        check_files(own)
        path = _path_of(entry.values["model"], own)
        yield Named(name=entry.name, settings=own, aliases=entry.aliases, is_pinned=entry.is_pinned, path=path)


def on_volume(
    settings: Settings, contents: ImageContents, environment: Mapping[str, str], known: Collection[Path]
) -> Iterator[Named]:
    """Yield the models on the volume, with their names in the recipe, that are not among the `known` paths.

    Reads folders, and headers of files. A file that cannot be served is left out: `appliance models` tells why.
    """
    seen = {path.resolve() for path in known}
    if all(path.resolve() in seen for path in list_models(settings.models_dir)):
        return
    # here: a start with one model never needs them
    from appliance.model.files.find import is_attachment
    from appliance.weights.stores.stores import list_store, volume_store

    called = dict(_of_recipe(contents, environment))
    own = settings.of_another()
    for stored in list_store(volume_store(settings.models_dir)).models:
        path = stored.path
        if stored.problem or stored.format != contents.engine.model_format or path.resolve() in seen:
            continue
        if is_attachment(path):
            continue
        seen.add(path.resolve())
        plain = () if stored.repo and "/" in stored.name else (plain_name(path),)
        # No line of a log, label of a metric or command line can hold other names.
        names = [name for name in dict.fromkeys((*called.get(path, ()), *plain, stored.name)) if name.isprintable()]
        if not names:
            continue
        name, *others = names
        sources = {**own.sources, "model": "the volume", "alias": "the volume"}
        yield Named(
            name=name,
            settings=replace(own, model=stored.name, alias=name, sources=sources),
            aliases=tuple(others),
            path=path,
            size_bytes=stored.bytes,
        )


def slot_of(named: Named, like: ModelSlot, number: int) -> ModelSlot:
    """Return a slot for the model, asleep and not looked for yet."""
    contents = replace(like.contents, settings=named.settings)
    slot = ModelSlot(contents, like.environment, like.report.for_slot(), number=number)
    slot.more_names, slot.size_bytes = named.aliases, named.size_bytes
    return slot


def _of_recipe(contents: ImageContents, environment: Mapping[str, str]) -> Iterator[tuple[Path, tuple[str, ...]]]:
    """Yield the variants of the recipe that are here, with their names, the fullest first."""
    # here: a start with one model never needs it
    from appliance.selection.recipe import names_of, path_of

    recipe = contents.recipe
    hub = cache(lambda: hub_settings(contents.settings, environment))
    for variant in recipe.rungs if recipe else ():
        if variant.format != contents.engine.model_format:
            continue
        if recipe and (path := path_of(variant, contents.settings.models_dir, hub)):
            yield path, (names_of(recipe, variant)[-1],)


def _path_of(model: str, settings: Settings) -> Path | None:
    try:
        return find_model(model, settings.models_dir)
    except FatalError:  # told when the model is wanted
        return None
