"""Models in their folders: on the volume, and in mounted folders of other tools, which are only read.

Folders of Hugging Face, Ollama and LM Studio are recognised by their content; stores.md has the sources. This is the
only module here that reads models.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Literal

from appliance.errors import ConfigError, FatalError, ModelUnreadableError, printable
from appliance.image_facts import is_projector
from appliance.model import Format, digest, list_models, plain_name, read_model, why_nothing
from appliance.model.files.find import find_projector
from appliance.model.files.hub_cache import (
    CachedModel,
    cache_folder,
    find_cached,
    is_artifact,
    is_meant,
    is_repo,
    list_cached,
    missing_shard,
    read_ref,
    repo_of,
)
from appliance.model.files.quantized import Note, QuantizedFile, folder_of, list_quantized, note_of, unfinished
from appliance.model.formats.entries import ENTRIES_LIMIT
from appliance.model.formats.gguf import read_gguf
from appliance.model.formats.parts import PART
from appliance.reference import HUB_HOSTS, Reference
from appliance.settings import Settings, parse_folders
from appliance.values import dataclass
from appliance.weights.cache.quants import GgufSet, label_of, pick
from appliance.weights.stores.ollama import is_store, list_ollama, parse_name

__all__ = [
    "Format",
    "Listing",
    "Note",
    "QuantizedFile",
    "Store",
    "StoredModel",
    "Tool",
    "ambiguous",
    "cache_folder",
    "facts_of",
    "find_elsewhere",
    "find_stored",
    "folder_of",
    "is_artifact",
    "is_in_cache",
    "is_last_model",
    "is_named",
    "lies_below",
    "list_quantized",
    "list_store",
    "lookup",
    "model_at",
    "note_of",
    "ollama_stores",
    "other_stores",
    "read_ref",
    "repo_of",
    "unfinished",
    "volume_store",
    "why_damaged",
    "why_none",
    "with_stores",
]

Tool = Literal["volume", "Hugging Face", "Ollama", "LM Studio", "image", "folder"]
_IMAGE = Path("/opt/models")
_LISTED = 20


@dataclass(frozen=True, kw_only=True)
class Store:
    tool: Tool
    folder: Path


@dataclass(frozen=True, kw_only=True)
class StoredModel:
    """A model in a store. `name` is what `serve` accepts.

    `files` are all of its files in order; the engine gets the first. They may be empty if there is a `problem`.
    """

    name: str
    store: Store
    path: Path
    files: tuple[Path, ...]
    format: Format
    bytes: int
    problem: str | None = None  # why it cannot be served
    projector: Path | None = None
    sha256: str | None = None  # of the file, if its store uses it as the name
    repo: str | None = None  # org/name
    file: str = ""  # inside the repository

    @property
    def where(self) -> str:
        """Place for messages: `Ollama's folder /mnt/ollama`."""
        folder = printable(str(self.store.folder))
        return {"volume": "the volume", "image": "the image", "folder": folder}.get(
            self.store.tool, f"{self.store.tool}'s folder {folder}"
        )


@dataclass(frozen=True, kw_only=True)
class Listing:
    store: Store
    models: tuple[StoredModel, ...]
    problem: str | None = None  # why the list is incomplete


def other_stores(settings: Settings) -> tuple[Store, ...]:
    """Folders of other tools. Raises ConfigError if a requested folder does not exist."""
    asked = settings.model_dirs
    if asked is None:
        found = [store for folder in settings.usual_model_dirs for store in _stores_in(folder)]
    else:
        found = [store for folder in parse_folders(asked) for store in _asked_for(folder, settings)]
    return tuple(dict.fromkeys(store for store in found if store.folder != settings.models_dir))


def ollama_stores(places: Sequence[Path]) -> tuple[Store, ...]:
    """Return those of the folders that are Ollama's."""
    return tuple(Store(tool="Ollama", folder=place) for place in dict.fromkeys(places) if is_store(place))


