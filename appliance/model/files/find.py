"""Which model of the volume to serve: the one asked for, else the only one.

A model is a GGUF file, or a folder with config.json and safetensors files. One image serves one of the two.
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
_TYPES = ("bf", "f", "fp", "model", "q")  # of mmproj-F16.gguf and mmproj-model-f16.gguf, which name nobody
_WORDS: dict[Format, str] = {"gguf": "a .gguf file", "safetensors": "a folder of safetensors"}


def list_models(models_dir: Path, budget: Iterator[int] | None = None, *, with_repos: bool = True) -> tuple[Path, ...]:
    """Every model, sorted: *.gguf files, of a split one the first part, without projectors; folders of safetensors;
    and, `with_repos`, what is whole in folders of huggingface_hub's cache, each path of a repository once.

    Hidden folders (unfinished downloads) and `lost+found` are passed over; no more than ENTRIES_LIMIT files and folders
    are looked at, or as many as `budget` has left. Raises ModelUnreadableError for a folder that cannot be read; a
    `models_dir` that is not there holds nothing.
    """
    if not _is_there(models_dir):
        return ()
    found = _walk(models_dir, DEPTH, budget or iter(range(ENTRIES_LIMIT)), with_repos=with_repos)
    return tuple(sorted(path for path in found if is_folder_model(path) or _is_served(path.name)))


def is_folder_model(path: Path) -> bool:
    try:
        return _is_there(path / "config.json") and any(path.glob("*.safetensors"))
    except OSError:  # not even its kind may be asked for: somebody else's mount, /proc/1/cwd
        return False


def find_projector(model: Path) -> Path | None:
    return next(iter(find_projectors(model)), None)


def find_projectors(model: Path) -> tuple[Path, ...]:
    """Multimodal projectors that lie beside a GGUF model, `mmproj` in their names: the one whose name is most like its
    own first.

    Where several models share a folder they have to name the model's family, or any of them would get another's. What
    was fetched of one repository is of one family, also where the quantizations have folders of their own.
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
    """The file or folder to serve; what nobody named is of the format that this image `serves`.

    Raises ConfigError when nothing says which, ModelUnreadableError when it cannot be one or is there in part alone.
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
    """What lies there instead: a name without its .gguf, a folder that lacks its config.json, the other format."""
    found = _entries(models_dir, iter(range(ENTRIES_LIMIT))) if _is_there(models_dir) else []
    return f"; what is there is no model of this image:{_listing(found)}" if found else ""


def find_model(request: str, models_dir: Path) -> Path | None:
    """What it names on the volume, or elsewhere as a path. None for what is not there, or not whole, for a repository
    of which several quantizations are there, and for a folder that is no model, whose name may mean something else.
    Raises ConfigError where a name could be several, and as `resolve_model` for a path that cannot be a model."""
    for path in (models_dir / request, Path(request)):  # an absolute request is itself in both
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
    """None where the volume has none of this format. Raises ConfigError where it has several."""
    models = [path for path in list_models(models_dir) if _is_folder(path) == (serves == "safetensors")]
    models = [path for path in models if os.path.exists(path)] or models  # noqa: PTH110 - links that lead nowhere
    if len(models) > 1 and all(piece_of(path) for path in models):
        return None
    if len(models) > 1:  # an adapter, and a projector without `mmproj` in its name, is a file like any other
        models = [path for path in models if not _is_beside(path)]
    if len(models) > 1:
        message = f"no model was named and {len(models)} are on the volume: {models_dir}{_listing(models)}"
        raise ConfigError(message, hint=f"name one with APPLIANCE_MODEL, for instance {printable(models[0].stem)}")
    return _checked(models[0]) if models else None


def _is_beside(path: Path) -> bool:
    """Whether it is a file that is loaded beside a model, by its header."""
    from appliance.model.formats.gguf import read_gguf  # here: no start with one model needs it

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
        message = f"model on the volume is not whole: {printable(f'{first.name}: {first.problem}')}"
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
    message = f"model name {request} means {len(found)} files on the volume{_listing(found)}"
    return ConfigError(message, hint="give the path of the one that is meant")


def _names(path: Path) -> tuple[str, ...]:
    return path.name.casefold(), path.stem.casefold(), plain_name(path).casefold()


def _in_cache(request: str, models_dir: Path) -> tuple[CachedModel, ...]:
    """By the name of a repository, whole or not."""
    if Path(request).is_absolute() or not _has_repos(models_dir):
        return ()
    from appliance.model.files.hub_cache import find_cached  # here: a start without such folders never needs it

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
                    list_cached,  # here: a start without such folders never needs it
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
    """True also for what may not be looked at: opening it then says why, which "not there" would hide."""
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
    """`gemma` of mmproj-gemma-3-12b-F16.gguf; nothing of mmproj-F16.gguf."""
    words = re.findall(r"[a-z]+|\d+", projector.casefold().removesuffix(".gguf").replace("mmproj", ""))
    return words[0] if len(words) > 1 and words[0] not in _TYPES else ""


def _listing(models: Sequence[Path]) -> str:
    """The names below each other; empty without any."""
    lines = [f"\n  {printable(str(path))}" for path in models[:_LISTED]]
    more = len(models) - _LISTED
    return "".join(lines) + (f"\n  and {more} more" if more > 0 else "")
