"""Which model of the volume to serve: the one asked for, else the only one.

A model is a GGUF file, or a folder with config.json and safetensors files. One image serves one of the two.
"""

from __future__ import annotations

import difflib
import errno
import os
import re
import stat
from collections.abc import Iterator
from pathlib import Path

from appliance.errors import ConfigError, ModelUnreadableError
from appliance.model.facts import Format
from appliance.model.parts import PART

DEPTH = 2  # models/organisation/repository/file.gguf
_LISTED = 20
_TYPES = ("bf", "f", "fp", "model", "q")  # of mmproj-F16.gguf and mmproj-model-f16.gguf, which name nobody
_WORDS: dict[Format, str] = {"gguf": "a .gguf file", "safetensors": "a folder of safetensors"}


def list_models(models_dir: Path) -> tuple[Path, ...]:
    """Every model, sorted: *.gguf files, of a split one the first part, without projectors; folders of safetensors.

    Hidden folders (unfinished downloads) and `lost+found` are passed over. Raises ModelUnreadableError for a folder
    that cannot be read; a `models_dir` that is not there holds nothing.
    """
    if not _is_there(models_dir):
        return ()
    return tuple(sorted(path for path in _walk(models_dir, DEPTH) if is_folder_model(path) or _is_served(path.name)))


def is_folder_model(path: Path) -> bool:
    return _is_there(path / "config.json") and any(path.glob("*.safetensors"))


def find_projector(model: Path) -> Path | None:
    """The multimodal projector that lies beside a GGUF model, `mmproj` in its name: the one whose name is most like it.

    Where several models share a folder it has to name the model's family, or any of them would get another's.
    """
    try:
        names = [path.name for path in model.parent.glob("*.gguf")]
    except OSError:
        return None
    found = [name for name in names if _is_projector(name)]
    if sum(map(_is_served, names)) > 1:
        found = [name for name in found if _family(name) and _family(name) in model.name.casefold()]
    near = sorted(found, key=lambda name: (-difflib.SequenceMatcher(None, name, model.name).ratio(), name))
    return model.parent / near[0] if near else None


def resolve_model(request: str | None, models_dir: Path, *, serves: Format = "gguf") -> Path:
    """The file or folder to serve; what nobody named is of the format that this image `serves`.

    Raises ConfigError when nothing says which, ModelUnreadableError when it cannot be one.
    """
    if request:
        return _requested(request, models_dir)
    models = tuple(path for path in list_models(models_dir) if _is_folder(path) == (serves == "safetensors"))
    if len(models) == 1:
        return _checked(models[0])
    if not models:
        message = f"no model was named and none is on the volume: {models_dir}"
        raise ConfigError(message, hint=f"put {_WORDS[serves]} into {models_dir}, or name one with APPLIANCE_MODEL")
    message = f"no model was named and {len(models)} are on the volume: {models_dir}{_listing(models)}"
    raise ConfigError(message, hint=f"name one with APPLIANCE_MODEL, for instance {models[0].stem}")


def find_model(request: str, models_dir: Path) -> Path | None:
    """What it names on the volume, or elsewhere as a path. Raises ConfigError where that could be several, and as
    `resolve_model` for what cannot be a model."""
    for path in (models_dir / request, Path(request)):  # an absolute request is itself in both
        if _is_there(path):
            return _checked(path)
    wanted = request.casefold()
    found = [path for path in list_models(models_dir) if wanted in (path.name.casefold(), path.stem.casefold())]
    if len(found) > 1:
        message = f"model name {request} means {len(found)} files on the volume{_listing(tuple(found))}"
        raise ConfigError(message, hint="give the path of the one that is meant")
    return _checked(found[0]) if found else None


def _requested(request: str, models_dir: Path) -> Path:
    if path := find_model(request, models_dir):
        return path
    models = list_models(models_dir)
    if Path(request).is_absolute():
        message = f"model cannot be opened: {request}: no such file{_listing(models)}"
        raise ModelUnreadableError(message, hint=_near_miss(Path(request).name, models, models_dir))
    message = f"no model of that name is on the volume: {request}{_listing(models)}"
    raise ConfigError(message, hint=_near_miss(request, models, models_dir))


def _near_miss(request: str, models: tuple[Path, ...], models_dir: Path) -> str:
    names = {name.casefold(): name for path in models for name in (path.name, path.stem)}
    near = difflib.get_close_matches(request.casefold(), names, n=1)
    if near:
        return f"perhaps you meant {names[near[0]]}"
    return f"put the file into {models_dir}, or name one that is there"


def _checked(path: Path) -> Path:
    if _is_folder(path) and not is_folder_model(path):
        message = f"model is a folder: {path}"
        raise ModelUnreadableError(message, hint=_folder_hint(path))
    return path


def _folder_hint(folder: Path) -> str:
    inside = list_models(folder)
    if inside:
        return f"name the file itself, for instance {inside[0]}"
    if any(folder.glob("*.safetensors")):
        return "its config.json is missing: fetch the whole folder of the model"
    return "give the path of a GGUF file, or of a folder with config.json and safetensors files"


def _walk(folder: Path, depth: int) -> Iterator[Path]:
    try:
        entries = sorted(os.scandir(folder), key=lambda entry: entry.name)
    except OSError as error:
        message = f"folder of models cannot be read: {folder}: {(error.strerror or str(error)).lower()}"
        hint = f"make it readable for user {os.getuid()} or group {os.getgid()} of the container"
        raise ModelUnreadableError(message, hint=hint) from error
    for entry in entries:
        if entry.name.startswith(".") or entry.name == "lost+found":
            continue
        path = Path(entry.path)
        if not _is_folder(path) or is_folder_model(path):
            yield path
        if _is_folder(path) and depth:
            yield from _walk(path, depth - 1)


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
    return name.lower().endswith(".gguf") and not _is_projector(name) and not is_later_part


def _is_projector(name: str) -> bool:
    return "mmproj" in name.lower()  # mmproj-F16.gguf, gemma-4-E4B-it-mmproj.gguf


def _family(projector: str) -> str:
    """`gemma` of mmproj-gemma-3-12b-F16.gguf; nothing of mmproj-F16.gguf."""
    words = re.findall(r"[a-z]+|\d+", projector.casefold().removesuffix(".gguf").replace("mmproj", ""))
    return words[0] if len(words) > 1 and words[0] not in _TYPES else ""


def _listing(models: tuple[Path, ...]) -> str:
    """The names below each other; empty without any."""
    lines = [f"\n  {path}" for path in models[:_LISTED]]
    more = len(models) - _LISTED
    return "".join(lines) + (f"\n  and {more} more" if more > 0 else "")
