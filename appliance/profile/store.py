"""Profiles on the volume: atomic, locked per file, versioned. A file that cannot be read is set aside, never fatal.

Several containers may share the volume: a writer locks `<id>.lock`, writes a file of its own, syncs it and renames it
over the old one, so that a reader sees the old or the new one whole. The lock belongs to the open file and dies with
its process.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from appliance.errors import ConfigError, VolumeError
from appliance.profile.record import Key, OtherSchemaError, Profile, dump_profile, parse_profile

MAX_BYTES = 16 * 2**20  # ours are some 10 KB; a larger file is not one of ours


class ProfileStore:
    """`warn` is told about a file that was set aside."""

    def __init__(self, folder: Path, warn: Callable[[str], None]) -> None:
        self._folder = folder
        self._warn = warn

    def load(self, key: Key) -> Profile | None:
        """The profile for exactly this key, or None. A corrupt file is renamed to `.corrupt` and said."""
        path = self._path(key)
        profile = self._read(path)
        if profile is not None and profile.key != key:
            self._set_aside(path, "it is for another key")
            return None
        return profile

    def peek(self, key: Key) -> Profile | None:
        """Like `load`, but it changes nothing: a file that cannot be read counts as none."""
        return next((profile for profile in self._readable() if profile.key == key), None)

    def find(self, key_id: str) -> Profile:
        """By id or the beginning of it. Raises ConfigError for none and for several."""
        found = [profile for profile in self._readable() if profile.key.id.startswith(key_id)]
        if len(found) == 1:
            return found[0]
        message = f"{'no profile' if not found else f'{len(found)} profiles'} with this id: {key_id}"
        raise ConfigError(message, hint="`appliance profiles list` shows what is there")

    def save(self, profile: Profile) -> None:
        """Raises VolumeError; what was there before is there after."""
        path = self._path(profile.key)
        with self.locked(profile.key):
            _write_atomically(path, dump_profile(profile).encode())

    def all(self) -> tuple[Profile, ...]:
        """Every readable profile, newest first. Those of another appliance's schema are passed over and left alone."""
        paths = sorted(self._folder.glob("*.json"))
        found = [profile for path in paths if (profile := self._read(path, is_ours=False))]
        return tuple(sorted(found, key=lambda profile: profile.created, reverse=True))

    def _readable(self) -> Iterator[Profile]:
        for path in sorted(self._folder.glob("*.json")):
            with suppress(ValueError, OSError):  # what is set aside at a start is only passed over here
                yield parse_profile(path.read_text(encoding="utf-8"))

    def why_unused(self, key: Key, model_file: str) -> str | None:
        """For a key without a profile: what changed since the newest one for the same file; None if there is none."""
        for profile in self.all():
            if model_file == Path(profile.plan.model_path).name or profile.key.parts.get("model") == key.parts["model"]:
                return "; ".join(key.changed(profile.key.parts))
        return None

    @contextmanager
    def locked(self, key: Key) -> Iterator[None]:
        """Held while one container measures or writes for this key; waits for another that does."""
        with _lock_file(self._path(key).with_suffix(".lock")) as handle:
            fcntl.flock(handle, fcntl.LOCK_EX)
            yield

    @contextmanager
    def tuning(self, key: Key) -> Iterator[bool]:
        """Whether this process may measure for the key: one at a time, since two would spoil each other's figures."""
        with _lock_file(self._path(key).with_suffix(".tuning")) as handle:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                yield False
                return
            yield True

    def _path(self, key: Key) -> Path:
        return self._folder / f"{key.id}.json"

    def _read(self, path: Path, *, is_ours: bool = True) -> Profile | None:
        try:
            with path.open("rb") as file:
                data = file.read(MAX_BYTES + 1)
        except FileNotFoundError:
            return None
        except OSError as error:
            message = f"profile cannot be read: {path}: {error.strerror}"
            raise VolumeError(message, hint="check owner and mode of the volume's files") from error
        try:
            if len(data) > MAX_BYTES:
                message = f"it is larger than {MAX_BYTES} bytes"
                raise ValueError(message)
            return parse_profile(data.decode())
        except ValueError as error:
            if isinstance(error, OtherSchemaError) and not is_ours:
                return None
            self._set_aside(path, str(error))
            return None

    def _set_aside(self, path: Path, why: str) -> None:
        aside = path.with_suffix(".corrupt")
        try:
            path.replace(aside)
        except FileNotFoundError:
            return  # another container was faster
        except OSError as error:
            message = f"profile is corrupt and cannot be set aside: {path}: {error.strerror}"
            raise VolumeError(message, hint="remove it by hand") from error
        self._warn(f"profile set aside as {aside.name}, measuring again: {why}")


@contextmanager
def _lock_file(path: Path) -> Iterator[int]:
    try:
        handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o664)
    except OSError as error:
        message = f"lock on the volume cannot be opened: {path}: {error.strerror}"
        raise VolumeError(message, hint="check owner, mode and free space of the volume") from error
    try:
        yield handle
    finally:
        os.close(handle)


def _write_atomically(path: Path, data: bytes) -> None:
    """Temporary file, sync, rename, sync of the folder: after a power cut the old or the new file is there, whole."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
        _sync_folder(path.parent)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        message = f"profile cannot be written: {path}: {error.strerror}"
        raise VolumeError(message, hint="check free space, owner and mode of the volume") from error


def _sync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