def _asked_for(folder: Path, settings: Settings) -> tuple[Store, ...]:
    if found := _stores_in(folder):
        return found
    message = f"folder of setting model_dirs cannot be read: {folder} ({settings.sources['model_dirs']})"
    raise ConfigError(message, hint=f"mount one, as in `-v ~/.ollama:{folder}:ro`, readable for user {os.geteuid()}")


def _stores_in(folder: Path) -> tuple[Store, ...]:
    """Recognise a mounted folder: a tool's models folder or its home. Empty if it is missing or inaccessible."""
    try:
        if not folder.is_dir():
            return ()
        if folder == _IMAGE:
            return (Store(tool="image", folder=folder),)
        for each in (folder, folder / "models"):
            if is_store(each):
                return (Store(tool="Ollama", folder=each),)
        for each in (folder / "hub", folder):
            if each.is_dir() and any(each.glob("models--*")):
                return (Store(tool="Hugging Face", folder=each),)
        if (folder / ".internal").is_dir() and (folder / "models").is_dir():
            return (Store(tool="LM Studio", folder=folder / "models"),)
    except OSError:
        return ()
    is_lm_studio = folder.parent.name in (".lmstudio", "lm-studio") or folder.name == "lmstudio"
    return (Store(tool="LM Studio" if is_lm_studio else "folder", folder=folder),)


def list_store(store: Store) -> Listing:
    """List the models. Never raises for the folder's content: errors become the listing's `problem`."""
    budget = iter(range(ENTRIES_LIMIT))
    try:
        if store.tool == "Ollama":
            return Listing(store=store, models=tuple(_of_ollama(store)))
        models = (*_plain(store, budget), *_cached(store, budget))
    except ModelUnreadableError as error:
        return Listing(store=store, models=(), problem=f"{error.message}; {error.hint}")
    except OSError as error:
        words = f"{printable(str(error.filename))}: {(error.strerror or str(error)).lower()}"
        return Listing(store=store, models=(), problem=f"folder cannot be read: {words}; {_readable_hint()}")
    is_cut = next(budget, None) is None
    problem = f"only the first {ENTRIES_LIMIT:,} files and folders were listed" if is_cut else None
    return Listing(store=store, models=models, problem=problem)


def _plain(store: Store, budget: Iterator[int]) -> Iterator[StoredModel]:
    """Yield files and folders outside hub caches: `publisher/repository/file.gguf`, or at any depth."""
    for path in list_models(store.folder, budget, with_repos=False):
        below = path.relative_to(store.folder)
        repo = "/".join(below.parts[:2]) if len(below.parts) > 2 else None
        yield _stored(store, path, str(below), repo=repo, file="/".join(below.parts[2:]))


def _cached(store: Store, budget: Iterator[int]) -> Iterator[StoredModel]:
    for _, folder in zip(budget, sorted(store.folder.glob("models--*")), strict=False):
        for model in list_cached(folder, budget=budget):
            yield _of_cache(store, model)


def _of_cache(store: Store, model: CachedModel) -> StoredModel:
    return _stored(store, model.path, model.name, repo=model.repo, file=model.file, problem=model.problem)


def _stored(
    store: Store, path: Path, name: str, *, repo: str | None = None, file: str = "", problem: str | None = None
) -> StoredModel:
    files = _files_of(path)
    sizes = [_size(each) for each in files]
    problem = problem or _why_not_whole(path, files)
    problem = problem or next((why for each in files if (why := _why_unreadable(each))), None)
    return StoredModel(
        name=name,
        store=store,
        path=path,
        files=files,
        format="gguf" if path.suffix.lower() == ".gguf" else "safetensors",
        bytes=sum(size or 0 for size in sizes),
        problem=problem,
        projector=find_projector(path) if path.suffix.lower() == ".gguf" else None,
        repo=repo,
        file=file,
    )


