"""Models in the layout of huggingface_hub's cache: `models--org--name/snapshots/<commit>/file ->
../../blobs/<hash>`.

Source: huggingface_hub 2.4.0, utils/_cache_manager.py (scan), file_download.py (`.incomplete`, `.locks`),
utils/_shared_blobs.py (a blob may be a link to `blobs/<2 hex>/<hash>` of the whole cache).
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Collection, Iterator
from pathlib import Path

from appliance.errors import ConfigError
from appliance.image_facts import is_projector
from appliance.model.formats.entries import ENTRIES_LIMIT, unreadable
from appliance.model.formats.parts import PART, PARTS_LIMIT
from appliance.reference import artifact_of_folder, parse_reference
from appliance.system.disk import read_file
from appliance.values import dataclass

PREFIX = "models--"
INCOMPLETE = ".incomplete"
_DEPTH = 3  # folder levels in a repository; published ones have one level, named after the quantization
_REFERENCE_LIMIT = 512
_REF_BYTES = 256
_OF_URL = re.compile(r"url/[^/]+/[0-9a-f]{12}")  # models--url--<host>--<beginning of the URL's sha256>
_SHARD = re.compile(r"-(\d{5})-of-(\d{5})\.safetensors$")


@dataclass(frozen=True, kw_only=True)
class CachedModel:
    """A GGUF file, the first part of a split one, or a snapshot that is a safetensors folder (then `file` is empty)."""

    repo: str  # org/name, or the whole reference of a registry's artifact
    file: str  # inside the repository, with "/"
    path: Path
    problem: str | None = None  # why it cannot be used; None if it is complete

    @property
    def name(self) -> str:
        """Name to request it by; for a download from a URL only the file's name."""
        if _OF_URL.fullmatch(self.repo):
            return self.file
        if is_artifact(self.repo):
            return self.repo
        return f"{self.repo}/{self.file}" if self.file else self.repo


def is_repo(folder: Path) -> bool:
    return folder.name.startswith(PREFIX)


def repo_of(folder: Path) -> str:
    """`org/name` from models--org--name, as the hub's own scan reads it, or the reference of a registry's artifact."""
    name = folder.name.removeprefix(PREFIX)
    return artifact_of_folder(name) or name.replace("--", "/")


def cache_folder(repo: str) -> str:
    """Return the folder's name for what `repo_of` returns. Raises ConfigError for an impossible reference."""
    if is_artifact(repo) and (artifact := parse_reference(repo).artifact):
        return PREFIX + artifact.folder
    return PREFIX + repo.replace("/", "--")


def is_artifact(repo: str) -> bool:
    return repo.lower().startswith(("oci://", "docker://"))


def list_cached(folder: Path, revision: str = "", budget: Iterator[int] | None = None) -> tuple[CachedModel, ...]:
    """List the models of one repository's folder, sorted.

    If snapshots differ, that of refs/main counts, else the newest with a complete model. `revision` is a branch, a
    tag, or the beginning of a commit. `budget` limits the number of files and folders that are read. Raises
    ModelUnreadableError for a folder that cannot be read.
    """
    found: dict[str, CachedModel] = {}
    budget = budget or iter(range(ENTRIES_LIMIT))
    for snapshot in _snapshots(folder, revision, budget):
        for model in _of_snapshot(folder, snapshot, budget):
            if model.file not in found or (found[model.file].problem and not model.problem):
                found[model.file] = model
    return tuple(found[file] for file in sorted(found))


def find_cached(reference: str, cache: Path) -> tuple[CachedModel, ...]:
    """Find `org/name`, `org/name:QUANT`, `org/name@revision`, `org/name/file`, a URL or `oci://…` in this cache.

    Returns the complete models, or if there are none, the incomplete ones with their reason.
    """
    parsed = _parse(reference)
    if parsed is None:
        return ()
    repo, revision, quant, file = parsed
    models = [model for folder in _folders(cache, repo) for model in list_cached(folder, revision)]
    named = [model for model in models if is_meant(model.file, quant, file)]
    whole = tuple(model for model in named if not model.problem)
    return whole or tuple(named)


def _parse(reference: str) -> tuple[str, str, str, str] | None:
    """Parse folder name without the prefix, revision, quantization and file; None if it is not a reference."""
    if len(reference) > _REFERENCE_LIMIT or not reference.isprintable():
        return None
    if reference.startswith(("https://", "http://")):
        return f"url--*--{hashlib.sha256(reference.encode()).hexdigest()[:12]}", "", "", ""
    if is_artifact(reference):
        try:
            # Only what the tag led to last: an older manifest may name its files otherwise.
            return cache_folder(reference).removeprefix(PREFIX), "main", "", ""
        except ConfigError:
            return None  # whoever fetches says what is wrong with it
    parts = reference.split("/")
    if not all(parts) or any(part in (".", "..") for part in parts):
        return None
    count = min(len(parts), 2)
    name, _, quant = parts[count - 1].partition(":")
    name, _, revision = name.partition("@")
    return "--".join([*parts[: count - 1], name]), revision, quant, "/".join(parts[2:])


def _folders(cache: Path, repo: str) -> list[Path]:
    """Find a repository's folder. The hub's repository names are case-insensitive."""
    if "*" in repo:
        return list(cache.glob(PREFIX + repo))
    if artifact_of_folder(repo):  # tags differ by case
        return [folder] if (folder := cache / f"{PREFIX}{repo}").is_dir() else []
    wanted = (PREFIX + repo).casefold()
    return [folder for folder in cache.glob(f"{PREFIX}*") if folder.name.casefold() == wanted]


