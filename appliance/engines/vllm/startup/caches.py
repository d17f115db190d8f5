"""What the engine compiled, on the volume: one folder a build. Half of a file breaks no start, and old builds go.

vLLM writes `torch_compile_cache/KEY/rank_0_0/*/vllm_compile_cache.py` in place and reads it with `ast.literal_eval`
(compilation/backends.py 199 and 236): one that was cut off ends every later start with the same key. So whatever a
start wrote that did not become ready is removed, by the next one where the appliance went with it.
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

LIMIT_BYTES = 20 * 2**30  # of all builds
FOLDERS = ("vllm", "inductor", "triton", "flashinfer", "deep_gemm", "xdg")  # below a build's folder
_KEYS = Path("vllm/torch_compile_cache")
_WHOLE, _REMOVED = "torch_", "removed-"  # there: folders of whole programs, keys that are being removed
_STARTING, _IN_USE = "vllm-starting", "vllm-in-use"
_SLACK_S = 1.0  # of clocks

_log = logging.getLogger(__name__)


class Caches:
    """Of one engine that is started, maybe several times; see `appliance.command.Upkeep`. Another appliance may use the
    same volume: what it uses is locked, and a lock goes with its process."""

    def __init__(self, build_dir: Path, name: str, *, limit_bytes: int = LIMIT_BYTES) -> None:
        """`name` tells engines apart that are loaded at the same time."""
        self._build_dir = build_dir
        # Another container's process may have the same number, and so its engine the same name.
        self._mark = build_dir / f"{_STARTING}-{name}-{secrets.token_hex(4)}"
        self._limit_bytes = limit_bytes
        self._since_s = 0.0
        self._locks: list[int] = []

    def begin(self) -> None:
        """A volume that refuses is no reason not to serve: the engine says itself what it cannot write."""
        self._release()
        try:
            self._take_in_order()
        except OSError as error:
            _log.warning("what the engine compiled cannot be kept in order: %s", error)

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
        """What was written until now is whole."""
        self._since_s = 0.0
        with suppress(OSError):  # then the next start removes what this one writes
            self._mark.unlink(missing_ok=True)

    def end(self) -> None:
        since_s = self._since_s
        self._release()
        if since_s:
            remove_since(self._build_dir, since_s, is_shared=not _is_unused(self._build_dir))
            self.ready()

    def _recover(self, mark: Path) -> None:
        """Of a start that went with its appliance: nobody holds the mark any more."""
        try:
            lock, since_s = _locked(mark, fcntl.LOCK_EX | fcntl.LOCK_NB), mark.stat().st_mtime - _SLACK_S
        except OSError:
            return  # it is being started elsewhere, or just became ready
        try:
            removed = remove_since(self._build_dir, since_s, is_shared=not _is_unused(self._build_dir))
            _log.warning("removed %d files that a start left that was cut off: %s", removed, self._build_dir)
            mark.unlink(missing_ok=True)
        finally:
            os.close(lock)

    def _release(self) -> None:
        for lock in self._locks:
            os.close(lock)
        self._locks.clear()


def remove_since(build_dir: Path, since_s: float, *, is_shared: bool) -> int:
    """How many files were removed: those of the caches that were written since then. `is_shared`: other engines write
    there, too, and only what is known to break a start goes."""
    removed = 0
    for path in _files(build_dir, (_KEYS.as_posix(),) if is_shared else FOLDERS):
        with suppress(OSError):  # another engine may remove it as well
            if path.lstat().st_mtime >= since_s:
                path.unlink()
                removed += 1
    return removed


def on_volume(build_dir: Path) -> tuple[int, float]:
    """Keys of torch.compile that this build has, and the MiB of all that it compiled."""
    return len(_keys(build_dir)), sum(_size(build_dir / name) for name in FOLDERS) / 2**20


def has_key(build_dir: Path, key: str) -> bool:
    """Whether the engine's own key, which may be cut short, is there: of compiled graphs or of whole programs."""
    return any(folder.name.startswith(key) for folder in _keys(build_dir))


def prune(build_dir: Path, limit_bytes: int, *, is_shared: bool = False) -> tuple[Path, ...]:
    """Down to the limit: other builds' caches that nobody uses, the oldest first, then keys of this build, unless
    `is_shared`: another engine may be loading one of them. What was removed."""
    for rest in _keys(build_dir, is_removed=True):
        shutil.rmtree(rest, ignore_errors=True)  # of a start that was killed as it removed them
    others = [folder for folder in build_dir.parent.iterdir() if folder != build_dir and (folder / _IN_USE).exists()]
    unused = sorted((folder for folder in others if _is_unused(folder)), key=_age)
    keys = [] if is_shared else sorted(_keys(build_dir), key=_age)
    left = sum(_size(folder) for folder in (build_dir, *others))
    removed = []
    for folder in (*unused, *keys[:-1]):  # the newest key is likely the next
        if left <= limit_bytes:
            break
        left -= _size(folder)
        removed.append(folder)
        _remove(folder, is_build=folder in unused)
    return tuple(removed)


def _remove(folder: Path, *, is_build: bool) -> None:
    """A key at one stroke, by its name: half of one would be found by the next start that has it."""
    if is_build:
        for name in FOLDERS:
            shutil.rmtree(folder / name, ignore_errors=True)
        (folder / _IN_USE).unlink(missing_ok=True)
        return
    gone = folder.with_name(f"{_REMOVED}{secrets.token_hex(4)}")
    with suppress(OSError):  # it is no more, or a volume refuses
        folder.rename(gone)
        shutil.rmtree(gone, ignore_errors=True)


def _is_unused(folder: Path) -> bool:
    try:
        os.close(_locked(folder / _IN_USE, fcntl.LOCK_EX | fcntl.LOCK_NB))
    except OSError:
        return False
    return True


def _locked(path: Path, how: int) -> int:
    """An open file, locked until it is closed or its process ends. Raises BlockingIOError where another has it."""
    while True:
        handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o664)
        try:
            fcntl.flock(handle, how)
            if _is_at(path, handle):
                return handle
        except OSError:
            os.close(handle)
            raise
        os.close(handle)  # another start removed it in between


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
    """A folder each: of compiled graphs, and of whole programs (`torch_aot_compile/KEY`). Or what is left of those that
    were being removed."""
    graphs = _subfolders(build_dir / _KEYS)
    whole = [key for folder in graphs if folder.name.startswith(_WHOLE) for key in _subfolders(folder)]
    found = [key for key in (*graphs, *whole) if not key.name.startswith(_WHOLE)]
    return [key for key in found if key.name.startswith(_REMOVED) == is_removed]


def _subfolders(folder: Path) -> list[Path]:
    """Empty for a folder that is not there, or no more: other processes write and remove below it."""
    try:
        with os.scandir(folder) as found:
            return [Path(each.path) for each in found if each.is_dir()]
    except OSError:
        return []


def _size(folder: Path) -> int:
    """Of the files that were still there when they were looked at."""
    size = 0
    for path in _files(folder, ("",)):
        with suppress(OSError):
            size += path.lstat().st_size
    return size


def _age(folder: Path) -> float:
    """When a key was made, or a build used last; later than any for what is no more."""
    for path in (folder / _IN_USE, folder):
        with suppress(OSError):
            return path.stat().st_mtime
    return math.inf