def _of_ollama(store: Store) -> Iterator[StoredModel]:
    for model in list_ollama(store.folder):
        weights, projector = model.weights, model.projector
        problem = model.problem or (_why_unreadable(weights.path) if weights else None)
        yield StoredModel(
            name=model.name,
            store=store,
            path=weights.path if weights else model.manifest,
            files=(weights.path,) if weights else (),
            format="gguf",
            bytes=weights.bytes if weights else 0,
            problem=problem,
            projector=projector.path if projector else None,
            sha256=weights.sha256 if weights else None,
        )


def _files_of(path: Path) -> tuple[Path, ...]:
    """List the existing files: parts in order, or the content of a safetensors folder."""
    if path.is_dir():
        return tuple(sorted(each for each in path.iterdir() if each.is_file() and not each.name.startswith(".")))
    part = PART.search(path.name)
    if not part:
        return (path,) if path.exists() else ()
    stem, suffix = path.name[: part.start()], path.name[-len(".gguf") :]
    names = (f"{stem}-{number:05}-of-{part[2]}{suffix}" for number in range(1, min(int(part[2]), 1024) + 1))
    return tuple(each for name in names if (each := path.with_name(name)).exists())


def _why_not_whole(path: Path, files: Sequence[Path]) -> str | None:
    """Return why a plain model is incomplete: a dead link, something other than a file, a missing part. None if it
    is whole."""
    if not path.is_dir():
        part = PART.search(path.name)
        count = int(part[2]) if part else 1
        if not files:
            return "it is a dead link" if path.is_symlink() else "it is gone"
        if part and (missing := count - len(files)):
            words = f"{missing} of its {count} parts {'is' if missing == 1 else 'are'} missing"
            return f"{words}, the first of them {_missing_part(path.name, part, files)}"
    elif lost := [each for each in path.iterdir() if each.is_symlink() and not each.exists()]:
        return f"{printable(lost[0].name)}: it is a dead link"
    elif name := missing_shard([each.name for each in files]):
        return f"{printable(name)} is missing"
    odd = next((each for each in files if not each.is_file()), None)
    return f"it is not a file: {printable(odd.name)}" if odd else None


def _missing_part(name: str, part: re.Match[str], files: Sequence[Path]) -> str:
    there = {int(found[1]) for each in files if (found := PART.search(each.name))}
    first = next(number for number in range(1, int(part[2]) + 1) if number not in there)
    return f"{name[: part.start()]}-{first:05}-of-{part[2]}.gguf"


def _size(path: Path) -> int | None:
    try:
        return path.stat().st_size
    except OSError:
        return None


def _why_unreadable(path: Path) -> str | None:
    if os.access(path, os.R_OK, effective_ids=True):
        return None
    return f"it is not readable: {printable(path.name)}; {_readable_hint()}"


def _readable_hint() -> str:
    return f"make it readable for user {os.geteuid()}, or start the container with `--user` of its owner"


def find_stored(request: str, stores: Sequence[Store]) -> tuple[StoredModel, ...]:
    """Return the complete models of that name in the first folder that has one, else the incomplete ones."""
    partly: list[StoredModel] = []
    for store in stores:
        found = _named(request, store)
        if whole := [model for model in found if not model.problem]:
            return tuple(whole)
        partly += found
    return tuple(partly)


def lookup(reference: Reference, roots: Sequence[Path], serves: Format) -> tuple[Path, ...] | None:
    """Return all files of the referenced model in the first hub cache that has it complete; None if none has. Asks
    no network.

    If several quantizations match, the usual one is taken. Unreadable caches are skipped.
    """
    for root in roots:
        store = Store(tool="volume", folder=root)
        try:
            found = [_of_cache(store, model) for model in find_cached(_as_asked(reference), root)]
        except ModelUnreadableError:
            continue
        whole = [model for model in found if model.format == serves and not model.problem]
        if model := _usual(whole, reference.quant):
            return (*model.files, *([model.projector] if model.projector else []))
    return None


