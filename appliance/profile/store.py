"""Profiles on the volume: atomic, locked per file, versioned. A file that cannot be read is set aside, never fatal.

Several containers may share the volume: a writer locks `<id>.lock`, writes a file of its own, syncs it and renames it
over the old one, so that a reader sees the old or the new one whole. The lock belongs to the open file and dies with
its process. A pin is an empty file `<id>.pin`: it is there or it is not, and cannot be torn. `<id>.stale` says why a
profile no longer holds, beside the hash of the very file that it is said of: for a newer one it counts as none.
"""

from __future__ import annotations

import hashlib
import json
import secrets
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from appliance.disk import Disk, put_file, sync_folder
from appliance.errors import ConfigError, VolumeError
from appliance.profile.record import (
    SCHEMA,
    Key,
    OtherSchemaError,
    Profile,
    dump_profile,
    parse_profile,
)
from appliance.values import dataclass

if TYPE_CHECKING:
    from appliance.tune.partial import Partial

MAX_BYTES = 16 * 2**20  # ours are some 100 KB; a larger file is not one of ours
_Found = TypeVar("_Found")
_HINT = "check free space, owner and mode of the volume"


@dataclass(frozen=True, kw_only=True)
class Stranger:
    """A profile of another appliance's schema. It is left alone: that appliance may come back."""

    id: str
    schema: str
    model: object  # as in its key, if it has one where ours do


@dataclass(frozen=True, kw_only=True)
class Forgotten:
    """What `forget` removed; `alias` is None where the file could not be read as a profile."""

    id: str
    alias: str | None
    was_pinned: bool


@dataclass(frozen=True, kw_only=True)
class Standing:
    """What is to be said of a profile beside what was measured; `stale` and `provisional` say why."""

    stale: str | None
    provisional: str | None
    is_pinned: bool

    def as_document(self) -> dict[str, str | bool | None]:
        return {"stale": self.stale, "provisional": self.provisional, "pinned": self.is_pinned}

    def in_words(self) -> tuple[str, ...]:
        return (
            *([f"stale: {self.stale}"] if self.stale else []),
            *([f"provisional: {self.provisional}, while it was measured"] if self.provisional else []),
            *(["pinned: not measured again, and not replaced"] if self.is_pinned else []),
        )


