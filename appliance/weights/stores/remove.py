"""Remove models from the volume: plain files, parts and folders; in a hub cache, links and the blobs that no other
link needs."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from appliance.errors import ConfigError, VolumeError, printable
from appliance.image_facts import is_projector
from appliance.settings import Settings
from appliance.values import dataclass
from appliance.volume import is_held, refusal
from appliance.weights.stores.stores import (
    QuantizedFile,
    StoredModel,
    ambiguous,
    cache_folder,
    digests_of,
    find_stored,
    folder_of,
    is_in_cache,
    is_last_model,
    lies_below,
    list_quantized,
    list_store,
    note_of,
    other_stores,
    read_ref,
    volume_store,
)


@dataclass(frozen=True, kw_only=True)
class Removed:
    name: str
    files: tuple[Path, ...]
    freed_bytes: int  # 0 for a file with another hard link elsewhere
    models: frozenset[str] = frozenset()  # digests of the models among the files, 16 hexadecimal digits each


def remove(name: str, settings: Settings, of_recipe: Callable[[], Sequence[StoredModel]] = tuple) -> Removed:
    """Remove a model. `of_recipe` returns the recipe's models for this name; it is used if no model has it.

    Raises ConfigError if the model is missing, ambiguous, served or in another tool's folder. Raises VolumeError for
    disk errors.
    """
    models_dir = settings.models_dir
    folder = models_dir / cache_folder(name)
    try:
        if "\0" not in name and len(name) < 256 and folder.is_dir():
            return _remove_repo(name, folder)
        if (file := _own_file(name, models_dir)) is not None:
            return _unlink(name, [file], models_dir)
        if (made := _quantized_of(name, models_dir)) is not None:
            return _remove_quantized(made)
        model = _only_one(name, settings, of_recipe)
        if is_in_cache(model):
            return _remove_cached(model, models_dir)
        return _unlink(model.name, _own_files(model), models_dir)
    except OSError as error:
        raise refusal(models_dir, error) from error


def _quantized_of(name: str, models_dir: Path) -> QuantizedFile | None:
    """Return the file that the appliance quantized, by its name, stem or path; None if a model has that name.

    Raises ConfigError if several have it.
    """
    found = [file for file in list_quantized(models_dir) if name in (file.path.name, file.path.stem, str(file.path))]
    if not found or find_stored(name, [volume_store(models_dir)]):
        return None
    if len(found) > 1:
        raise ambiguous(name, [str(file.path) for file in found], "quantized files", "give the path")
    return found[0]


def _remove_quantized(file: QuantizedFile) -> Removed:
    """Remove one file and its note; the origin stays."""
    folder = file.path.parent
    _refuse_served(file.path.name, [file.path, *folder.glob(".lock")])
    freed, models = _freed(file.path), digests_of([file.path])
    file.path.unlink(missing_ok=True)
    note_of(file.path).unlink(missing_ok=True)
    if not any(folder.glob("[!.]*")):
        shutil.rmtree(folder)
    return Removed(name=file.path.name, files=(file.path,), freed_bytes=freed, models=models)


def _made_of(name: str, origins: Iterable[str], models_dir: Path) -> list[Path]:
    """Return the files that were quantized from these models, by digest. Raises ConfigError if one is served."""
    folders = [folder_of(models_dir, digest) for digest in origins]
    files = [path for folder in folders if folder.is_dir() for path in sorted(folder.iterdir())]
    _refuse_served(name, files)
    return files


def _with_made(removed: Removed, made: Sequence[Path]) -> Removed:
    """Remove the quantized files of a model that was removed."""
    freed, models = sum(map(_freed, made)), digests_of(path for path in made if not path.name.startswith("."))
    for folder in {path.parent for path in made}:
        shutil.rmtree(folder)
    gguf = tuple(path for path in made if path.suffix == ".gguf")
    return replace(
        removed,
        files=(*removed.files, *gguf),
        freed_bytes=removed.freed_bytes + freed,
        models=removed.models | models,
    )


def _own_file(name: str, models_dir: Path) -> Path | None:
    """Return a file with exactly this name that is no listed model: a later part, a projector, an unreadable file.

    For the first part of a split model all parts are removed, so it is not returned here.
    """
    if Path(name).name != name or not name.endswith((".gguf", ".gguf.damaged")):
        return None
    if not os.path.lexists(models_dir / name):
        return None
    listed = [model.path.name for model in list_store(volume_store(models_dir)).models]
    return None if name in listed else models_dir / name


def _only_one(name: str, settings: Settings, of_recipe: Callable[[], Sequence[StoredModel]]) -> StoredModel:
    found = find_stored(name, [volume_store(settings.models_dir)])
    elsewhere: Sequence[StoredModel] = ()
    if not found:
        elsewhere = of_recipe()
        found = tuple(model for model in elsewhere if model.store.tool == "volume")
    if len(found) == 1:
        return found[0]
    if found:
        raise ambiguous(name, [model.name for model in found], "models on the volume")
    elsewhere = elsewhere or find_stored(name, other_stores(settings))
    if elsewhere:
        message = f"model is in {elsewhere[0].where}, which is read-only for the appliance: {printable(name)}"
        raise ConfigError(message, hint="remove it with the tool that put it there")
    message = f"no such model on the volume: {printable(name)}"
    raise ConfigError(message, hint="`appliance models list` lists the models")


def _own_files(model: StoredModel) -> list[Path]:
    """List the model's own files. GGUF files in a safetensors folder are other models and are left out."""
    if model.path.is_symlink():
        return [model.path]
    return [path for path in model.files if model.format == "gguf" or path.suffix != ".gguf"]


