"""`models pull` and `models update`: download models by hand, without serving."""

from __future__ import annotations

import asyncio
import hashlib
import signal
import sys
from collections.abc import Callable, Coroutine, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from appliance.errors import ConfigError, FatalError, ModelUnreadableError
from appliance.image_facts import folders_by_hand, is_projector
from appliance.reference import Reference, parse_reference
from appliance.settings import HubSettings
from appliance.values import dataclass
from appliance.weights.cache.download_set import Wanted, folder_of_repo
from appliance.weights.cache.hub_layout import RepoFolder, find, read_ref
from appliance.weights.cache.size import as_size
from appliance.weights.download.disk_space import size_of
from appliance.weights.download.fetch import fetch, offline_error
from appliance.weights.download.hub import list_repo, only, resolve
from appliance.weights.download.meter import FetchProgress
from appliance.weights.show import Counted, progress_shown
from appliance.weights.stores.stores import Format, is_artifact, lookup, repo_of
from appliance.weights.stores.transfer import digest_file

T = TypeVar("T")
_PREFIX = "models--"


@dataclass(frozen=True, kw_only=True)
class Pulled:
    """Result for one model.

    `state` is a key of `_STATES`: "newer" only in a dry run; "gone" if the repository no longer has the files;
    "pinned" if no branch or tag leads to this revision, so that it has no newer one; "of the recipe" if the recipe
    fixes its exact files.
    """

    name: str
    state: str
    revision: str
    files: tuple[Path, ...]
    bytes: int
    exit_code: int = 0

    def document(self) -> dict[str, Any]:
        files = [str(path) for path in self.files]
        return {
            "name": self.name,
            "state": self.state,
            "revision": self.revision,
            "files": files,
            "bytes": self.bytes,
        }

    def describe(self) -> str:
        if not self.files:
            return f"{self.name}: {_STATES[self.state]}"
        revision = f", revision {self.revision[:8]}" if self.revision else ""
        facts = f"{as_size(self.bytes)}{revision}"
        return f"{self.name}: {_STATES[self.state]}, {facts}\n  {self.files[0]}"


_STATES = {
    "fetched": "fetched and checked",
    "present": "is there already",
    "newer": "a newer revision is available",
    "failed": "update check failed",
    "gone": "kept: its repository no longer has it",
    "of the recipe": "kept: this image's recipe fixes its exact files; a newer image may have newer ones",
    "pinned": "kept: pinned to this revision; no branch or tag leads to it",
}


@dataclass(frozen=True, kw_only=True)
class Place:
    """Target folder and settings. `is_folder` is True if this image serves safetensors folders."""

    models_dir: Path
    hub: HubSettings
    is_folder: bool = False

    @property
    def roots(self) -> tuple[Path, ...]:
        return (self.models_dir, *self.hub.read_only_roots)


_OnProgress = Callable[[FetchProgress], None]
_Say = Callable[[str], None]


def pull(text: str, place: Place, sha256: str | None = None, *, wanted: Wanted | None = None) -> Pulled:
    """Fetch the files that `text` means now. Blocks; SIGTERM and Ctrl-C keep what was fetched.

    `wanted` is given if a recipe fixes the files, so that the hub is not asked. Files put there by hand with the
    right hash are not fetched.
    """
    own, is_sound = _by_hand(wanted, place.models_dir) if wanted else ((), False)
    if wanted and is_sound:
        return _pulled(wanted, "present", own)
    with progress_shown() as (on_progress, say):
        if own:
            say(f"a file of that name and size, put there by hand, has another hash and is served: {own[0]}")
        return _run(_pull(text, place, sha256, wanted, on_progress, say), say)


def _by_hand(wanted: Wanted, models_dir: Path) -> tuple[tuple[Path, ...], bool]:
    """Return the paths of a recipe variant's files that were put there by hand, and True if their hashes are right.

    No paths if no such files have the right sizes. A start serves them whatever their hash is.
    """
    files = [file for file in wanted.files if not is_projector(file.path)]
    sizes = [file.bytes for file in files]
    there = [tuple(top / file.path for file in files) for top in folders_by_hand(models_dir, wanted.repo)]
    paths = next((each for each in there if [size_of(path) for path in each] == sizes), ())
    if not paths or not all(path.suffix == ".gguf" for path in paths):
        return (), False
    meter = Counted("checking existing files", wanted.bytes or 0)
    found = [digest_file(path, hashlib.sha256(), meter) for path in paths]
    meter.end()
    return paths, found == [file.sha256 for file in files]


