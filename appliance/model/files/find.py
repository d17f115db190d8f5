"""Find which model of the volume to serve: the requested one, else the only one.

A model is a GGUF file, or a folder with config.json and safetensors files. One image serves one of the two formats.
"""

from __future__ import annotations

import difflib
import errno
import os
import re
import stat
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from appliance.errors import ConfigError, ModelUnreadableError, printable
from appliance.image_facts import is_projector
from appliance.model.architecture.facts import Format
from appliance.model.files.leftovers import piece_of, why_empty_folder, why_no_weights, why_nothing
from appliance.model.formats.entries import ENTRIES_LIMIT, unreadable, why_no_target
from appliance.model.formats.parts import PART, plain_name

if TYPE_CHECKING:
    from appliance.model.files.hub_cache import CachedModel

DEPTH = 2  # models/organisation/repository/file.gguf
_LISTED = 20
_TYPES = ("bf", "f", "fp", "model", "q")  # words in mmproj-F16.gguf and mmproj-model-f16.gguf that name no model family
_WORDS: dict[Format, str] = {"gguf": "a .gguf file", "safetensors": "a folder of safetensors"}


def list_models(models_dir: Path, budget: Iterator[int] | None = None, *, with_repos: bool = True) -> tuple[Path, ...]:
    """List every model, sorted: *.gguf files (only the first part of a split one, no projectors) and safetensors
    folders.

    With `with_repos`, complete models in huggingface_hub's cache are included, each path of a repository once.
    Hidden folders (unfinished downloads) and `lost+found` are skipped. At most ENTRIES_LIMIT files and folders are
    read, or the rest of `budget`. Raises ModelUnreadableError for a folder that cannot be read; a missing
    `models_dir` is empty.
    """
    if not _is_there(models_dir):
        return ()
    found = _walk(models_dir, DEPTH, budget or iter(range(ENTRIES_LIMIT)), with_repos=with_repos)
    return tuple(sorted(path for path in found if is_folder_model(path) or _is_served(path.name)))


def is_folder_model(path: Path) -> bool:
    try:
        return _is_there(path / "config.json") and any(path.glob("*.safetensors"))
    except OSError:  # not even its type may be read: another user's mount, /proc/1/cwd
        return False


def find_projector(model: Path) -> Path | None:
    return next(iter(find_projectors(model)), None)


def find_projectors(model: Path) -> tuple[Path, ...]:
    """List multimodal projectors beside a GGUF model (`mmproj` in their names), the most similar name first.

    If several models share a folder, the projector's name must contain the model's family; otherwise a model could
    get another's. Files of one repository in the hub's cache are of one family, also if each quantization has its
    own folder.
    """
    snapshot = next((folder for folder in model.parents[:3] if folder.parent.name == "snapshots"), None)
    try:
        paths = [path for folder in {model.parent, snapshot or model.parent} for path in folder.glob("*.gguf")]
    except OSError:
        return ()
    found = [path for path in paths if is_projector(path.name)]
    if snapshot is None and sum(_is_served(path.name) for path in paths) > 1:
        found = [path for path in found if _family(path.name) and _family(path.name) in model.name.casefold()]
    return tuple(sorted(found, key=lambda path: (-_likeness(path.name, model.name), path)))


def _likeness(name: str, other: str) -> float:
    return difflib.SequenceMatcher(None, name, other).ratio()


def resolve_model(request: str | None, models_dir: Path, *, serves: Format = "gguf") -> Path:
    """Return the file or folder to serve. Without a request, only models in the format that this image `serves`
    count.

    Raises ConfigError if the request matches nothing or is ambiguous, ModelUnreadableError if the file is no model
    or incomplete.
    """
    if request:
        return _requested(request, models_dir)
    if path := only_model(models_dir, serves=serves):
        return path
    if told := why_nothing(models_dir):
        raise told
    message = f"no model was named and none is on the volume: {models_dir}{_others(models_dir)}"
    raise ConfigError(message, hint=f"put {_WORDS[serves]} into {models_dir}, or name one with APPLIANCE_MODEL")