def _as_asked(reference: Reference) -> str:
    """Return the reference without scheme and host, which a cache does not record."""
    if reference.repo is None:
        return reference.url or reference.text
    revision = f"@{reference.revision}" if reference.revision else ""
    quant = f":{reference.quant}" if reference.quant else ""
    return f"{reference.repo}{revision}{quant}{f'/{reference.path}' if reference.path else ''}"


def _usual(models: Sequence[StoredModel], quant: str | None) -> StoredModel | None:
    if len(models) < 2:
        return models[0] if models else None
    by_paths = {tuple(path.name for path in model.files): model for model in models}
    sets = [GgufSet(label=label_of(model.file), paths=paths) for paths, model in by_paths.items()]
    try:
        return by_paths[pick(sets, quant, "", lambda _: "").paths]
    except ConfigError:  # ambiguous: the hub's listing decides
        return None


def _named(request: str, store: Store) -> list[StoredModel]:
    """Find models by name. A repository reference may name a revision, and is looked up without listing the whole
    folder."""
    if store.tool != "Ollama" and (cached := find_cached(request, store.folder)):
        return [_of_cache(store, model) for model in cached]
    found = [model for model in list_store(store).models if is_named(model, request)]
    exact = [model for model in found if model.name == request]
    return exact or found


def is_named(model: StoredModel, request: str) -> bool:
    """True if the request is the model's name, file, stem, or `publisher/repository[:QUANT]`. Ollama's models match
    by name only."""
    wanted = request.casefold()
    if model.store.tool == "Ollama":
        own, asked = parse_name(model.name), parse_name(request)
        if own is None or asked is None:
            return False
        return asked == own or (own[0] in HUB_HOSTS and asked[1:] == own[1:])  # Ollama models that come from the hub
    path = model.path
    names = (
        model.name,
        model.name.removesuffix(".gguf"),
        model.file,
        path.name,
        path.stem,
        plain_name(path),
        str(path),
    )
    if wanted in [name.casefold() for name in names]:
        return True
    repo, _, quant = wanted.partition(":")
    return model.repo is not None and repo == model.repo.casefold() and is_meant(model.file, quant, "")


def find_elsewhere(request: str | None, settings: Settings, serves: Format) -> StoredModel | None:
    """Find a complete model in other tools' folders; without a `request` it must be the only one. None if there is
    none.

    Raises ConfigError if several match.
    """
    stores = other_stores(settings)
    if request:
        found = [model for model in find_stored(request, stores) if not model.problem]
    else:
        found = [model for model in _all(stores) if not model.problem and model.format == serves]
    if len(found) < 2:
        return found[0] if found else None
    named = f"model name {request} matches" if request else "no model was named and none is on the volume;"
    message = f"{named} {len(found)} in mounted folders{_listing(found)}"
    raise ConfigError(message, hint=f"name one with APPLIANCE_MODEL, for instance {printable(found[0].name)}")


def with_stores(error: FatalError, settings: Settings) -> FatalError:
    """Extend an error about a missing model with what mounted folders have."""
    stores = other_stores(settings)
    partly = [model for model in find_stored(settings.model, stores) if model.problem] if settings.model else []
    if partly:
        message = f"model in {partly[0].where} cannot be served: {printable(f'{partly[0].name}: {partly[0].problem}')}"
        return ModelUnreadableError(message, hint="`appliance models list` lists the models")
    if not isinstance(error, ModelUnreadableError) and (told := _why_none(stores, settings.model)):
        return told
    models = _all(stores)
    if not models:
        return error
    listing = f"\n  in mounted folders:{_listing(models)}"
    return type(error)(f"{error.message}{listing}", hint=_near(settings.model, models) or error.hint)


def why_none(settings: Settings) -> FatalError | None:
    """Return an error if the volume and the mounted folders have only a part of a model, or a folder made by Docker."""
    return why_nothing(settings.models_dir) or _why_none(other_stores(settings), None)


