"""Fetch every missing file of a set into the cache, one after the other, each into one partial file.

One connection per file: a partial file is then always the beginning of the file, so every later run can resume it.
One connection is enough for the usual networks; `benchmarks/fetch.py` prints the rate.
"""

from __future__ import annotations

import asyncio
import errno
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

import aiohttp

from appliance.errors import DownloadError, FatalError, VolumeError
from appliance.settings import HubSettings
from appliance.volume import refusal
from appliance.weights.cache.download_set import Wanted, WantedFile
from appliance.weights.cache.hub_layout import RepoFolder, find, is_whole, keep_ref, link_snapshot
from appliance.weights.cache.size import as_size
from appliance.weights.download.disk_space import check_room, drop_orphans, size_of
from appliance.weights.download.locks import locked
from appliance.weights.download.meter import FetchProgress, Meter
from appliance.weights.download.partial import Partial
from appliance.weights.download.ranges import Answer, RangeRefused, open_range, open_session
from appliance.weights.download.retry import Patience, Transient, patiently

T = TypeVar("T")
_FULL = (errno.ENOSPC, errno.EDQUOT)


def ignore(_words: str) -> None:
    """Ignore the note, for callers without a log."""


async def fetch(
    wanted: Wanted,
    models_dir: Path,
    hub: HubSettings,
    on_progress: Callable[[FetchProgress], None],
    on_note: Callable[[str], None] = ignore,
) -> tuple[Path, ...]:
    """Return the paths of all files, in order; missing ones are fetched into `models_dir`.

    Cancellation takes at most a second, and a later call resumes from the disk. Raises DownloadError, and
    VolumeError if the disk is full or not writable. `on_note` receives lines for the log.
    """
    found = find(wanted, (models_dir, *hub.read_only_roots), lambda path, error: on_note(_unreadable(path, error)))
    if found:
        with suppress(OSError):  # a read-only volume can serve its models
            keep_ref(wanted, RepoFolder(root=models_dir, name=wanted.folder))
        return found
    try:
        return await _fetch(wanted, RepoFolder(root=models_dir, name=wanted.folder), hub, on_progress, on_note)
    except OSError as error:
        raise refusal(models_dir, error) from error


def _unreadable(path: Path, error: OSError) -> str:
    return f"file skipped, it cannot be read: {path}: {(error.strerror or str(error)).lower()}"


async def _fetch(
    wanted: Wanted,
    folder: RepoFolder,
    hub: HubSettings,
    on_progress: Callable[[FetchProgress], None],
    on_note: Callable[[str], None],
) -> tuple[Path, ...]:
    _refuse_links(folder, wanted)
    folder.make()
    if freed := drop_orphans(folder, wanted.files):
        on_note(f"removed partial files of downloads that ended: {as_size(freed)}")
    missing = [file for file in wanted.files if not is_whole(folder.blob(file.key), file)]
    if missing and hub.offline:
        raise offline_error(wanted.name, missing)
    check_room(wanted.files, folder, wanted.name)
    meter = Meter(wanted.bytes, on_progress)
    async with open_session() as session:
        with ThreadPoolExecutor(1, "fetch") as pool:
            download = _Download(session, folder, hub, meter, pool, on_note)
            blobs = [await download.blob(file) for file in wanted.files]
    return link_snapshot(wanted, folder, blobs)


def _refuse_links(folder: RepoFolder, wanted: Wanted) -> None:
    """Refuse cache folders that are links: they lead to somebody else's files, and nothing is written through them."""
    for path in (folder.path, folder.blobs, folder.path / "snapshots", folder.snapshot(wanted.revision)):
        if path.is_symlink():
            message = f"cache folder is a link, which is never written through: {path}"
            raise VolumeError(message, hint="remove the link, or mount its target and name it with --model-dirs")


def offline_error(name: str, missing: list[WantedFile] | None = None) -> DownloadError:
    words = f": missing: {', '.join(file.path for file in missing[:8])}" if missing else ""
    message = f"model is not on the volume, and offline mode is on: {name}{words}"
    return DownloadError(message, hint="`appliance models pull` fetches it with --offline off, if there is a network")


