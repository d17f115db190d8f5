"""The volume: its folders, the check that it can be written, and the API key."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
import secrets
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

from appliance.errors import ConfigError, DownloadError, ModelUnreadableError, VolumeError
from appliance.model.formats.gguf import read_gguf
from appliance.system.disk import read_file
from appliance.system.secret_file import new_key, read_or_make

FOLDERS = ("models", "profiles", "cache", "secrets")
_KEY_FILE_BYTES = 4096
_CHUNK_BYTES = 2**20
_PROBE_BYTES = 65536  # more than an inode can hold itself, so that a full disk refuses it
_MARK_BYTES = 8
_PARTS = f".*.gguf.{'[0-9a-f]' * 2 * _MARK_BYTES}.part"


def open_volume(path: Path, build_id: str = "") -> None:
    """Create the volume's folders and check that a file can be written. Removes nothing. Raises VolumeError with the
    reason.

    `build_id` adds the cache folder of that build: caches compiled by one build must not be loaded by another.
    """
    try:
        if not path.is_dir():
            message = f"volume is not there: {path}"
            raise VolumeError(message, hint=f"mount one, as in `-v appliance:{path}`")
        for name in FOLDERS:
            (path / name).mkdir(exist_ok=True)
        if build_id:
            (path / "cache" / build_id / "home").mkdir(parents=True, exist_ok=True)
        _prove_writable(path / "cache" / f".probe.{os.getpid()}")
    except OSError as error:
        raise refusal(path, error) from error


def read_key(path: Path) -> str:
    """Return the API key, or "" if there is none yet. Writes nothing, so that it works on a full volume. Raises
    VolumeError if the file cannot be read."""
    try:
        return _read(path)
    except OSError as error:
        message = f"API key cannot be read: {path}: {_words(error)}"
        raise VolumeError(message, hint="check owner and mode of the volume") from error


def read_or_make_key(path: Path) -> str:
    """Return the API key; create it if there is none. Two containers that start at once on an empty volume get the same
    key. Raises VolumeError if the key can be neither read nor stored."""
    try:
        return read_or_make(path, _read, new_key)
    except OSError as error:
        if _is_empty(path):  # an empty, read-only file: a mounted secret
            message = f"API key file is empty: {path}"
            raise VolumeError(message, hint="put the key into the file or the Secret that is mounted there") from error
        message = f"API key cannot be stored on the volume: {path}: {_words(error)}"
        raise VolumeError(message, hint="check owner and mode of the volume, or set APPLIANCE_AUTH=off") from error


def _is_empty(path: Path) -> bool:
    try:
        return path.is_file() and path.stat().st_size == 0
    except OSError:  # the file cannot be examined: not an empty file
        return False


def _read(path: Path) -> str:
    try:
        return read_file(path, _KEY_FILE_BYTES).decode().strip()
    except FileNotFoundError:
        return ""
    except UnicodeDecodeError as error:
        message = f"API key is not text: {path}"
        raise VolumeError(message, hint="remove the file; a new key is made at the next start") from error


def _prove_writable(probe: Path) -> None:
    try:
        with probe.open("wb", buffering=0) as file:
            written = file.write(b"\0" * _PROBE_BYTES)
            if written < _PROBE_BYTES:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    finally:
        probe.unlink(missing_ok=True)


def refusal(path: Path, error: OSError) -> VolumeError:
    """Return a VolumeError that says why the volume at `path` refused."""
    who = f"user {os.getuid()}, group {os.getgid()}"
    match error.errno:
        case errno.ENOSPC | errno.EDQUOT:
            message = f"volume is full: {path}"
            return VolumeError(message, hint="free some space, or remove models that are not served")
        case errno.EROFS:
            message = f"volume is read-only: {path}"
            return VolumeError(message, hint="mount it writable, without `:ro`")
        case errno.EACCES | errno.EPERM:
            place = _place_of(error, path)
            message = f"volume is not writable by {who}: {place} {_owner(place)}"
            return VolumeError(message, hint="run with `--user ANY:0`, or make it writable for this user or group")
    message = f"volume cannot be written: {error.filename or path}: {_words(error)}"
    return VolumeError(message, hint="check the disk")


def _place_of(error: OSError, path: Path) -> Path:
    """Return the path that refused: the file named by the error if it is below `path`, or its nearest existing
    folder."""
    if not isinstance(error.filename, str | os.PathLike):
        return path
    place = Path(error.filename)
    while place.is_relative_to(path) and not os.path.lexists(place):
        place = place.parent
    return place if place.is_relative_to(path) else path


def _owner(path: Path) -> str:
    try:
        owner = path.stat()
    except OSError:
        return "lies in a folder that may not be entered"
    return f"belongs to {owner.st_uid}:{owner.st_gid}"


def _words(error: OSError) -> str:
    return (error.strerror or str(error)).lower()


def add_model(models_dir: Path, name: str, source: IO[bytes], sha256: str | None) -> str:
    """Write `source` to a model file of that name and return a sentence about it. The old file stays until the new one
    is complete and checked.

    With `sha256` nothing is read if the existing file has that hash. Raises ModelUnreadableError if `source` is not a
    whole GGUF file or one whole part of a split one, DownloadError for another sha256, VolumeError if the disk refuses.
    """
    path = _inside(models_dir, name)
    try:
        if sha256 and path.is_file() and _sha256(path) == sha256.lower():
            return f"{name}: is there already, sha256 {sha256.lower()}"
        with part_of(path) as file:
            size, found = _copy(source, file)
            _check(name, Path(file.name), size, found, sha256)
            Path(file.name).replace(path)
    except OSError as error:
        raise refusal(models_dir, error) from error
    return f"{name}: {size:,} bytes, sha256 {found}"


def drop_unfinished(models_dir: Path) -> None:
    """Remove the temporary files of killed `add` commands. A running `add`, in any container, holds a lock on its
    file."""
    for part in models_dir.glob(_PARTS):
        with suppress(OSError):  # in use, just renamed, or another user's: it may stay
            handle = os.open(part, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                part.unlink()
            finally:
                os.close(handle)


def hold_files(paths: Sequence[Path]) -> tuple[int, ...]:
    """Open the files with a shared lock each and return the handles. The lock tells other containers that the file is
    being served. It ends with the process. A disk without locks is ignored."""
    held = []
    for path in paths:
        with suppress(OSError):
            handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            held.append(handle)
            fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
    return tuple(held)


def is_held(path: Path) -> bool:
    """True if a process serves the file, writes it, or waits for it."""
    try:
        handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError:
        return False
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:  # a disk that has no locks
        return False
    finally:
        os.close(handle)
    return False


@contextmanager
def part_of(path: Path) -> Iterator[IO[bytes]]:
    """Yield a new, locked file next to `path`. It is removed at the end unless it was renamed."""
    file = _open_part(path)
    try:
        yield file
    finally:
        Path(file.name).unlink(missing_ok=True)
        file.close()


def _open_part(path: Path) -> IO[bytes]:
    while True:
        # Not the process id: those repeat between containers.
        file = path.with_name(f".{path.name}.{secrets.token_hex(_MARK_BYTES)}.part").open("xb")
        fcntl.flock(file, fcntl.LOCK_EX)
        if os.fstat(file.fileno()).st_nlink:
            return file
        file.close()  # another `add` took it for a leftover before it was locked, and removed it


def _copy(source: IO[bytes], file: IO[bytes]) -> tuple[int, str]:
    """Copy `source` to `file` and sync it to the disk. Returns its size in bytes and its sha256."""
    digest, size = hashlib.sha256(), 0
    while chunk := source.read(_CHUNK_BYTES):
        file.write(chunk)
        digest.update(chunk)
        size += len(chunk)
    file.flush()
    os.fsync(file.fileno())
    return size, digest.hexdigest()


def _check(name: str, part: Path, size: int, found: str, sha256: str | None) -> None:
    if not size:
        message = f"model is unreadable: {name}: the input was empty"
        raise ModelUnreadableError(
            message,
            hint=f"Docker passes input on only with -i: docker exec -i CONTAINER appliance models add {name} < {name}",
        )
    if sha256 and found != sha256.lower():
        message = f"model has another sha256 than expected: {name}: {found} of {size:,} bytes, expected {sha256}"
        raise DownloadError(message, hint="it is another file, or the transfer was incomplete: fetch it again")
    try:
        read_gguf(part)
    except ModelUnreadableError as error:
        raise ModelUnreadableError(error.message.replace(str(part), name), hint=error.hint) from error


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _inside(models_dir: Path, name: str) -> Path:
    if Path(name).name != name or name.startswith(".") or not name.endswith(".gguf"):
        message = f"not a file name for a model: {name}"
        raise ConfigError(message, hint="a plain name that ends in .gguf, as in model.gguf")
    return models_dir / name