class ProfileStore:
    """`warn` is told about a file that was set aside; `disk` is what a test lets fail."""

    def __init__(self, folder: Path, warn: Callable[[str], None], disk: Disk | None = None) -> None:
        self._folder = folder
        self._warn = warn
        self._disk = disk or Disk()

    def load(self, key: Key) -> Profile | None:
        """The profile to use: a pinned one that differs in nothing but the build, else the one for exactly this key.

        A corrupt file is set aside and said, and counts as none.
        """
        return self.pinned(key) or self._exact(key)

    def peek(self, key: Key) -> Profile | None:
        """Like `load`, but it changes nothing: a file that cannot be read counts as none."""
        found = list(self._readable())
        pinned = _newest(self._disk, self._folder, (p for p in found if self._is_pin_for(p, key)))
        return pinned or next((profile for profile in found if profile.key == key), None)

    def pinned(self, key: Key) -> Profile | None:
        """The newest pinned profile for the key's model, machine and settings, of whatever build."""
        found = [self._read(self._folder / f"{name}.json", is_ours=False) for name in self._stems(".pin")]
        return _newest(self._disk, self._folder, (p for p in found if p is not None and self._is_pin_for(p, key)))

    def find(self, key_id: str) -> Profile:
        """By id or the beginning of it. Raises ConfigError for none and for several."""
        found = []
        for name in (name for name in self._stems(".json") if name.startswith(key_id)):
            path = self._folder / f"{name}.json"
            with self._refusing(f"profile cannot be read: {path}"), suppress(ValueError, FileNotFoundError):
                found.append(_parse(self._disk.read(path, MAX_BYTES + 1)))
        return _only_one(found, key_id)

    def is_pinned(self, key_id: str) -> bool:
        return f"{key_id}.pin" in self._names()

    def stays(self, key: Key) -> bool:
        """Whether the profile of exactly this key is pinned: then none is saved in its place."""
        return self.is_pinned(key.id) and self._exact(key) is not None

    def save(self, profile: Profile) -> bool:
        """False, and nothing is written, where the profile for this key is pinned, or where something disturbed the new
        one's figures and not the old one's. Measurements that were kept for it are gone either way: it has ended.

        Raises VolumeError; then the old profile or the new one is there, whole.
        """
        path = self._path(profile.key)
        with self.locked(profile.key), self._refusing(f"profile cannot be written: {path}"):
            self._drop_leftovers(path)
            is_wanted = self._is_wanted(profile)
            if is_wanted:
                self._put(path, dump_profile(profile).encode(), self._next_ns())
                with suppress(OSError):  # the profile is saved, and to another file this mark says nothing
                    self._disk.remove(self._stale_mark(profile.key.id))
            # Also where it is not: the next tuning would go on from these, and measure nothing.
            with suppress(OSError):
                self._disk.remove(self._partial(profile.key))
        return is_wanted

    def _is_wanted(self, profile: Profile) -> bool:
        old = self._exact(profile.key)
        if self.is_pinned(profile.key.id):
            if old is not None:
                return False
            self._disk.remove(self._mark(profile.key.id))  # left over from one that was damaged
        return not (profile.disturbance and old is not None and old.disturbance is None)

    def keep(self, key: Key, partial: Partial) -> None:
        """What was found out so far, for a tuning that goes on later. Raises VolumeError."""
        from appliance.profile.partial import dump_partial  # here: a start from a profile never needs it

        path = self._partial(key)
        with self.locked(key), self._refusing(f"what was measured cannot be kept: {path}"):
            self._drop_leftovers(path)
            self._put(path, dump_partial(key, partial).encode(), time.time_ns())

    def kept(self, key: Key) -> Partial:
        """Of a tuning for this key that was broken off. What cannot be read is said, set aside if it can be, and
        measured again: no reason to fail."""
        # Here: a start from a profile never needs it.
        from appliance.profile.partial import parse_partial
        from appliance.tune.partial import Partial

        path = self._partial(key)
        try:
            return parse_partial(self._disk.read(path, MAX_BYTES + 1).decode(), key)
        except FileNotFoundError:
            return Partial()
        except OSError as error:
            self._warn(f"what was measured before cannot be read, measuring again: {path}: {error.strerror}")
        except ValueError as error:
            aside = path.with_suffix(".partial-corrupt")
            with suppress(OSError):  # the next that is kept takes its place
                self._disk.rename(path, aside)
            self._warn(f"what was measured before is set aside as {aside.name}, measuring again: {error}")
        return Partial()

    def mark_stale(self, profile: Profile, words: str) -> bool:
        """Keeps why it no longer holds, until it is measured again; several marks are the last one.

        False, and nothing is written, where another has saved a newer one meanwhile, or it is gone: that one was not
        judged.
        """
        path = self._path(profile.key)
        mark = self._stale_mark(profile.key.id)
        with self.locked(profile.key), self._refusing(f"profile cannot be marked as stale: {mark}"):
            self._drop_leftovers(path)
            data = b""
            with suppress(FileNotFoundError):
                data = self._disk.read(path, MAX_BYTES + 1)
            if not _is(profile, data):
                return False
            self._put(mark, _dump_mark(data, words), time.time_ns())
        return True

    def why_stale(self, profile: Profile) -> str | None:
        """In words; None for a profile that holds as far as is known. A mark that cannot be read counts as none:
        whoever serves the profile will find out again."""
        path = self._path(profile.key)
        mark = self._stale_mark(profile.key.id)
        if mark.name not in self._names():
            return None
        with self._refusing(f"mark of a stale profile cannot be read: {mark}"), suppress(FileNotFoundError):
            return _parse_mark(self._disk.read(mark, MAX_BYTES + 1), self._disk.read(path, MAX_BYTES + 1))
        return None

    def standing(self, profile: Profile) -> Standing:
        return Standing(
            stale=self.why_stale(profile),
            provisional=profile.disturbance,
            is_pinned=self.is_pinned(profile.key.id),
        )

    def pin(self, key_id: str) -> Profile:
        """From now on it is not replaced, and used whatever the build. Pinning twice is pinning once."""
        profile = self.find(key_id)
        mark = self._mark(profile.key.id)
        with self.locked(profile.key), self._refusing(f"profile cannot be pinned: {mark}"):
            if self._exact(profile.key) is None:
                raise _none_with(key_id)  # somebody was faster and has removed it
            with suppress(FileExistsError):
                self._disk.close(self._disk.create(mark))
            sync_folder(self._disk, self._folder)
        return profile

    def unpin(self, key_id: str) -> Profile:
        profile = self.find(key_id)
        mark = self._mark(profile.key.id)
        with self.locked(profile.key), self._refusing(f"profile cannot be unpinned: {mark}"):
            with suppress(FileNotFoundError):
                self._disk.remove(mark)
            sync_folder(self._disk, self._folder)
        return profile

    def forget(self, key_id: str) -> Forgotten:
        """Removes the profile and its pin, also one of another schema or a damaged one. Frees space, needs none.

        The pin goes first: should it break off in between, an unpinned profile is left and not a pin without one,
        which a later profile of the same key would inherit.
        """
        name = _only_one([stem for stem in self._stems(".json") if stem.startswith(key_id)], key_id)
        path = self._folder / f"{name}.json"
        with self._locked(path), self._refusing(f"profile cannot be removed: {path}"):
            profile = self._quietly(path)
            was_pinned = self.is_pinned(name)
            if was_pinned:
                self._disk.remove(self._mark(name))
            for gone in (self._stale_mark(name), path.with_suffix(".partial"), path):
                with suppress(FileNotFoundError):
                    self._disk.remove(gone)
            sync_folder(self._disk, self._folder)
        return Forgotten(id=name, alias=profile.plan.alias if profile else None, was_pinned=was_pinned)

    def all(self) -> tuple[Profile, ...]:
        """Every readable profile, the last saved first. Those of another appliance's schema are left alone."""
        found = [self._read(self._folder / f"{name}.json", is_ours=False) for name in self._stems(".json")]
        return tuple(_in_order(self._disk, self._folder, (profile for profile in found if profile)))

    def strangers(self) -> tuple[Stranger, ...]:
        """Profiles that an older or newer appliance keeps on the same volume."""
        found = []
        for name in self._stems(".json"):
            with suppress(OSError, ValueError, RecursionError):
                document = json.loads(self._disk.read(self._folder / f"{name}.json", MAX_BYTES + 1))
                if isinstance(document, dict) and "schema" in document and document["schema"] != SCHEMA:
                    found.append(Stranger(id=name, schema=str(document["schema"]), model=_model_of(document)))
        return tuple(found)

    def why_unused(self, key: Key, model_file: str) -> str | None:
        """For a key without a profile: what changed since the last one for the same file; None if there is none."""
        for profile in self.all():
            if model_file == Path(profile.plan.model_path).name or profile.key.parts.get("model") == key.parts["model"]:
                return "; ".join(key.changed(profile.key.parts))
        for stranger in self.strangers():
            if stranger.model == key.parts["model"]:
                return f"schema of profiles: {stranger.schema} -> {SCHEMA}; {stranger.id} is kept"
        return None

    @contextmanager
    def locked(self, key: Key) -> Iterator[None]:
        """Held while one container measures or writes for this key; waits for another that does."""
        with self._locked(self._path(key)):
            yield

    @contextmanager
    def tuning(self, key: Key) -> Iterator[bool]:
        """Whether this process may measure for the key: one at a time, since two would spoil each other's figures."""
        with self._lock(self._path(key).with_suffix(".tuning"), wait=False) as is_ours:
            yield is_ours

    def _path(self, key: Key) -> Path:
        return self._folder / f"{key.id}.json"

    def _partial(self, key: Key) -> Path:
        return self._folder / f"{key.id}.partial"

    def _mark(self, name: str) -> Path:
        return self._folder / f"{name}.pin"

    def _stale_mark(self, name: str) -> Path:
        return self._folder / f"{name}.stale"

    def _put(self, path: Path, data: bytes, modified_ns: int) -> None:
        temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}.tmp")
        put_file(self._disk, path, data, temporary=temporary, modified_ns=modified_ns)

    def _names(self) -> list[str]:
        with self._refusing(f"profiles cannot be listed: {self._folder}"):
            return self._disk.names(self._folder)

    def _stems(self, suffix: str) -> list[str]:
        """Names without the suffix; hidden ones are of a writer that is at work, or was killed."""
        names = self._names()
        return [name.removesuffix(suffix) for name in names if name.endswith(suffix) and not name.startswith(".")]

    def _is_pin_for(self, profile: Profile, key: Key) -> bool:
        """Whether the profile is pinned and only the build may be another."""
        theirs, ours = dict(profile.key.parts), dict(key.parts)
        theirs.pop("build", None)
        ours.pop("build", None)
        return theirs == ours and self.is_pinned(profile.key.id)

    def _exact(self, key: Key) -> Profile | None:
        path = self._path(key)
        profile = self._read(path)
        if profile is not None and profile.key != key:
            self._set_aside(path, "it is for another key")
            return None
        return profile

    def _readable(self) -> Iterator[Profile]:
        for name in self._stems(".json"):
            if (profile := self._quietly(self._folder / f"{name}.json")) is not None:
                yield profile

    def _quietly(self, path: Path) -> Profile | None:
        """What is set aside at a start is only passed over here."""
        with suppress(ValueError, OSError):
            return _parse(self._disk.read(path, MAX_BYTES + 1))
        return None

    def _read(self, path: Path, *, is_ours: bool = True) -> Profile | None:
        try:
            data = self._disk.read(path, MAX_BYTES + 1)
        except FileNotFoundError:
            return None
        except OSError as error:
            message = f"profile cannot be read: {path}: {error.strerror}"
            raise VolumeError(message, hint="check owner and mode of the volume's files") from error
        try:
            return _parse(data)
        except OtherSchemaError as error:
            if is_ours:
                self._set_aside(path, str(error), suffix=".other-schema")
            return None
        except ValueError as error:
            self._set_aside(path, str(error))
            return None

    def _set_aside(self, path: Path, why: str, *, suffix: str = ".corrupt") -> None:
        aside = path.with_suffix(suffix)
        try:
            self._disk.rename(path, aside)
        except FileNotFoundError:
            return  # another container was faster
        except OSError as error:
            message = f"profile is corrupt and cannot be set aside: {path}: {error.strerror}"
            raise VolumeError(message, hint="remove it by hand") from error
        self._warn(f"profile set aside as {aside.name}, measuring again: {why}")

    def _drop_leftovers(self, path: Path) -> None:
        """Of writers of this profile that were killed: under its lock nobody else is writing one."""
        for name in self._disk.names(self._folder):
            if name.startswith(f".{path.stem}.") and name.endswith(".tmp"):
                with suppress(OSError):
                    self._disk.remove(self._folder / name)

    def _next_ns(self) -> int:
        """For the file's time, by which profiles are ordered: later than every other one's, also when the clock is not.

        What a profile says of itself, `created`, stays what the clock said.
        """
        times = [_modified_ns(self._disk, self._folder / f"{name}.json") for name in self._stems(".json")]
        return max((time.time_ns(), *(before + 1 for before in times)))

    @contextmanager
    def _refusing(self, what: str) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            message = f"{what}: {error.strerror}"
            raise VolumeError(message, hint=_HINT) from error

    @contextmanager
    def _locked(self, path: Path) -> Iterator[None]:
        with self._lock(path.with_suffix(".lock"), wait=True):
            yield

    @contextmanager
    def _lock(self, path: Path, *, wait: bool) -> Iterator[bool]:
        with self._refusing(f"lock on the volume cannot be opened: {path}"):
            handle = self._disk.open_lock(path)
        try:
            with self._refusing(f"lock on the volume cannot be taken: {path}"):
                is_ours = self._disk.lock(handle, wait=wait)
            yield is_ours
        finally:
            with suppress(OSError):  # the lock is gone in any case, and the work under it is done
                self._disk.close(handle)