def _why_none(stores: Sequence[Store], request: str | None) -> FatalError | None:
    if not request and any(not model.problem for model in _all(stores)):  # there is a model, but of another format
        return None
    plain = (store for store in stores if store.tool in ("folder", "LM Studio"))
    return next((told for store in plain if (told := why_nothing(store.folder, request))), None)


def _near(request: str | None, models: Sequence[StoredModel]) -> str | None:
    import difflib  # here: only a failing start needs it

    names = {model.name.casefold(): model.name for model in models if not model.problem}
    near = difflib.get_close_matches((request or "").casefold(), names, n=1)
    return f"perhaps you meant {printable(names[near[0]])}" if near else None


def _all(stores: Sequence[Store]) -> list[StoredModel]:
    return [model for store in stores for model in list_store(store).models]


def _listing(models: Sequence[StoredModel]) -> str:
    lines = [f"\n  {printable(model.name)} ({model.store.tool})" for model in models[:_LISTED]]
    more = len(models) - _LISTED
    return "".join(lines) + (f"\n  and {more} more" if more > 0 else "")


def volume_store(models_dir: Path) -> Store:
    return Store(tool="volume", folder=models_dir)


def is_in_cache(model: StoredModel) -> bool:
    """True if the model is in the layout of huggingface_hub's cache."""
    folder = model.store.folder
    return model.path.is_relative_to(folder) and is_repo(Path(model.path.relative_to(folder).parts[0]))


def model_at(path: Path, name: str, stores: Sequence[Store]) -> StoredModel:
    """Return the model at a known path, under a given name."""
    store = next((each for each in stores if path.is_relative_to(each.folder)), None)
    store = store or Store(tool="folder", folder=path.parent)
    below = path.relative_to(store.folder).parts
    file = "/".join(below[3:]) if is_repo(Path(below[0])) else ""
    return _stored(store, path, name, file=file)


def is_last_model(model: StoredModel) -> bool:
    """True if its repository in the hub's cache has no other model, complete or not."""
    folder = model.store.folder / model.path.relative_to(model.store.folder).parts[0]
    return all(each.file == model.file for each in list_cached(folder))


def lies_below(path: Path, folder: Path) -> bool:
    """True if no link on the path leads out of the folder. The target of the last component does not matter."""
    return Path(os.path.realpath(path.parent)).is_relative_to(os.path.realpath(folder))


def why_damaged(path: Path) -> str | None:
    """Return why a GGUF file is damaged, as far as its header and length show: cut off, or not GGUF. None if it
    looks whole."""
    try:
        read_gguf(path)
    except ModelUnreadableError as error:
        return error.message
    return None


def ambiguous(name: str, found: Sequence[str], what: str = "models", hint: str = "give the full name") -> ConfigError:
    """Return the error for a name that means several."""
    lines = "".join(f"\n  {printable(each)}" for each in found)
    return ConfigError(f"model name {printable(name)} matches {len(found)} {what}{lines}", hint=hint)


def facts_of(model: StoredModel) -> dict[str, str]:
    """Return what a published model says of itself: `name`, and the names of ModelPack's `config`. Raises
    ModelUnreadableError for a damaged header."""
    found = read_model(model.path)
    size = found.parameters / 1e9
    shown = f"{size:.1f}B" if size >= 1 else f"{size * 1e3:.0f}M"
    facts = {"paramSize": shown if size else "", "quantization": found.file_type or ""}
    known = {name: fact for name, fact in facts.items() if fact}
    return {"name": found.name, "format": model.format, "architecture": found.architecture, **known}


def digests_of(files: Iterable[Path]) -> frozenset[str]:
    """Return the digests of the models among the files, with which the names of their saved prompts begin."""
    found = set()
    for path in files:
        if path.suffix == ".gguf" and not is_projector(path.name):
            with suppress(ModelUnreadableError):  # a later part, or damaged: no engine can have served it
                model = read_model(path)
                found.add(digest(model.parts, model.header_bytes).key)
    return frozenset(found)
