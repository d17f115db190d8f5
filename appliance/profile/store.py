"""Profiles on the volume, by key or by id: loading at start, saving after tuning, and the verbs of `profiles`.

An unreadable file is set aside and is never fatal. README.md lists the files.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from appliance.errors import ConfigError
from appliance.plan import MemoryKill, MemoryPeak, Plan
from appliance.probe import Gpu
from appliance.profile.files import ProfileFiles, refusing
from appliance.profile.kills import MemoryKills
from appliance.profile.marks import Marks, ProfileStatus
from appliance.profile.peaks import MemoryPeaks
from appliance.profile.reader import ForeignProfile, ProfileReader, parse
from appliance.profile.record import SCHEMA, Key, Profile, dump_profile, parse_profile
from appliance.profile.unfinished import UnfinishedTunings
from appliance.system.disk import Disk
from appliance.values import dataclass

if TYPE_CHECKING:
    from appliance.tune.checkpoint import Partial

_Found = TypeVar("_Found")
_BUILD = frozenset({"build"})


@dataclass(frozen=True, kw_only=True)
class Removed:
    """Result of `forget`. `alias` is None if the file could not be read as a profile."""

    id: str
    alias: str | None
    was_pinned: bool


class ProfileStore:
    """Store of profiles. `warn` is called for each file that is set aside. Tests pass a failing `disk`."""

    def __init__(self, folder: Path, warn: Callable[[str], None], disk: Disk | None = None) -> None:
        self._files = ProfileFiles(folder, disk)
        self._reader = ProfileReader(self._files, warn)
        self._marks = Marks(self._files)
        self._unfinished = UnfinishedTunings(self._files, warn)
        self._peaks = MemoryPeaks(self._files, warn)
        self._kills = MemoryKills(self._files, warn)

    @property
    def folder(self) -> Path:
        return self._files.folder

    def load(self, key: Key) -> Profile | None:
        """Return the profile to use, or None: a pinned one that differs only in the build, else the one for exactly
        this key.

        A corrupt file is set aside with a warning and counts as none.
        """
        return self.pinned(key) or self._reader.exact(key)

    def peek(self, key: Key) -> Profile | None:
        """Like `load`, but changes nothing: an unreadable file counts as none."""
        found = [profile for id_ in self._files.ids() if (profile := self._reader.peek(id_))]
        pinned = self._in_order(profile for profile in found if self._is_pin_for(profile, key))
        return next(iter((*pinned, *(profile for profile in found if profile.key == key))), None)

    def of_other_builds(self, key: Key) -> tuple[Profile, ...]:
        """Return the readable profiles whose key differs from `key` in the build only, newest first. Changes
        nothing."""
        return self.alike(key, _BUILD)

    def alike(self, key: Key, names: frozenset[str]) -> tuple[Profile, ...]:
        """Return the readable profiles whose key differs from `key`, but in nothing else than the parts `names`, newest
        first. Changes nothing."""
        found = [profile for id_ in self._files.ids() if (profile := self._reader.peek(id_))]
        return tuple(self._in_order(p for p in found if p.key != key and p.key.differs_only_in(key, names)))

    def pinned(self, key: Key) -> Profile | None:
        """Return the newest pinned profile for the key's model, machine and settings; the build may differ."""
        found = [self._reader.read(id_, is_ours=False) for id_ in self._marks.pinned_ids()]
        return next(iter(self._in_order(p for p in found if p is not None and self._is_pin_for(p, key))), None)

    def find(self, id_: str) -> Profile:
        """Find a profile by its id or the beginning of it. Raises ConfigError unless exactly one matches."""
        found = []
        for path in (self._files.path(each) for each in self._files.ids() if each.startswith(id_)):
            with refusing(f"profile cannot be read: {path}"), suppress(ValueError, FileNotFoundError):
                found.append(parse(self._files.read(path)))
        return _only_one(found, id_)

    def all(self) -> tuple[Profile, ...]:
        """Every readable profile of our schema, the last saved first."""
        found = [self._reader.read(id_, is_ours=False) for id_ in self._files.ids()]
        return tuple(self._in_order(profile for profile in found if profile))

    def foreign(self) -> tuple[ForeignProfile, ...]:
        """Profiles that an older or newer appliance keeps on the same volume."""
        return tuple(found for id_ in self._files.ids() if (found := self._reader.foreign(id_)))

    def why_unused(self, key: Key, model_file: str) -> str | None:
        """Return what changed since the last profile of the same model file. None if there is no such profile."""
        for profile in self.all():
            if model_file == Path(profile.plan.model_path).name or profile.key.parts.get("model") == key.parts["model"]:
                return "; ".join(key.changed(profile.key.parts))
        for foreign in self.foreign():
            if foreign.model == key.parts["model"]:
                return f"schema of profiles: {foreign.schema} -> {SCHEMA}; {foreign.id} is kept"
        return None

    def save(self, profile: Profile) -> bool:
        """Save the profile. Returns True if it was written.

        Returns False and writes nothing if the profile for this key is pinned. The same if the new figures were
        disturbed and the old ones were not. In both cases a tuning that does not go on has ended, so its partial
        results are removed.
        Raises VolumeError; then the old or the new profile is there, whole.
        """
        id_, path = profile.key.id, self._files.path(profile.key.id)
        with self._files.locked(id_), refusing(f"profile cannot be written: {path}"):
            self._files.drop_leftovers(id_)
            is_wanted = self._is_wanted(profile)
            if is_wanted:
                self._files.put(path, dump_profile(profile).encode(), self._files.next_ns())
                with suppress(OSError):  # the profile is saved, and the mark refers to the old file's hash
                    self._marks.unmark_stale(id_)
            # Also if the profile was not written: the next tuning would resume from these results and measure nothing.
            if profile.goes_on_from is None:
                with suppress(OSError):
                    self._unfinished.forget(id_)
        return is_wanted

    def _is_wanted(self, profile: Profile) -> bool:
        old = self._reader.exact(profile.key)
        if self.is_pinned(profile.key.id):
            if old is not None:
                return False
            self._marks.unpin(profile.key.id)  # left over from a damaged profile
        return not (profile.disturbance and old is not None and old.disturbance is None)

    def forget(self, id_: str) -> Removed:
        """Remove the profile with its pin, marks, partial results and all that is kept beside it under its key.

        Works for a damaged profile, for one of another schema and, if there is one of the others, without a profile.
        Needs no free space. The pin is removed first: if the process ends in between, an unpinned profile is left. A
        pin without a profile would pass to a later profile of the same key.
        """
        beside = {suffix: self._files.ids(suffix) for suffix in (".peak", ".kills", ".abilities", ".experts")}
        there = {*self._files.ids(), *chain.from_iterable(beside.values())}
        name = _only_one([each for each in there if each.startswith(id_)], id_)
        path = self._files.path(name)
        with self._files.locked(name), refusing(f"profile cannot be removed: {path}"):
            profile = self._reader.peek(name)
            was_pinned = self.is_pinned(name)
            if was_pinned:
                self._marks.unpin(name)
            self._marks.unmark_stale(name)
            self._unfinished.forget(name)
            self._peaks.forget(name)
            self._kills.forget(name)
            self._files.remove(self._files.path(name, ".abilities"))
            self._files.remove(self._files.path(name, ".experts"))
            self._files.remove(path)
            self._files.sync()
        return Removed(id=name, alias=profile.plan.alias if profile else None, was_pinned=was_pinned)

    def pin(self, id_: str) -> Profile:
        """Pin the profile: it is never replaced, and it is used for any build. A second pin changes nothing."""
        profile = self.find(id_)
        path = self._files.path(profile.key.id, ".pin")
        with self._files.locked(profile.key.id), refusing(f"profile cannot be pinned: {path}"):
            if self._reader.exact(profile.key) is None:
                raise _none_with(id_)  # another process has removed it meanwhile
            self._marks.pin(profile.key.id)
        return profile

    def unpin(self, id_: str) -> Profile:
        profile = self.find(id_)
        path = self._files.path(profile.key.id, ".pin")
        with self._files.locked(profile.key.id), refusing(f"profile cannot be unpinned: {path}"):
            self._marks.unpin(profile.key.id)
            self._files.sync()
        return profile

    def is_pinned(self, id_: str) -> bool:
        return self._marks.is_pinned(id_)

    def stays(self, key: Key) -> bool:
        """True if the profile of exactly this key is pinned: then no new one is saved in its place."""
        return self.is_pinned(key.id) and self._reader.exact(key) is not None

    def save_checks(self, profile: Profile) -> bool:
        """Replace the checks of a saved profile, also of a pinned one: its figures, marks and time stay.

        Returns False and writes nothing if the file was removed or measured anew meanwhile. Raises VolumeError.
        """
        id_, path = profile.key.id, self._files.path(profile.key.id)
        with self._files.locked(id_), refusing(f"checks of a profile cannot be kept: {path}"):
            self._files.drop_leftovers(id_)
            stored = self._reader.peek(id_)
            if stored is None or stored.created != profile.created:
                return False
            why_stale, data = self._marks.why_stale(id_), dump_profile(replace(stored, checks=profile.checks)).encode()
            self._files.put(path, data, self._files.modified_ns(id_))
            if why_stale is not None:
                self._marks.mark_stale(id_, why_stale, data)
        return True

    def mark_stale(self, profile: Profile, why: str) -> bool:
        """Store the reason why the profile is stale, until it is measured again. A later mark replaces an earlier one.

        Returns False and writes nothing if the file was removed or replaced meanwhile: the new one was not judged.
        """
        id_, mark = profile.key.id, self._files.path(profile.key.id, ".stale")
        with self._files.locked(id_), refusing(f"profile cannot be marked as stale: {mark}"):
            self._files.drop_leftovers(id_)
            data = b""
            with suppress(FileNotFoundError):
                data = self._files.read(self._files.path(id_))
            if not _is(profile, data):
                return False
            self._marks.mark_stale(id_, why, data)
        return True

    def why_stale(self, profile: Profile) -> str | None:
        return self._marks.why_stale(profile.key.id)

    def status(self, profile: Profile) -> ProfileStatus:
        return ProfileStatus(
            stale=self.why_stale(profile),
            provisional=profile.disturbance,
            is_pinned=self.is_pinned(profile.key.id),
        )

    def keep(self, key: Key, partial: Partial) -> None:
        """Keep the results so far of an unfinished tuning, to be resumed later. Raises VolumeError."""
        self._unfinished.keep(key, partial)

    def kept(self, key: Key) -> Partial:
        """Return the results of an unfinished tuning for this key; empty if there is none or it cannot be read."""
        return self._unfinished.kept(key)

    def peaks(self, key: Key, gpus: Sequence[Gpu]) -> tuple[MemoryPeak, ...]:
        """GPU memory that engines of this key held while serving, as far as it is possible on these GPUs. Changes
        nothing."""
        return self._peaks.kept(key, gpus)

    def keep_peak(self, key: Key, peak: MemoryPeak, gpus: Sequence[Gpu]) -> bool:
        """Keep a memory peak for later starts. Returns False if another process holds the lock. Raises VolumeError."""
        return self._peaks.keep(key, peak, gpus)

    def doubt_peak(self, key: Key, plan: Plan) -> bool:
        """Mark the plan's memory peak as incomplete: the engine needed more.

        Returns False if another process holds the lock. Raises VolumeError.
        """
        return self._peaks.doubt(key, plan)

    def kills(self, key: Key) -> tuple[MemoryKill, ...]:
        """Kills of this key's engines by the kernel's memory killer. Changes nothing."""
        return self._kills.kept(key)

    def keep_kills(self, key: Key, kills: tuple[MemoryKill, ...]) -> None:
        """Replace the kept kills; an empty tuple removes them. Raises VolumeError."""
        self._kills.keep(key, kills)

    def tuning(self, key: Key) -> AbstractContextManager[bool]:
        """Yield True if this process may measure for the key. One at a time: two would disturb each other's figures."""
        return self._files.tuning(key.id)

    def _is_pin_for(self, profile: Profile, key: Key) -> bool:
        """True if the profile is pinned and its key differs from `key` in the build at most."""
        return profile.key.differs_only_in(key, _BUILD) and self.is_pinned(profile.key.id)

    def _in_order(self, profiles: Iterable[Profile]) -> list[Profile]:
        """Sort by time of saving, newest first."""

        def rank(profile: Profile) -> tuple[int, str, str]:
            return self._files.modified_ns(profile.key.id), profile.created, profile.key.id

        return sorted(profiles, key=rank, reverse=True)


def _is(profile: Profile, data: bytes) -> bool:
    """True if the file holds this profile. Both sides are compared as written, because a new profile may hold values
    that are not stored."""
    with suppress(ValueError):
        return parse(data) == parse_profile(dump_profile(profile))
    return False


def _only_one(found: list[_Found], id_: str) -> _Found:
    if len(found) == 1:
        return found[0]
    raise _none_with(id_, len(found))


def _none_with(id_: str, count: int = 0) -> ConfigError:
    message = f"{f'{count} profiles match' if count else 'no profile matches'} this id: {id_}"
    return ConfigError(message, hint="`appliance profiles list` lists the ids")