async def _pull(
    text: str, place: Place, sha256: str | None, wanted: Wanted | None, on_progress: _OnProgress, say: _Say
) -> Pulled:
    if wanted is None:
        if place.hub.offline:
            return _offline(text, place)
        wanted = await resolve(text, place.hub, is_folder=place.is_folder, sha256=sha256, on_wait=say)
    state = "present" if find(wanted, place.roots) else "fetched"
    say(f"{text}: {', '.join(file.path for file in wanted.files[:4])}{' …' if len(wanted.files) > 4 else ''}")
    return _pulled(wanted, state, await fetch(wanted, place.models_dir, place.hub, on_progress, say))


def _offline(text: str, place: Place) -> Pulled:
    serves: Format = "safetensors" if place.is_folder else "gguf"
    found = lookup(parse_reference(text, place.hub.endpoint), place.roots, serves)
    if not found:
        raise offline_error(text)
    size = sum(path.stat().st_size for path in found)
    return Pulled(name=text, state="present", revision=_revision_of(found[0]), files=found, bytes=size)


def _revision_of(path: Path) -> str:
    parts = path.parts
    return parts[parts.index("snapshots") + 1]


def _pulled(wanted: Wanted, state: str, paths: tuple[Path, ...]) -> Pulled:
    size = sum(path.stat().st_size for path in paths)
    return Pulled(name=wanted.name, state=state, revision=wanted.revision, files=paths, bytes=size)


def update(text: str | None, place: Place, *, is_dry: bool) -> tuple[Pulled, ...]:
    """Ask the hub for newer files of one repository or of all on the volume, and fetch them.

    Older files stay until they are removed. With `is_dry`, newer files are only listed.
    """
    if place.hub.offline:
        raise offline_error(text or "all models")
    folders, references = _to_update(text, place)
    with progress_shown() as (on_progress, say):
        pinned = [each for folder in folders for each in _pinned(folder)]
        return (*_run(_update(references, place, is_dry, on_progress, say), say), *pinned)


def kept_by_recipe(text: str, models: Sequence[tuple[str, Path]]) -> tuple[Pulled, ...]:
    """Report the recipe's models on the volume, by name; a newer image may have newer ones. Raises ConfigError if
    there are none."""
    if not models:
        message = f"no model of that name is on the volume: {text}"
        raise ConfigError(message, hint=f"`appliance models pull {text}` fetches it")
    return tuple(
        Pulled(name=name, state="of the recipe", revision="", files=(path,), bytes=size_of(path))
        for name, path in models
    )


def _to_update(text: str | None, place: Place) -> tuple[list[RepoFolder], list[Reference]]:
    """Return the repositories that are meant, and those of their references that follow a branch or a tag."""
    if text is None:
        folders = _repos(place.models_dir)
        return folders, [reference for folder in folders for reference in _references(folder)]
    reference = parse_reference(text, place.hub.endpoint)
    if reference.url:
        message = f"a plain URL has no newer revision: {text}"
        raise ConfigError(message, hint="`appliance models pull` fetches it again if it changed")
    folder = _folder_of(reference, place)
    found = _references(folder)
    if not found and not any(_pinned(folder)):
        message = f"no such repository on the volume: {repo_of(folder.path)}"
        raise ConfigError(message, hint=f"`appliance models pull {text}` fetches it")
    return [folder], [each for each in found if reference.revision in (None, each.revision)]


def _folder_of(reference: Reference, place: Place) -> RepoFolder:
    artifact = reference.artifact
    name = f"{_PREFIX}{artifact.folder}" if artifact else folder_of_repo(reference.repo or "")
    return RepoFolder(root=place.models_dir, name=name)


def _repos(models_dir: Path) -> list[RepoFolder]:
    found = sorted(path.name for path in models_dir.glob(f"{_PREFIX}*--*") if path.is_dir())
    return [RepoFolder(root=models_dir, name=name) for name in found if not name.startswith(f"{_PREFIX}url--")]


