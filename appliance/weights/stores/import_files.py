"""Import a model to the volume: as shared blocks or a hard link if the disk supports it, else as a copy."""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import stat
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from appliance.errors import ConfigError, DownloadError, ModelUnreadableError, VolumeError, printable
from appliance.reference import refuse_artifact
from appliance.settings import Settings
from appliance.values import dataclass
from appliance.volume import part_of, refusal
from appliance.weights.cache.size import as_size
from appliance.weights.stores.remove import blob_of
from appliance.weights.stores.stores import (
    Store,
    StoredModel,
    ambiguous,
    find_stored,
    is_in_cache,
    list_store,
    other_stores,
    read_ref,
    why_damaged,
)
from appliance.weights.stores.transfer import OnBytes, clone, copy, digest_file

_SPARE_BYTES = 64 * 2**20  # kept free for profiles and caches
_SHA256 = re.compile(r"[0-9a-f]{64}")
_UNUSUAL = re.compile(r"[^A-Za-z0-9._-]+")


@dataclass(frozen=True, kw_only=True)
class Brought:
    name: str  # on the volume
    file: Path
    bytes: int
    sha256: str
    how: str  # "copied", "linked", "shares its blocks", "is there already"


@dataclass(frozen=True, kw_only=True)
class _Step:
    source: Path
    target: Path
    name: str
    sha256: str | None  # required hash; None if unknown
    link: Path | None = None  # link of a snapshot to a target in blobs
    is_main: bool = False  # True if the snapshot is the one that branch main points to


def sources_of(request: str, settings: Settings) -> tuple[StoredModel, ...]:
    """Find the models at a path, or by name in another tool's folder. Raises ConfigError if none or several match."""
    path = Path(request)
    if "\0" not in request and len(request) < 4096 and path.exists():
        return _at(path.absolute(), settings)
    refuse_artifact(request)
    found = find_stored(request, other_stores(settings))
    if len(found) == 1:
        return found
    if not found:
        message = f"no file and no model in mounted folders has this name: {printable(request)}"
        action = "pull NAME` fetches a model" if "://" in request else "list` lists the models"
        raise ConfigError(message, hint=f"`appliance models {action}")
    raise ambiguous(request, [f"{model.name} ({model.store.tool})" for model in found])


def _at(path: Path, settings: Settings) -> tuple[StoredModel, ...]:
    for store in other_stores(settings):
        if path.is_relative_to(store.folder):
            found = [model for model in list_store(store).models if path in (model.path, *model.files)]
            if found:
                return tuple(found)
    folder = path if path.is_dir() and not (path / "config.json").exists() else path.parent
    models = list_store(Store(tool="folder", folder=folder)).models
    found = [model for model in models if path in (folder, model.path, *model.files)]
    if not found:
        message = f"no model found at: {printable(str(path))}"
        raise ModelUnreadableError(message, hint="give a GGUF file, or a folder of safetensors with its config.json")
    return tuple(found)


def bring(
    models: Sequence[StoredModel], settings: Settings, on_bytes: OnBytes, sha256: str | None = None
) -> list[Brought]:
    """Import the models. Models that were imported before an error stay.

    Raises ModelUnreadableError for an incomplete model, DownloadError if the sha256 differs from the one in the name
    or from `sha256`. Raises ConfigError if another file has the name, VolumeError for disk errors.
    """
    steps = [step for model in models for step in _steps(model, settings.models_dir)]
    if sha256:
        steps = [replace(step, sha256=sha256.lower()) for step in steps]
    done: list[Brought] = []
    for number, step in enumerate(steps):
        left = sum(each.source.stat().st_size for each in steps[number:])
        try:
            done.append(_bring(step, settings.models_dir, left, on_bytes))
        except OSError as error:
            raise refusal(settings.models_dir, error) from error
    return done


def _steps(model: StoredModel, models_dir: Path) -> list[_Step]:
    if model.problem:
        message = f"model cannot be imported: {printable(f'{model.name}: {model.problem}')}"
        raise ModelUnreadableError(message, hint="repair it with the tool that it belongs to")
    for path in model.files:
        if path.suffix.lower() != ".safetensors" and model.format == "gguf" and (why := why_damaged(path)):
            raise ModelUnreadableError(why, hint="fetch it again with the tool that it belongs to")
    # The file that makes it visible as a model comes last: the first part, or config.json.
    files = [*([model.projector] if model.projector else []), *reversed(model.files)]
    files.sort(key=lambda path: path.name == "config.json")
    if is_in_cache(model):
        return [_cached_step(model, path, models_dir) for path in files]
    if model.format == "safetensors":
        folder = models_dir / model.path.name
        return [_Step(source=path, target=folder / path.name, name=folder.name, sha256=None) for path in files]
    return [_flat_step(model, path, models_dir) for path in files]


