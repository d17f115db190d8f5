"""Marks of a profile, one file each: pinned, and stale with its reason.

A pin is an empty file `<id>.pin`: it exists or it does not, so it cannot be torn. `<id>.stale` holds the reason and the
hash of the profile file it refers to; it is ignored once that file changes.
"""

from __future__ import annotations

import hashlib
import json
from contextlib import suppress

from appliance.profile.files import ProfileFiles, refusing
from appliance.values import dataclass


@dataclass(frozen=True, kw_only=True)
class ProfileStatus:
    """Marks of a profile; `stale` and `provisional` are the reasons, None if the mark is not set."""

    stale: str | None
    provisional: str | None
    is_pinned: bool

    def as_document(self) -> dict[str, str | bool | None]:
        return {"stale": self.stale, "provisional": self.provisional, "pinned": self.is_pinned}

    def describe(self) -> tuple[str, ...]:
        return (
            *([f"stale: {self.stale}"] if self.stale else []),
            *([f"provisional: {self.provisional} when it was measured"] if self.provisional else []),
            *(["pinned: not measured again, and not replaced"] if self.is_pinned else []),
        )


class Marks:
    """Marks by profile id. Methods that write are called under the profile's lock and raise OSError."""

    def __init__(self, files: ProfileFiles) -> None:
        self._files = files

    def is_pinned(self, id_: str) -> bool:
        """True if the profile is pinned. Raises VolumeError."""
        return f"{id_}.pin" in self._files.names()

    def pinned_ids(self) -> list[str]:
        return self._files.ids(".pin")

    def pin(self, id_: str) -> None:
        self._files.touch(self._files.path(id_, ".pin"))

    def unpin(self, id_: str) -> None:
        """Remove the pin. Durable after a sync of the folder."""
        self._files.remove(self._files.path(id_, ".pin"))

    def mark_stale(self, id_: str, why: str, profile: bytes) -> None:
        """Mark the profile whose file content is `profile` as stale. A later mark replaces an earlier one."""
        mark = {"profile": _hash(profile), "words": why}
        self._files.put(self._files.path(id_, ".stale"), json.dumps(mark).encode())

    def unmark_stale(self, id_: str) -> None:
        self._files.remove(self._files.path(id_, ".stale"))

    def why_stale(self, id_: str) -> str | None:
        """Return the reason why the profile is stale, or None if it is not marked.

        An unreadable mark counts as none: the appliance that serves the profile will find the drift again. Raises
        VolumeError.
        """
        mark = self._files.path(id_, ".stale")
        if mark.name not in self._files.names():
            return None
        with refusing(f"mark of a stale profile cannot be read: {mark}"), suppress(FileNotFoundError):
            return _words(self._files.read(mark), self._files.read(self._files.path(id_)))
        return None


def _words(mark: bytes, profile: bytes) -> str | None:
    """Return the mark's reason if the mark refers to this profile, else None."""
    with suppress(ValueError, RecursionError):
        match json.loads(mark):
            case {"profile": of, "words": str(words)} if of == _hash(profile):
                return words
    return None


def _hash(profile: bytes) -> str:
    return hashlib.sha256(profile).hexdigest()
