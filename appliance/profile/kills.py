"""Kills by the kernel's memory killer: `<id>.kills`, under the key of a profile; it may exist without a profile."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

from appliance.documents import Rules, load, read
from appliance.plan import MemoryKill
from appliance.profile.files import ProfileFiles, refusing
from appliance.profile.record import Key

KEPT_MAX = 8  # the most recent kills
_RULES: Rules = {MemoryKill: lambda kill: kill.is_possible}


class MemoryKills:
    """Kept kills. `warn` is called for an unreadable file, which counts as empty and is replaced by the next kill."""

    def __init__(self, files: ProfileFiles, warn: Callable[[str], None]) -> None:
        self._files = files
        self._warn = warn

    def kept(self, key: Key) -> tuple[MemoryKill, ...]:
        path = self._path(key)
        try:
            return parse_kills(self._files.read(path))
        except FileNotFoundError:
            return ()
        except (OSError, ValueError) as error:
            self._warn(f"memory kills of earlier starts cannot be read, not used: {path}: {error}")
        return ()

    def keep(self, key: Key, kills: tuple[MemoryKill, ...]) -> None:
        """Replace the kept kills; an empty tuple removes the file. Raises VolumeError."""
        path = self._path(key)
        with self._files.locked(key.id), refusing(f"memory kill cannot be kept: {path}"):
            self._files.drop_leftovers(key.id)
            if not kills:
                self._files.remove(path)
                return
            document = {"kills": [asdict(kill) for kill in kills[-KEPT_MAX:]]}
            self._files.put(path, json.dumps(document, sort_keys=True).encode())

    def forget(self, id_: str) -> None:
        """Remove the file. Call it under the profile's lock. Raises OSError."""
        self._files.remove(self._files.path(id_, ".kills"))

    def _path(self, key: Key) -> Path:
        return self._files.path(key.id, ".kills")


def parse_kills(data: bytes) -> tuple[MemoryKill, ...]:
    """Parse the file's content. Raises ValueError if `keep` did not write it."""
    document = load(data.decode())
    if document.keys() != {"kills"} or not isinstance(document["kills"], list):
        message = f"it has no list of kills: {', '.join(document)}"
        raise ValueError(message)
    return tuple(read(MemoryKill, each, rules=_RULES) for each in document["kills"])