def _parse(data: bytes) -> Profile:
    if len(data) > MAX_BYTES:
        message = f"it is larger than {MAX_BYTES} bytes"
        raise ValueError(message)
    return parse_profile(data.decode())


def _is(profile: Profile, data: bytes) -> bool:
    """As written: what was measured just now and what was read back differ in nothing that is kept."""
    with suppress(ValueError):
        return dump_profile(_parse(data)) == dump_profile(profile)
    return False


def _dump_mark(profile: bytes, words: str) -> bytes:
    return json.dumps({"profile": hashlib.sha256(profile).hexdigest(), "words": words}).encode()


def _parse_mark(data: bytes, profile: bytes) -> str | None:
    """The words, if they are about this profile."""
    with suppress(ValueError, RecursionError):
        mark = json.loads(data)
        if isinstance(mark, dict) and mark.get("profile") == hashlib.sha256(profile).hexdigest():
            words = mark.get("words")
            return words if isinstance(words, str) else None
    return None


def _model_of(document: dict[str, object]) -> object:
    key = document.get("key")
    parts = key.get("parts") if isinstance(key, dict) else None
    return parts.get("model") if isinstance(parts, dict) else None


def _modified_ns(disk: Disk, path: Path) -> int:
    """0 for a file that has gone, or whose time cannot be told: an order is no reason to fail."""
    with suppress(OSError):
        return disk.modified_ns(path)
    return 0


def _in_order(disk: Disk, folder: Path, profiles: Iterable[Profile]) -> list[Profile]:
    def rank(profile: Profile) -> tuple[int, str, str]:
        return _modified_ns(disk, folder / f"{profile.key.id}.json"), profile.created, profile.key.id

    return sorted(profiles, key=rank, reverse=True)


def _newest(disk: Disk, folder: Path, profiles: Iterable[Profile]) -> Profile | None:
    return next(iter(_in_order(disk, folder, profiles)), None)


def _only_one(found: list[_Found], key_id: str) -> _Found:
    if len(found) == 1:
        return found[0]
    raise _none_with(key_id, len(found))


def _none_with(key_id: str, count: int = 0) -> ConfigError:
    message = f"{f'{count} profiles' if count else 'no profile'} with this id: {key_id}"
    return ConfigError(message, hint="`appliance profiles list` shows what is there")
