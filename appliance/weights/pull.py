"""`models pull` and `models update`: fetching by hand, where nothing is served."""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import Callable, Coroutine
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from appliance.errors import ConfigError, FatalError
from appliance.reference import Reference, parse_reference
from appliance.settings import HubSettings
from appliance.values import dataclass
from appliance.weights.cache import RepoFolder, find, lookup, read_ref
from appliance.weights.fetch import fetch, offline_error
from appliance.weights.hub import list_repo, only, resolve
from appliance.weights.meter import FetchProgress, as_size
from appliance.weights.show import shown
from appliance.weights.wanted import Wanted, folder_of_repo

T = TypeVar("T")
_PREFIX = "models--"


@dataclass(frozen=True, kw_only=True)
class Pulled:
    """`state`: fetched, present, newer (with a dry run), failed, or gone: its repository has it no more."""

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
        facts = f"{as_size(self.bytes)}, revision {self.revision[:8]}"
        return f"{self.name}: {_STATES[self.state]}, {facts}\n  {self.files[0]}"


_STATES = {
    "fetched": "fetched and checked",
    "present": "is there already",
    "newer": "a newer one is there",
    "failed": "cannot be asked for",
    "gone": "kept: its repository offers it no more",
}


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where to and with which settings. `is_folder`: this image serves folders of safetensors."""

    models_dir: Path
    hub: HubSettings
    is_folder: bool = False

    @property
    def roots(self) -> tuple[Path, ...]:
        return (self.models_dir, *self.hub.read_only_roots)


_OnProgress = Callable[[FetchProgress], None]
_Say = Callable[[str], None]


def pull(text: str, place: Place, sha256: str | None = None, *, wanted: Wanted | None = None) -> Pulled:
    """What `text` means now, on the volume. Blocks; SIGTERM and Ctrl-C keep what was fetched.

    `wanted`: where a recipe says what it means, and nobody need be asked.
    """
    with shown() as (on_progress, say):
        return _run(_pull(text, place, sha256, wanted, on_progress, say), say)


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
    found = lookup(parse_reference(text, place.hub.endpoint), place.roots, is_folder=place.is_folder)
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
    """Asks the hub for newer files of what is on the volume, of one repository or of all, and fetches them.

    The older ones stay until they are removed. `is_dry`: only says which are newer.
    """
    references = _to_update(text, place)
    with shown() as (on_progress, say):
        return _run(_update(references, place, is_dry, on_progress, say), say)


def _to_update(text: str | None, place: Place) -> list[Reference]:
    if place.hub.offline:
        raise offline_error(text or "all models")
    if text is None:
        return [reference for folder in _repos(place.models_dir) for reference in _references(folder)]
    reference = parse_reference(text, place.hub.endpoint)
    if reference.repo is None:
        message = f"a plain URL has no newer revision: {text}"
        raise ConfigError(message, hint="`appliance models pull` fetches it anew where it changed")
    found = _references(RepoFolder(root=place.models_dir, name=folder_of_repo(reference.repo)))
    if not found:
        message = f"no such repository on the volume: {reference.repo}"
        raise ConfigError(message, hint=f"`appliance models pull {text}` fetches it")
    return [each for each in found if reference.revision in (None, each.revision)]


def _repos(models_dir: Path) -> list[RepoFolder]:
    found = sorted(path.name for path in models_dir.glob(f"{_PREFIX}*--*") if path.is_dir())
    return [RepoFolder(root=models_dir, name=name) for name in found if not name.startswith(f"{_PREFIX}url--")]


def _references(folder: RepoFolder) -> list[Reference]:
    """One for each branch or tag that was asked for."""
    repo = folder.name.removeprefix(_PREFIX).replace("--", "/", 1)
    refs = folder.path / "refs"
    names = sorted(path.relative_to(refs).as_posix() for path in refs.rglob("*") if path.is_file())
    known = [name for name in names if not name.endswith(".tmp")]
    return [Reference(text=f"{repo}@{name}" if name != "main" else repo, repo=repo, revision=name) for name in known]


async def _update(
    references: list[Reference], place: Place, is_dry: bool, on_progress: _OnProgress, say: _Say
) -> tuple[Pulled, ...]:
    """One that fails is said, and the others are asked for all the same; alone it is the error of the whole."""
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
    folder = RepoFolder(root=place.models_dir, name=folder_of_repo(reference.repo or ""))
    commit = read_ref(folder, reference.revision or "main") or ""
    snapshot = folder.snapshot(commit)
    here = tuple(sorted(path for path in snapshot.rglob("*") if path.is_file()))
    names = [path.relative_to(snapshot).as_posix() for path in here]
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
        return kept  # another commit, of the same bytes
    if is_dry:
        return replace(kept, state="newer")
    return _pulled(wanted, "fetched", await fetch(wanted, place.models_dir, place.hub, on_progress, say))


def _run(main: Coroutine[Any, Any, T], say: _Say) -> T:
    """SystemExit 143 after a SIGTERM, which is how Docker stops a container."""
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
            say("stopped; what was fetched is kept, and the same command goes on with it")
            raise

    try:
        return asyncio.run(until_stopped())
    except asyncio.CancelledError:
        if not stopped:
            raise
        sys.exit(128 + signal.SIGTERM)
