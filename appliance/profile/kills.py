"""Kills by the kernel's memory killer: `<id>.kills`, beside the profile of the same key or where there is none."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

from appliance.documents import Rules, load, read
from appliance.plan import MemoryKill
from appliance.profile.files import ProfileFiles, refusing
from appliance.profile.record import Key

KEPT_MAX = 8  # the last ones
_RULES: Rules = {MemoryKill: lambda kill: kill.is_possible}


class MemoryKills:
    """`warn` is told about a file that cannot be read: it counts as none, and the next kill replaces it."""

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
        """In place of those that are there; none removes the file. Raises VolumeError."""
        path = self._path(key)
        with self._files.locked(key.id), refusing(f"memory kill cannot be kept: {path}"):
            self._files.drop_leftovers(key.id)
            if not kills:
                self._files.remove(path)
                return
            document = {"kills": [asdict(kill) for kill in kills[-KEPT_MAX:]]}
            self._files.put(path, json.dumps(document, sort_keys=True).encode())

    def forget(self, id_: str) -> None:
        """Under the profile's lock. Raises OSError."""
        self._files.remove(self._files.path(id_, ".kills"))

    def _path(self, key: Key) -> Path:
        return self._files.path(key.id, ".kills")


def parse_kills(data: bytes) -> tuple[MemoryKill, ...]:
    """Raises ValueError for what `keep` did not write."""
    document = load(data.decode())
    if document.keys() != {"kills"} or not isinstance(document["kills"], list):
        message = f"it has no list of kills: {', '.join(document)}"
        raise ValueError(message)
    return tuple(read(MemoryKill, each, rules=_RULES) for each in document["kills"])