def _others(models_dir: Path) -> str:
    """Describe what the folder has instead: a name without .gguf, a folder without config.json, the other format."""
    found = _entries(models_dir, iter(range(ENTRIES_LIMIT))) if _is_there(models_dir) else []
    return f"; these files are not models of this image:{_listing(found)}" if found else ""


def find_model(request: str, models_dir: Path) -> Path | None:
    """Return the path of the requested model on the volume, or elsewhere if the request is a path.

    None if it is missing or incomplete, if several quantizations of a repository match, or for a folder that is no
    model (its name may mean something else). Raises ConfigError if a name is ambiguous, ModelUnreadableError for a
    path that cannot be a model.
    """
    for path in (models_dir / request, Path(request)):  # both are the same path if the request is absolute
        if _is_there(path) and (Path(request).is_absolute() or _is_model(path)):
            return _checked(path)
    if cached := [model for model in _in_cache(request, models_dir) if not model.problem]:
        return cached[0].path if len(cached) == 1 else None
    wanted = request.casefold()
    found = [path for path in list_models(models_dir) if wanted in _names(path)]
    if len(found) > 1:
        raise _several(request, found)
    return _checked(found[0]) if found else None


def only_model(models_dir: Path, *, serves: Format = "gguf") -> Path | None:
    """Return the volume's only model of this format, or None if it has none. Raises ConfigError if it has several."""
    models = [path for path in list_models(models_dir) if _is_folder(path) == (serves == "safetensors")]
    models = [path for path in models if os.path.exists(path)] or models  # noqa: PTH110 - dead links
    if len(models) > 1 and all(piece_of(path) for path in models):
        return None
    if len(models) > 1:  # an adapter, or a projector without `mmproj` in its name, looks like a model
        models = [path for path in models if not is_attachment(path)]
    if len(models) > 1:
        message = f"no model was named and {len(models)} are on the volume: {models_dir}{_listing(models)}"
        raise ConfigError(message, hint=f"name one with APPLIANCE_MODEL, for instance {printable(models[0].stem)}")
    return _checked(models[0]) if models else None


def is_attachment(path: Path) -> bool:
    """True if the file's header shows that it is an adapter or a projector, not a model."""
    from appliance.model.formats.gguf import read_gguf  # here: a start with one model does not need it

    try:
        metadata = {} if _is_folder(path) else read_gguf(path).metadata
    except ModelUnreadableError:
        return False
    return metadata.get("general.type") in ("adapter", "mmproj") or metadata.get("general.architecture") == "clip"


def _requested(request: str, models_dir: Path) -> Path:
    if path := find_model(request, models_dir):
        return path
    for folder in (models_dir / request, Path(request)):
        if _is_there(folder):
            return _checked(folder)
    if cached := _in_cache(request, models_dir):
        first = cached[0]
        if not first.problem:
            raise _several(request, [model.path for model in cached])
        message = f"model on the volume is incomplete: {printable(f'{first.name}: {first.problem}')}"
        raise ModelUnreadableError(message, hint=f"fetch it again: appliance models pull {printable(first.repo)}")
    if told := why_nothing(models_dir, request):
        raise told
    models = list_models(models_dir)
    if Path(request).is_absolute():
        if astray := why_no_target(Path(request)):
            raise astray
        message = f"model cannot be opened: {request}: no such file{_listing(models)}"
        raise ModelUnreadableError(message, hint=_near_miss(Path(request).name, models, models_dir))
    message = f"no model of that name is on the volume: {request}{_listing(models)}"
    raise ConfigError(message, hint=_near_miss(request, models, models_dir))


def _several(request: str, found: Sequence[Path]) -> ConfigError:
    message = f"model name {request} matches {len(found)} files on the volume{_listing(found)}"
    return ConfigError(message, hint="give the path of one of them")


def _names(path: Path) -> tuple[str, ...]:
    return path.name.casefold(), path.stem.casefold(), plain_name(path).casefold()


