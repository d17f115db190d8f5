"""Compile caches of the engine on the volume, one folder for each build: truncated files and old builds are removed.

vLLM writes `torch_compile_cache/KEY/rank_0_0/*/vllm_compile_cache.py` in place and reads it with `ast.literal_eval`
(compilation/backends.py 199 and 236). A truncated file makes every later start with the same key fail. So everything
that a start wrote is removed if the start did not become ready. If the appliance was killed too, the next start does
it.
"""

from __future__ import annotations

import fcntl
import logging
import math
import os
import secrets
import shutil
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path

LIMIT_BYTES = 20 * 2**30  # for all builds together
FOLDERS = ("vllm", "inductor", "triton", "flashinfer", "deep_gemm", "xdg")  # below a build's folder
_KEYS = Path("vllm/torch_compile_cache")
_WHOLE, _REMOVED = "torch_", "removed-"  # prefixes in that folder: whole programs; keys that are being removed
_STARTING, _IN_USE = "vllm-starting", "vllm-in-use"
_SLACK_S = 1.0  # difference allowed between the clocks of this process and of the file system

_log = logging.getLogger(__name__)


class Caches:
    """Compile caches of one engine over its starts; implements `appliance.command.Upkeep`.

    Another appliance may use the same volume. Files in use are marked by locks, which end with their process.
    """

    def __init__(self, build_dir: Path, name: str, *, limit_bytes: int = LIMIT_BYTES) -> None:
        """`name` distinguishes engines that load at the same time."""
        self._build_dir = build_dir
        # The random part: an engine in another container may have the same name.
        self._mark = build_dir / f"{_STARTING}-{name}-{secrets.token_hex(4)}"
        self._limit_bytes = limit_bytes
        self._since_s = 0.0
        self._locks: list[int] = []

    def begin(self) -> None:
        """Clean up before a start. Only warns if the volume refuses: the engine may serve without its cache."""
        self._release()
        try:
            self._take_in_order()
        except OSError as error:
            _log.warning("the engine's compile cache cannot be cleaned up: %s", error)

    def _take_in_order(self) -> None:
        self._build_dir.mkdir(parents=True, exist_ok=True)
        for mark in sorted(self._build_dir.glob(f"{_STARTING}-*")):
            self._recover(mark)
        is_shared = not _is_unused(self._build_dir)
        self._locks.append(_locked(self._build_dir / _IN_USE, fcntl.LOCK_SH))
        os.utime(self._build_dir / _IN_USE)
        prune(self._build_dir, self._limit_bytes, is_shared=is_shared)
        self._since_s = time.time() - _SLACK_S
        self._locks.append(_locked(self._mark, fcntl.LOCK_EX))
        os.utime(self._mark)

    def ready(self) -> None:
        """Mark everything written so far as complete."""
        self._since_s = 0.0
        with suppress(OSError):  # if the mark stays, the next start removes what this one wrote
            self._mark.unlink(missing_ok=True)

    def end(self) -> None:
        since_s = self._since_s
        self._release()
        if since_s:
            remove_since(self._build_dir, since_s, is_shared=not _is_unused(self._build_dir))
            self.ready()

    def _recover(self, mark: Path) -> None:
        """Clean up after a start whose appliance died. Such a start's mark is no longer locked."""
        try:
            lock, since_s = _locked(mark, fcntl.LOCK_EX | fcntl.LOCK_NB), mark.stat().st_mtime - _SLACK_S
        except OSError:
            return  # this start is still running, or has just become ready
        try:
            removed = remove_since(self._build_dir, since_s, is_shared=not _is_unused(self._build_dir))
            _log.warning("removed %d files of a start that was interrupted: %s", removed, self._build_dir)
            mark.unlink(missing_ok=True)
        finally:
            os.close(lock)

    def _release(self) -> None:
        for lock in self._locks:
            os.close(lock)
        self._locks.clear()


def remove_since(build_dir: Path, since_s: float, *, is_shared: bool) -> int:
    """Remove cache files written since then and return their number. If `is_shared`, other engines write there too, so
    only files that can break a start are removed."""
    removed = 0
    for path in _files(build_dir, (_KEYS.as_posix(),) if is_shared else FOLDERS):
        with suppress(OSError):  # another appliance may remove the same file
            if path.lstat().st_mtime >= since_s:
                path.unlink()
                removed += 1
    return removed


