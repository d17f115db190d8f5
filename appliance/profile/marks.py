"""What is said of a profile beside what was measured: that it is pinned, or why it is stale. A file each.

A pin is an empty file `<id>.pin`: it is there or it is not, and cannot be torn. `<id>.stale` holds why the profile is
stale, plus the hash of the file it refers to; ignored once that file changes.
"""

from __future__ import annotations

import hashlib
import json
from contextlib import suppress

from appliance.profile.files import ProfileFiles, refusing
from appliance.values import dataclass


@dataclass(frozen=True, kw_only=True)
class ProfileStatus:
    """What is to be said of a profile beside what was measured; `stale` and `provisional` say why."""

    stale: str | None
    provisional: str | None
    is_pinned: bool

    def as_document(self) -> dict[str, str | bool | None]:
        return {"stale": self.stale, "provisional": self.provisional, "pinned": self.is_pinned}

    def describe(self) -> tuple[str, ...]:
        return (
            *([f"stale: {self.stale}"] if self.stale else []),
            *([f"provisional: {self.provisional}, while it was measured"] if self.provisional else []),
            *(["pinned: not measured again, and not replaced"] if self.is_pinned else []),
        )


class Marks:
    """By the profile's id. Methods that write are called under its lock, and raise OSError."""

    def __init__(self, files: ProfileFiles) -> None:
        self._files = files

    def is_pinned(self, id_: str) -> bool:
        """Raises VolumeError."""
        return f"{id_}.pin" in self._files.names()

    def pinned_ids(self) -> list[str]:
        return self._files.ids(".pin")

    def pin(self, id_: str) -> None:
        self._files.touch(self._files.path(id_, ".pin"))

    def unpin(self, id_: str) -> None:
        """Durable after a sync of the folder."""
        self._files.remove(self._files.path(id_, ".pin"))

    def mark_stale(self, id_: str, why: str, profile: bytes) -> None:
        """`profile` is the file that it is said of. Several marks are the last one."""
        mark = {"profile": _hash(profile), "words": why}
        self._files.put(self._files.path(id_, ".stale"), json.dumps(mark).encode())

    def unmark_stale(self, id_: str) -> None:
        self._files.remove(self._files.path(id_, ".stale"))

    def why_stale(self, id_: str) -> str | None:
        """None for a profile that holds as far as is known. A mark that cannot be read as one counts as none: whoever
        serves the profile will find out again. Raises VolumeError."""
        mark = self._files.path(id_, ".stale")
        if mark.name not in self._files.names():
            return None
        with refusing(f"mark of a stale profile cannot be read: {mark}"), suppress(FileNotFoundError):
            return _words(self._files.read(mark), self._files.read(self._files.path(id_)))
        return None


def _words(mark: bytes, profile: bytes) -> str | None:
    """If they are about this profile."""
    with suppress(ValueError, RecursionError):
        match json.loads(mark):
            case {"profile": of, "words": str(words)} if of == _hash(profile):
                return words
    return None


def _hash(profile: bytes) -> str:
    return hashlib.sha256(profile).hexdigest()