def _in_cache(request: str, models_dir: Path) -> tuple[CachedModel, ...]:
    """Find models by the name of a repository, complete or not."""
    if Path(request).is_absolute() or not _has_repos(models_dir):
        return ()
    from appliance.model.files.hub_cache import find_cached  # here: a start without such folders does not need it

    return find_cached(request, models_dir)


def _has_repos(models_dir: Path) -> bool:
    try:
        return any(models_dir.glob("models--*"))
    except OSError:
        return False


def _near_miss(request: str, models: tuple[Path, ...], models_dir: Path) -> str:
    names = {name.casefold(): name for path in models for name in (path.name, path.stem)}
    near = difflib.get_close_matches(request.casefold(), names, n=1)
    if near:
        return f"perhaps you meant {printable(names[near[0]])}"
    return f"put the file into {models_dir}, or name one that is there"


def _is_model(path: Path) -> bool:
    return not _is_folder(path) or is_folder_model(path)


def _checked(path: Path) -> Path:
    if not _is_model(path):
        if told := why_empty_folder(path) or why_no_weights(path):
            raise told
        message = f"model is a folder: {printable(str(path))}"
        raise ModelUnreadableError(message, hint=_folder_hint(path))
    return path


def _folder_hint(folder: Path) -> str:
    inside = list_models(folder)
    if inside:
        return f"name the file itself, for instance {printable(str(inside[0]))}"
    if any(folder.glob("*.safetensors")):
        return "its config.json is missing: fetch the whole folder of the model"
    return "give what this image serves: a GGUF file, or a folder with config.json and safetensors files"


def _walk(folder: Path, depth: int, budget: Iterator[int], *, with_repos: bool) -> Iterator[Path]:
    for path in _entries(folder, budget):
        if path.name.startswith("models--") and depth == DEPTH:
            if with_repos:
                from appliance.model.files.hub_cache import (
                    list_cached,  # here: a start without such folders does not need it
                )

                yield from (model.path for model in list_cached(path, budget=budget) if not model.problem)
            continue
        is_folder = _is_folder(path)
        if not is_folder or is_folder_model(path):
            yield path
        if is_folder and depth:
            yield from _walk(path, depth - 1, budget, with_repos=with_repos)


def _entries(folder: Path, budget: Iterator[int]) -> list[Path]:
    try:
        with os.scandir(folder) as entries:
            names = [entry.name for _, entry in zip(budget, entries, strict=False)]
    except OSError as error:
        raise unreadable(folder, error) from error
    return [folder / name for name in sorted(names) if not name.startswith(".") and name != "lost+found"]


def _is_there(path: Path) -> bool:
    """True if the path exists or may not be inspected: opening it then reports why, which "not there" would hide."""
    try:
        path.stat()
    except (FileNotFoundError, NotADirectoryError, ValueError):  # ValueError: a NUL byte
        return False
    except OSError as error:
        return error.errno != errno.ENAMETOOLONG
    return True


def _is_folder(path: Path) -> bool:
    try:
        return stat.S_ISDIR(path.stat().st_mode)
    except OSError:
        return False


def _is_served(name: str) -> bool:
    part = PART.search(name)
    is_later_part = part is not None and int(part[1]) != 1
    return name.lower().endswith(".gguf") and not is_projector(name) and not is_later_part


def _family(projector: str) -> str:
    """Model family in a projector's name: `gemma` for mmproj-gemma-3-12b-F16.gguf, "" for mmproj-F16.gguf."""
    words = re.findall(r"[a-z]+|\d+", projector.casefold().removesuffix(".gguf").replace("mmproj", ""))
    return words[0] if len(words) > 1 and words[0] not in _TYPES else ""


def _listing(models: Sequence[Path]) -> str:
    """Format the paths one per line; "" if there are none."""
    lines = [f"\n  {printable(str(path))}" for path in models[:_LISTED]]
    more = len(models) - _LISTED
    return "".join(lines) + (f"\n  and {more} more" if more > 0 else "")