class _Download:
    """Shared state of the downloads of one set."""

    def __init__(
        self,
        session: aiohttp.ClientSession,
        folder: RepoFolder,
        hub: HubSettings,
        meter: Meter,
        pool: ThreadPoolExecutor,
        on_note: Callable[[str], None],
    ) -> None:
        self._session = session
        self._folder = folder
        self._hub = hub
        self._meter = meter
        self._pool = pool
        self._on_note = on_note

    async def blob(self, file: WantedFile) -> Path:
        """Return the blob of a file, fetched and checked if necessary."""
        blob, partial = self._folder.blob(file.key), self._folder.partial(file.key)
        self._meter.begin(file.path, size_of(partial))
        if not is_whole(blob, file):
            words, lock = f"another download of {file.path}", self._folder.lock(file.key)
            async with locked(lock, lambda: self._meter.waits(words, size_of(partial) or size_of(blob))):
                if not is_whole(blob, file):
                    blob = await self._download(file, partial)
        self._meter.done(blob.stat().st_size)
        return blob

    async def _download(self, file: WantedFile, path: Path) -> Path:
        partial = await self._step(lambda: Partial(path, file))
        try:
            await self._fill(partial, file)
            blob = self._folder.blob(_blob_name(file, partial.digest()))
            await self._step(lambda: partial.move_to(blob))
        except OSError as error:
            if error.errno in _FULL:
                raise await self._make_room(partial, file) from error
            raise
        finally:
            await self._step(partial.close)
        return blob

    async def _fill(self, partial: Partial, file: WantedFile) -> None:
        """Fetch until the hash is right. If an earlier run's partial file turns out to be damaged, fetch it again
        once."""
        if file.bytes is not None and partial.size > file.bytes:
            await self._step(partial.restart)
        await self._fill_once(partial, file)
        expected = file.sha256 or file.git_sha1
        if expected in (None, partial.digest()):
            return
        if partial.began:
            self._on_note(f"partial file of an earlier run is damaged, fetching it again: {file.path}")
            await self._step(partial.restart)
            await self._fill_once(partial, file)
        if partial.digest() != expected:
            await self._step(partial.remove)
            raise _damaged(file, str(expected), partial)

    async def _fill_once(self, partial: Partial, file: WantedFile) -> None:
        while partial.hashed < partial.size:
            self._meter.waits(f"the check of the partial file of {file.path}", partial.size)
            await self._step(partial.hash_step)
        patience = Patience(self._hub.patience_s)
        self._meter.begin(file.path, partial.size)
        is_whole = partial.size == file.bytes
        while not is_whole:
            is_whole = await patiently(
                lambda: self._receive(partial, file, patience),
                patience,
                file.path,
                lambda words: self._meter.waits(f"an answer: {words}"),
            )

    async def _receive(self, partial: Partial, file: WantedFile, patience: Patience) -> bool:
        """Receive the next piece; True if it was the last. Raises Transient; the bytes received so far are kept."""
        furthest = partial.size
        end = furthest + self._hub.piece_bytes
        is_last = file.bytes is None or end >= file.bytes
        try:
            async with open_range(self._session, file, partial.size, self._hub, end=None if is_last else end) as answer:
                await self._align(partial, answer)
                while chunk := await answer.content.readany():
                    if file.bytes is not None and partial.size + len(chunk) > file.bytes:
                        raise _too_long(file)
                    await self._write(partial, chunk)
                    if partial.size > furthest:  # repeated bytes are no progress
                        patience.progressed()
        except RangeRefused:
            await self._step(partial.restart)
            raise
        goal = end if not is_last and answer.begin == furthest else file.bytes or answer.total
        if goal is not None and partial.size < goal:
            message = f"the connection ended at byte {partial.size:,}"
            raise Transient(message)
        return file.bytes in (None, partial.size)

    async def _align(self, partial: Partial, answer: Answer) -> None:
        """Restart the partial file if the server does not support ranges and sends the file from the beginning."""
        if answer.begin not in (0, partial.size):
            message = f"the server sent another range than from byte {partial.size:,}"
            raise Transient(message)
        if answer.begin != partial.size:
            await self._step(partial.restart)
        if self._meter.total is None:
            self._meter.total = answer.total

    async def _write(self, partial: Partial, chunk: bytes) -> None:
        await self._step(lambda: partial.write(chunk))
        self._meter.received(partial.size, len(chunk))

    async def _make_room(self, partial: Partial, file: WantedFile) -> FatalError:
        """Handle a full disk: remove what this run wrote, to free space for others, and return the error."""
        written = partial.size - partial.began
        await self._step(partial.undo)
        message = (
            f"volume became full while fetching {file.path}: {self._folder.root}: "
            f"{as_size(written)} of this run were removed again"
        )
        kept = f"; {as_size(partial.began)} of an earlier run are kept" if partial.began else ""
        return VolumeError(message + kept, hint="free some space (`appliance models list`), then repeat the command")

    async def _step(self, call: Callable[[], T]) -> T:
        """Run a call on the one thread that touches the disk. A stop waits for the end of the short call: the file
        must not be closed during it."""
        future = asyncio.get_running_loop().run_in_executor(self._pool, call)
        try:
            return await asyncio.shield(future)
        except asyncio.CancelledError:
            await asyncio.wait([future])
            raise


def _blob_name(file: WantedFile, digest: str) -> str:
    """Return the blob's name. A plain URL's file without a known hash gets the name of its own hash."""
    return file.sha256 or file.git_sha1 or digest


def _too_long(file: WantedFile) -> DownloadError:
    message = f"file has another size than announced: {file.path}: expected {file.bytes:,} bytes, got more"
    return DownloadError(message, hint="it changed meanwhile, or a proxy on the way adds to it: repeat the command")


def _damaged(file: WantedFile, expected: str, partial: Partial) -> DownloadError:
    kind = "sha256" if file.sha256 else "git sha1"
    message = (
        f"file has another hash than announced: {file.path}: expected {kind} {expected}, "
        f"got {partial.digest()} of {partial.size:,} bytes"
    )
    return DownloadError(message, hint="the file was removed; repeat the command, and check any proxy or mirror")