def _unlink(name: str, files: Sequence[Path], models_dir: Path) -> Removed:
    _refuse_served(name, files)
    _refuse_behind_link(name, files, models_dir)
    freed, models = sum(map(_freed, files)), digests_of(files)
    made = _made_of(name, models, models_dir)
    for path in files:
        path.unlink()
    for folder in {path.parent for path in files}:
        _drop_empty(folder, models_dir)
    return _with_made(Removed(name=name, files=tuple(files), freed_bytes=freed, models=models), made)


def _remove_cached(model: StoredModel, models_dir: Path) -> Removed:
    """Remove its links in every snapshot, then the blobs without links. With the last model, projectors are removed
    too."""
    folder = _repo_folder(model, models_dir)
    names = {path.relative_to(_snapshot_of(path, folder)) for path in model.files}
    names |= {Path(model.file)} if model.file else set()  # a link whose blob is missing
    snapshots = [path for path in (folder / "snapshots").iterdir() if path.is_dir()]
    links = [snapshot / name for snapshot in snapshots for name in names if os.path.lexists(snapshot / name)]
    if is_last_model(model):
        links += [
            path for snapshot in snapshots for path in sorted(snapshot.rglob("*.gguf")) if is_projector(path.name)
        ]
    blobs = {blob for link in links if (blob := blob_of(link))}
    _refuse_served(model.name, [*blobs, *links])
    _refuse_behind_link(model.name, [*blobs, *links], models_dir)
    models = digests_of(links)
    made = _made_of(model.name, models, models_dir)
    for link in links:
        link.unlink()
        _drop_empty(link.parent, folder / "snapshots")
    unused = sorted(blobs - used_blobs(folder))
    freed = sum(map(_freed, unused))
    for blob in unused:
        blob.unlink(missing_ok=True)
    _drop_refs(folder)
    if not any((folder / "snapshots").iterdir()) and not _has_partial(folder) and not _is_fetched(folder):
        shutil.rmtree(folder)
    return _with_made(Removed(name=model.name, files=(*links, *unused), freed_bytes=freed, models=models), made)


def _remove_repo(name: str, folder: Path) -> Removed:
    """Remove everything of a repository, unfinished downloads included."""
    if _is_fetched(folder):
        message = f"model is being fetched: {printable(name)}"
        raise VolumeError(message, hint="stop the download first; what was fetched is kept")
    files = [path for path in folder.rglob("*") if path.is_file() or path.is_symlink()]
    _refuse_served(name, files)
    _refuse_behind_link(name, [folder / "blobs", *files], folder.parent)
    freed, models = sum(map(_freed, files)), digests_of(files)
    made = _made_of(name, models, folder.parent)
    shutil.rmtree(folder)
    return _with_made(Removed(name=name, files=tuple(files), freed_bytes=freed, models=models), made)


def _refuse_behind_link(name: str, files: Sequence[Path], models_dir: Path) -> None:
    """Refuse files that are reached through a link: they belong to somebody else."""
    if outside := [path for path in files if not lies_below(path, models_dir)]:
        message = f"model is behind a link on the volume: {printable(name)}"
        raise ConfigError(message, hint=f"remove the link, or the file itself: {printable(str(outside[0]))}")


def _is_fetched(folder: Path) -> bool:
    """True while our client or the hub's own downloads: both lock the blob that they fetch."""
    return any(map(is_held, (folder.parent / ".locks" / folder.name).glob("*.lock")))


def _refuse_served(name: str, files: Iterable[Path]) -> None:
    if any(map(is_held, files)):
        message = f"model is being served, or written: {printable(name)}"
        raise ConfigError(message, hint="stop the container that serves it, or let it serve another, then remove this")


def blob_of(link: Path) -> Path | None:
    """Return the first target of a snapshot's link. A blob may itself link into a store shared by repositories."""
    if not link.is_symlink():
        return None
    return Path(os.path.normpath(link.parent / link.readlink()))


def used_blobs(folder: Path) -> set[Path]:
    """Blobs of a repository that a snapshot links to."""
    return {blob for link in (folder / "snapshots").rglob("*") if (blob := blob_of(link))}


def _repo_folder(model: StoredModel, models_dir: Path) -> Path:
    return models_dir / model.path.relative_to(models_dir).parts[0]


def _snapshot_of(path: Path, folder: Path) -> Path:
    return folder / "snapshots" / path.relative_to(folder / "snapshots").parts[0]


def _drop_refs(folder: Path) -> None:
    """Remove refs of snapshots that are gone: the hub's client treats a ref without a snapshot as damage."""
    known = {path.name for path in (folder / "snapshots").iterdir()}
    refs = folder / "refs"
    for ref in refs.rglob("*"):
        if ref.is_file() and read_ref(folder, ref.relative_to(refs).as_posix()) not in known:
            ref.unlink()


def _has_partial(folder: Path) -> bool:
    return any((folder / "blobs").glob("*.incomplete"))


def _drop_empty(folder: Path, top: Path) -> None:
    with suppress(OSError):  # not empty
        while folder != top and folder.is_relative_to(top):
            folder.rmdir()
            folder = folder.parent


def _freed(path: Path) -> int:
    try:
        found = path.lstat()
    except OSError:
        return 0
    return found.st_size if found.st_nlink == 1 and not path.is_symlink() else 0