def is_meant(own: str, quant: str, file: str) -> bool:
    """True if a repository's file has this quantization and this name; an empty string matches any."""
    own, wanted = own.casefold(), file.casefold()
    if wanted and wanted not in (own, own.removesuffix(".gguf"), PART.sub("", own), PART.sub(".gguf", own)):
        return False
    return not quant or re.search(rf"(?:^|[-._/]){re.escape(quant.casefold())}(?:[-./]|$)", own) is not None


def _snapshots(folder: Path, revision: str, budget: Iterator[int]) -> list[Path]:
    """List the snapshots, refs/main first, then the newest."""
    snapshots = [path for path in _scan(folder / "snapshots", budget) if _is_folder(path)]
    if revision:
        commit = read_ref(folder, revision)
        snapshots = [path for path in snapshots if path.name == commit or path.name.startswith(revision)]
    main = read_ref(folder, "main")
    return sorted(snapshots, key=lambda path: (path.name != main, -_modified_ns(path), path.name))


def read_ref(folder: Path, name: str) -> str:
    """Return the commit that a branch or tag had when it was fetched; "" if unknown."""
    try:
        return read_file(folder / "refs" / name, _REF_BYTES).decode("ascii", "replace").strip()
    except (OSError, ValueError):
        return ""


def _of_snapshot(folder: Path, snapshot: Path, budget: Iterator[int]) -> Iterator[CachedModel]:
    names = {path.relative_to(snapshot).as_posix(): path for path in _files(snapshot, _DEPTH, budget)}
    repo, cache = repo_of(folder), os.path.realpath(folder.parent)
    if "config.json" in names and any(name.endswith(".safetensors") and "/" not in name for name in names):
        yield CachedModel(repo=repo, file="", path=snapshot, problem=_why_folder_unusable(names, cache))
    for name, path in names.items():
        part = PART.search(name)
        if not name.lower().endswith(".gguf") or is_projector(path.name):
            continue
        if not part:
            yield CachedModel(repo=repo, file=name, path=path, problem=why_unusable(path, cache))
        elif int(part[1]) == 1 or not _has_earlier(names, name, part):
            yield CachedModel(repo=repo, file=name, path=path, problem=_why_parts_unusable(names, name, part, cache))


def _has_earlier(names: dict[str, Path], name: str, part: re.Match[str]) -> bool:
    """True if an earlier part exists, which then represents the model."""
    stem, suffix = name[: part.start()], name[-len(".gguf") :]
    numbers = range(1, min(int(part[1]), PARTS_LIMIT))
    return any(f"{stem}-{number:05}-of-{part[2]}{suffix}" in names for number in numbers)


def _why_parts_unusable(names: dict[str, Path], name: str, part: re.Match[str], cache: str) -> str | None:
    count, stem, suffix = int(part[2]), name[: part.start()], name[-len(".gguf") :]
    if not 1 <= count <= PARTS_LIMIT:
        return f"its name has an impossible number of parts: {count}"
    for number in range(1, count + 1):
        other = f"{stem}-{number:05}-of-{part[2]}{suffix}"
        if other not in names:
            return f"part {number} of {count} is missing"
        if problem := why_unusable(names[other], cache):
            return f"part {number} of {count}: {problem}"
    return None


def _why_folder_unusable(names: dict[str, Path], cache: str) -> str | None:
    for name, path in names.items():
        if name.endswith((".safetensors", ".json")) and (problem := why_unusable(path, cache)):
            return f"{path.name}: {problem}"
    missing = missing_shard(names)
    return f"{missing} is missing" if missing else None


def missing_shard(names: Collection[str]) -> str:
    """Return the first shard that the other names announce but that is missing; "" if none is."""
    first = (found for name in names if (found := _SHARD.search(name)) and int(found[1]) == 1)
    missing = (_missing_beside(names, shard) for shard in first)
    return next(filter(None, missing), "")


def _missing_beside(names: Collection[str], shard: re.Match[str]) -> str:
    stem = shard.string[: shard.start()]
    numbers = range(1, min(int(shard[2]), PARTS_LIMIT) + 1)
    shards = (f"{stem}-{number:05}-of-{shard[2]}.safetensors" for number in numbers)
    return next((other for other in shards if other not in names), "")


def why_unusable(path: Path, root: str) -> str | None:
    """Return why a file or link cannot be used. None if it leads to a file below `root`, a real path.

    A path that may not be inspected counts as usable: opening it reports why.
    """
    try:
        target = os.path.realpath(path, strict=True)
    except PermissionError:
        return None
    except OSError:
        return "its blob is missing" if path.is_symlink() else "it is gone"
    if not Path(target).is_relative_to(root):
        return "it links out of its folder"
    if target.endswith(INCOMPLETE):
        return "its download is not finished"
    return None if os.path.isfile(target) else "it is not a file"  # noqa: PTH113 - the real path is a string


def _files(folder: Path, depth: int, budget: Iterator[int]) -> Iterator[Path]:
    for path in _scan(folder, budget):
        if _is_folder(path):
            if depth:
                yield from _files(path, depth - 1, budget)
        else:
            yield path


def _is_folder(path: Path) -> bool:
    return os.path.isdir(path)  # noqa: PTH112 - pathlib's raises for what may not be looked at


def _modified_ns(path: Path) -> int:
    try:
        return path.stat().st_mtime_ns
    except OSError:
        return 0  # the path was just removed


def _scan(folder: Path, budget: Iterator[int]) -> list[Path]:
    """List a folder without hidden entries, sorted; empty if it does not exist."""
    try:
        with os.scandir(folder) as entries:
            found = [Path(entry.path) for _, entry in zip(budget, entries, strict=False)]
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        raise unreadable(folder, error) from error
    return sorted(path for path in found if not path.name.startswith("."))