def _cached_step(model: StoredModel, path: Path, models_dir: Path) -> _Step:
    """Keep the place in the hub cache's layout, where `org/name:QUANT` finds it."""
    below = path.relative_to(model.store.folder)
    blob, repo = blob_of(path), models_dir / below.parts[0]
    sha256 = blob.name if blob and _SHA256.fullmatch(blob.name) else None
    link = models_dir / below
    if blob is None or not re.fullmatch(r"[\w-]{1,128}", blob.name):
        return _Step(source=path, target=link, name=model.name, sha256=None)
    source = model.store.folder / below.parts[0]
    is_main = read_ref(source, "main") == below.parts[2]
    target = repo / "blobs" / blob.name
    return _Step(source=path, target=target, name=model.name, sha256=sha256, link=link, is_main=is_main)


def name_of(model: StoredModel, path: Path) -> str:
    """Name the file: Ollama's `qwen3:4b` becomes qwen3-4b.gguf; other files keep their names."""
    if model.store.tool != "Ollama":
        return path.name
    stem = _UNUSUAL.sub("-", model.name.removesuffix(":latest").rpartition("/")[2])
    return f"{stem}.gguf" if path == model.path else f"mmproj-{stem}.gguf"


def _flat_step(model: StoredModel, path: Path, models_dir: Path) -> _Step:
    name = name_of(model, path)
    sha256 = path.name.removeprefix("sha256-").lower() if model.store.tool == "Ollama" else None
    return _Step(source=path, target=models_dir / name, name=name.removesuffix(".gguf"), sha256=sha256)


def _bring(step: _Step, models_dir: Path, left: int, on_bytes: OnBytes) -> Brought:
    length = step.source.stat().st_size
    if step.target.exists():
        sha256, how = _same(step, length, on_bytes), "is there already"
    else:
        step.target.parent.mkdir(parents=True, exist_ok=True)
        sha256, how = _put(step, models_dir, left, on_bytes)
    if step.link is not None and not os.path.lexists(step.link):
        _link(step.link, step.target, is_main=step.is_main)
    return Brought(name=step.name, file=step.link or step.target, bytes=length, sha256=sha256, how=how)


def _same(step: _Step, length: int, on_bytes: OnBytes) -> str:
    if step.target.stat().st_size == length:
        found = digest_file(step.target, hashlib.sha256(), lambda _: None)
        if found == (step.sha256 or digest_file(step.source, hashlib.sha256(), on_bytes)):
            return found
    message = f"another file of this name is on the volume: {printable(step.target.name)}"
    raise ConfigError(message, hint=f"remove it first: `appliance models rm {printable(step.target.name)}`")


def _put(step: _Step, models_dir: Path, left: int, on_bytes: OnBytes) -> tuple[str, str]:
    # At the top of the folder, where the next `add` or `import` removes leftovers of a killed one.
    with part_of(models_dir / f"{step.target.name.removesuffix('.gguf')}.gguf") as file:
        part = Path(file.name)
        if clone(step.source, file):
            how = "shares its blocks"
        elif _is_for_all(step.source) and _link_over(step.source, part):
            how = "linked"
        else:
            how = "copied"
            _check_room(step, models_dir, left)
        found = copy(step.source, file, on_bytes) if how == "copied" else digest_file(part, hashlib.sha256(), on_bytes)
        if step.sha256 and found != step.sha256:
            message = f"file has another hash: {printable(str(step.source))}: sha256 {found}, expected {step.sha256}"
            raise DownloadError(message, hint="it is damaged or another file: fetch it again")
        part.replace(step.target)
    return found, how


def _is_for_all(source: Path) -> bool:
    """True if another user of group 0 can read the file: a hard link keeps its owner and mode."""
    found = source.stat()
    return bool(found.st_mode & stat.S_IROTH) or (bool(found.st_mode & stat.S_IRGRP) and found.st_gid == 0)


def _link_over(source: Path, part: Path) -> bool:
    name = part.with_name(f"{part.name}.link")
    try:
        os.link(os.path.realpath(source), name)  # for a link into blobs, the blob itself
    except OSError:
        return False  # another disk or mount, or not allowed: it is copied instead
    name.replace(part)
    return True


def _check_room(step: _Step, models_dir: Path, left: int) -> None:
    free = shutil.disk_usage(models_dir).free
    if free >= left + _SPARE_BYTES:
        return
    needs = f"{printable(step.name)} needs {as_size(left)}, {as_size(free)} free"
    message = f"volume has too little free space: {needs}: {models_dir}"
    raise VolumeError(message, hint="`appliance models list` shows what uses it, `appliance models rm NAME` frees it")


def _link(link: Path, target: Path, *, is_main: bool) -> None:
    """Link a snapshot like the hub's client, with its ref: without one it is not found offline."""
    link.parent.mkdir(parents=True, exist_ok=True)
    link.symlink_to(os.path.relpath(target, link.parent))
    repo = target.parents[1]
    commit = link.relative_to(repo / "snapshots").parts[0]
    ref = repo / "refs/main"
    if is_main or not ref.exists():
        ref.parent.mkdir(exist_ok=True)
        ref.write_text(commit)