def on_volume(build_dir: Path) -> tuple[int, float]:
    """Return the number of torch.compile keys of this build, and the MiB of all its compile caches."""
    return len(_keys(build_dir)), sum(_size(build_dir / name) for name in FOLDERS) / 2**20


def has_key(build_dir: Path, key: str) -> bool:
    """True if the cache has a key that begins with `key`: of compiled graphs or of whole programs."""
    return any(folder.name.startswith(key) for folder in _keys(build_dir))


def prune(build_dir: Path, limit_bytes: int, *, is_shared: bool = False) -> tuple[Path, ...]:
    """Shrink the caches to the limit and return the removed folders: first unused caches of other builds, the oldest
    first, then keys of this build. If `is_shared`, this build's keys stay, since another engine may be loading one."""
    for rest in _keys(build_dir, is_removed=True):
        shutil.rmtree(rest, ignore_errors=True)  # left by a start that was killed while removing
    others = [folder for folder in build_dir.parent.iterdir() if folder != build_dir and (folder / _IN_USE).exists()]
    unused = sorted((folder for folder in others if _is_unused(folder)), key=_age)
    keys = [] if is_shared else sorted(_keys(build_dir), key=_age)
    left = sum(_size(folder) for folder in (build_dir, *others))
    removed = []
    for folder in (*unused, *keys[:-1]):  # the newest key stays: the next start probably uses it
        if left <= limit_bytes:
            break
        left -= _size(folder)
        removed.append(folder)
        _remove(folder, is_build=folder in unused)
    return tuple(removed)


def _remove(folder: Path, *, is_build: bool) -> None:
    """Remove the caches of a build, or one key. A key is renamed first: an interrupted removal would leave half a key,
    which a later start would load."""
    if is_build:
        for name in FOLDERS:
            shutil.rmtree(folder / name, ignore_errors=True)
        (folder / _IN_USE).unlink(missing_ok=True)
        return
    gone = folder.with_name(f"{_REMOVED}{secrets.token_hex(4)}")
    with suppress(OSError):  # the key is gone already, or the volume refuses
        folder.rename(gone)
        shutil.rmtree(gone, ignore_errors=True)


def _is_unused(folder: Path) -> bool:
    try:
        os.close(_locked(folder / _IN_USE, fcntl.LOCK_EX | fcntl.LOCK_NB))
    except OSError:
        return False
    return True


def _locked(path: Path, how: int) -> int:
    """Open and lock a file; the lock lasts until the file is closed or the process ends. Raises BlockingIOError if
    another process has the lock and `how` says not to wait."""
    while True:
        handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o664)
        try:
            fcntl.flock(handle, how)
            if _is_at(path, handle):
                return handle
        except OSError:
            os.close(handle)
            raise
        os.close(handle)  # another start removed the file between open and lock


def _is_at(path: Path, handle: int) -> bool:
    try:
        return os.path.samestat(path.stat(), os.fstat(handle))
    except FileNotFoundError:
        return False


def _files(build_dir: Path, folders: Iterable[str]) -> Iterator[Path]:
    for name in folders:
        for folder, _, names in os.walk(build_dir / name):
            yield from (Path(folder) / each for each in names)


def _keys(build_dir: Path, *, is_removed: bool = False) -> list[Path]:
    """Return the folder of each key, for compiled graphs and for whole programs (`torch_aot_compile/KEY`). With
    `is_removed`, return instead the remains of keys whose removal was interrupted."""
    graphs = _subfolders(build_dir / _KEYS)
    whole = [key for folder in graphs if folder.name.startswith(_WHOLE) for key in _subfolders(folder)]
    found = [key for key in (*graphs, *whole) if not key.name.startswith(_WHOLE)]
    return [key for key in found if key.name.startswith(_REMOVED) == is_removed]


def _subfolders(folder: Path) -> list[Path]:
    """Return the subfolders; empty if the folder does not exist. Other processes may remove it at any time."""
    try:
        with os.scandir(folder) as found:
            return [Path(each.path) for each in found if each.is_dir()]
    except OSError:
        return []


def _size(folder: Path) -> int:
    """Return the bytes of all files below the folder, without files that other processes just removed."""
    size = 0
    for path in _files(folder, ("",)):
        with suppress(OSError):
            size += path.lstat().st_size
    return size


def _age(folder: Path) -> float:
    """Return when a key was made or a build last used, in seconds since the epoch; infinity if the folder is gone."""
    for path in (folder / _IN_USE, folder):
        with suppress(OSError):
            return path.stat().st_mtime
    return math.inf