def _references(folder: RepoFolder) -> list[Reference]:
    """Return one reference for each branch or tag that was requested."""
    repo = repo_of(folder.path)
    if is_artifact(repo):
        reference = parse_reference(repo)
        is_tag = reference.artifact is not None and reference.artifact.tag is not None
        return [reference] if is_tag and read_ref(folder, "main") else []
    refs = folder.path / "refs"
    names = sorted(path.relative_to(refs).as_posix() for path in refs.rglob("*") if path.is_file())
    known = [name for name in names if not name.endswith(".tmp")]
    return [Reference(text=f"{repo}@{name}" if name != "main" else repo, repo=repo, revision=name) for name in known]


def _pinned(folder: RepoFolder) -> Iterator[Pulled]:
    """Yield the snapshots of a repository that was only requested by commit, as recipes do.

    If it has a branch, its other snapshots are just older ones.
    """
    if _references(folder):
        return
    repo = repo_of(folder.path)
    for snapshot in sorted(path for path in (folder.path / "snapshots").glob("*") if path.is_dir()):
        files = tuple(sorted(path for path in snapshot.rglob("*") if path.is_file()))
        size = sum(map(size_of, files))
        yield Pulled(name=repo, state="pinned", revision=snapshot.name, files=files, bytes=size)


async def _update(
    references: list[Reference], place: Place, is_dry: bool, on_progress: _OnProgress, say: _Say
) -> tuple[Pulled, ...]:
    """Update each reference. An error is reported and the rest continues; with a single reference it is raised."""
    found = []
    for each in references:
        try:
            found.append(await _update_one(each, place, is_dry, on_progress, say))
        except FatalError as error:
            if len(references) == 1:
                raise
            say(f"{each.text}: {error.message}")
            found.append(_failed(each, error))
    return tuple(found)


def _failed(reference: Reference, error: FatalError) -> Pulled:
    return Pulled(name=reference.text, state="failed", revision="", files=(), bytes=0, exit_code=error.exit_code)


async def _update_one(reference: Reference, place: Place, is_dry: bool, on_progress: _OnProgress, say: _Say) -> Pulled:
    folder = _folder_of(reference, place)
    commit = read_ref(folder, reference.revision or "main")
    if commit is None:
        message = f"cache has no valid revision: {folder.ref(reference.revision or 'main')}"
        raise ModelUnreadableError(message, hint=f"the file is damaged: `appliance models pull {reference.text}`")
    snapshot = folder.snapshot(commit)
    here = tuple(sorted(path for path in snapshot.rglob("*") if path.is_file()))
    names = [path.relative_to(snapshot).as_posix() for path in here]
    if reference.artifact:
        everything = await resolve(reference.text, place.hub, is_folder=place.is_folder, on_wait=say)
        names = [file.path for file in everything.files]  # another manifest may name them otherwise
    else:
        everything = await list_repo(reference, place.hub, say)
    offered = {file.path for file in everything.files}
    size = sum(path.stat().st_size for path in here)
    kept = Pulled(name=reference.text, state="present", revision=commit, files=here, bytes=size)
    if everything.revision == commit or not here:
        return kept
    if not offered.issuperset(names):
        return replace(kept, state="gone")
    wanted = only(everything, names)
    if find(wanted, (place.models_dir,)):
        return kept  # another commit with the same bytes
    if is_dry:
        return replace(kept, state="newer")
    return _pulled(wanted, "fetched", await fetch(wanted, place.models_dir, place.hub, on_progress, say))


def _run(main: Coroutine[Any, Any, T], say: _Say) -> T:
    """Run until done. Raises SystemExit 143 after SIGTERM, with which Docker stops a container."""
    stopped = False

    async def until_stopped() -> T:
        task = asyncio.ensure_future(main)

        def stop() -> None:
            nonlocal stopped
            stopped = True
            task.cancel()

        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop)
        try:
            return await task
        except asyncio.CancelledError:
            say("stopped; what was fetched is kept, and the same command resumes it")
            raise

    try:
        return asyncio.run(until_stopped())
    except asyncio.CancelledError:
        if not stopped:
            raise
        sys.exit(128 + signal.SIGTERM)
