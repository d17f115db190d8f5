"""Profiles on the volume, by key or by id: what a start loads, what a tuning saves, and the verbs of `profiles`.

A file that cannot be read is set aside, never fatal. What lies in which file: README.md.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, suppress
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


@dataclass(frozen=True, kw_only=True)
class Removed:
    """What `forget` removed; `alias` is None where the file could not be read as a profile."""

    id: str
    alias: str | None
    was_pinned: bool


class ProfileStore:
    """`warn` is told about a file that was set aside; `disk` is what a test lets fail."""

    def __init__(self, folder: Path, warn: Callable[[str], None], disk: Disk | None = None) -> None:
        self._files = ProfileFiles(folder, disk)
        self._reader = ProfileReader(self._files, warn)
        self._marks = Marks(self._files)
        self._unfinished = UnfinishedTunings(self._files, warn)
        self._peaks = MemoryPeaks(self._files, warn)
        self._kills = MemoryKills(self._files, warn)

    def load(self, key: Key) -> Profile | None:
        """The profile to use: a pinned one that differs in nothing but the build, else the one for exactly this key.

        A corrupt file is set aside and said, and counts as none.
        """
        return self.pinned(key) or self._reader.exact(key)

    def peek(self, key: Key) -> Profile | None:
        """Like `load`, but it changes nothing: a file that cannot be read counts as none."""
        found = [profile for id_ in self._files.ids() if (profile := self._reader.peek(id_))]
        pinned = self._in_order(profile for profile in found if self._is_pin_for(profile, key))
        return next(iter((*pinned, *(profile for profile in found if profile.key == key))), None)

    def pinned(self, key: Key) -> Profile | None:
        """The newest pinned profile for the key's model, machine and settings, of whatever build."""
        found = [self._reader.read(id_, is_ours=False) for id_ in self._marks.pinned_ids()]
        return next(iter(self._in_order(p for p in found if p is not None and self._is_pin_for(p, key))), None)

    def find(self, id_: str) -> Profile:
        """By id or the beginning of it. Raises ConfigError for none and for several."""
        found = []
        for path in (self._files.path(each) for each in self._files.ids() if each.startswith(id_)):
            with refusing(f"profile cannot be read: {path}"), suppress(ValueError, FileNotFoundError):
                found.append(parse(self._files.read(path)))
        return _only_one(found, id_)

    def all(self) -> tuple[Profile, ...]:
        """Every readable profile, the last saved first. Those of another appliance's schema are left alone."""
        found = [self._reader.read(id_, is_ours=False) for id_ in self._files.ids()]
        return tuple(self._in_order(profile for profile in found if profile))

    def foreign(self) -> tuple[ForeignProfile, ...]:
        """Profiles that an older or newer appliance keeps on the same volume."""
        return tuple(found for id_ in self._files.ids() if (found := self._reader.foreign(id_)))

    def why_unused(self, key: Key, model_file: str) -> str | None:
        """For a key without a profile: what changed since the last one for the same file; None if there is none."""
        for profile in self.all():
            if model_file == Path(profile.plan.model_path).name or profile.key.parts.get("model") == key.parts["model"]:
                return "; ".join(key.changed(profile.key.parts))
        for foreign in self.foreign():
            if foreign.model == key.parts["model"]:
                return f"schema of profiles: {foreign.schema} -> {SCHEMA}; {foreign.id} is kept"
        return None

    def save(self, profile: Profile) -> bool:
        """False, and nothing is written, where the profile for this key is pinned, or where something disturbed the new
        one's figures and not the old one's. Measurements that were kept for it are gone either way: it has ended.

        Raises VolumeError; then the old profile or the new one is there, whole.
        """
        id_, path = profile.key.id, self._files.path(profile.key.id)
        with self._files.locked(id_), refusing(f"profile cannot be written: {path}"):
            self._files.drop_leftovers(id_)
            is_wanted = self._is_wanted(profile)
            if is_wanted:
                self._files.put(path, dump_profile(profile).encode(), self._files.next_ns())
                with suppress(OSError):  # the profile is saved, and to another file this mark says nothing
                    self._marks.unmark_stale(id_)
            # Also where it is not: the next tuning would go on from these, and measure nothing.
            with suppress(OSError):
                self._unfinished.forget(id_)
        return is_wanted

    def _is_wanted(self, profile: Profile) -> bool:
        old = self._reader.exact(profile.key)
        if self.is_pinned(profile.key.id):
            if old is not None:
                return False
            self._marks.unpin(profile.key.id)  # left over from one that was damaged
        return not (profile.disturbance and old is not None and old.disturbance is None)

    def forget(self, id_: str) -> Removed:
        """Removes the profile and its pin, also one of another schema or a damaged one, and the memory peak and the
        memory kills of its key, also where there is no profile. Frees space, needs none.

        The pin goes first: should it break off in between, an unpinned profile is left and not a pin without one,
        which a later profile of the same key would inherit.
        """
        there = {*self._files.ids(), *self._files.ids(".peak"), *self._files.ids(".kills")}
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
            self._files.remove(path)
            self._files.sync()
        return Removed(id=name, alias=profile.plan.alias if profile else None, was_pinned=was_pinned)

    def pin(self, id_: str) -> Profile:
        """From now on it is not replaced, and used whatever the build. Pinning twice is pinning once."""
        profile = self.find(id_)
        path = self._files.path(profile.key.id, ".pin")
        with self._files.locked(profile.key.id), refusing(f"profile cannot be pinned: {path}"):
            if self._reader.exact(profile.key) is None:
                raise _none_with(id_)  # somebody was faster and has removed it
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
        """Whether the profile of exactly this key is pinned: then none is saved in its place."""
        return self.is_pinned(key.id) and self._reader.exact(key) is not None

    def mark_stale(self, profile: Profile, why: str) -> bool:
        """Keeps why it no longer holds, until it is measured again; several marks are the last one.

        False, and nothing is written, where another has saved a newer one meanwhile, or it is gone: that one was not
        judged.
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
        """What was found out so far, for a tuning that goes on later. Raises VolumeError."""
        self._unfinished.keep(key, partial)

    def kept(self, key: Key) -> Partial:
        """Of a tuning for this key that was broken off; empty where there is none, or it cannot be read."""
        return self._unfinished.kept(key)

    def peaks(self, key: Key, gpus: Sequence[Gpu]) -> tuple[MemoryPeak, ...]:
        """What engines of this key were seen to hold while they served, as far as these GPUs can. Changes nothing."""
        return self._peaks.kept(key, gpus)

    def keep_peak(self, key: Key, peak: MemoryPeak, gpus: Sequence[Gpu]) -> bool:
        """For later starts, with what was kept before. False where another is at work there. Raises VolumeError."""
        return self._peaks.keep(key, peak, gpus)

    def doubt_peak(self, key: Key, plan: Plan) -> bool:
        """The engine needed more than was seen of this plan. False where another is at work there. Raises
        VolumeError."""
        return self._peaks.doubt(key, plan)

    def kills(self, key: Key) -> tuple[MemoryKill, ...]:
        """Of engines of this key, by the kernel's memory killer. Changes nothing."""
        return self._kills.kept(key)

    def keep_kills(self, key: Key, kills: tuple[MemoryKill, ...]) -> None:
        """In place of those that are there; none forgets them. Raises VolumeError."""
        self._kills.keep(key, kills)

    def tuning(self, key: Key) -> AbstractContextManager[bool]:
        """Whether this process may measure for the key: one at a time, since two would spoil each other's figures."""
        return self._files.tuning(key.id)

    def _is_pin_for(self, profile: Profile, key: Key) -> bool:
        """Whether the profile is pinned and only the build may be another."""
        theirs, ours = dict(profile.key.parts), dict(key.parts)
        theirs.pop("build", None)
        ours.pop("build", None)
        return theirs == ours and self.is_pinned(profile.key.id)

    def _in_order(self, profiles: Iterable[Profile]) -> list[Profile]:
        """The last saved first."""

        def rank(profile: Profile) -> tuple[int, str, str]:
            return self._files.modified_ns(profile.key.id), profile.created, profile.key.id

        return sorted(profiles, key=rank, reverse=True)


def _is(profile: Profile, data: bytes) -> bool:
    """As written: what was measured just now and what was read back differ in nothing that is kept."""
    with suppress(ValueError):
        return parse(data) == parse_profile(dump_profile(profile))
    return False


def _only_one(found: list[_Found], id_: str) -> _Found:
    if len(found) == 1:
        return found[0]
    raise _none_with(id_, len(found))


def _none_with(id_: str, count: int = 0) -> ConfigError:
    message = f"{f'{count} profiles' if count else 'no profile'} with this id: {id_}"
    return ConfigError(message, hint="`appliance profiles list` shows what is there")
