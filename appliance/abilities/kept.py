"""Abilities on the volume: `<id>.abilities`, under the key of a profile; the file may exist without a profile."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from appliance.abilities.record import Abilities, dump_abilities, parse_abilities
from appliance.profile.files import ProfileFiles, refusing
from appliance.system.disk import Disk

SUFFIX = ".abilities"


class KeptAbilities:
    """Kept results of one key. `warn` is called for an unreadable file, which counts as none and is replaced."""

    def __init__(self, folder: Path, id_: str, warn: Callable[[str], None], disk: Disk | None = None) -> None:
        self._files = ProfileFiles(folder, disk)
        self._id = id_
        self._path = self._files.path(id_, SUFFIX)
        self._warn = warn

    def load(self, of: str) -> Abilities:
        """Return the kept results; none if they depend on something else than `of`. Changes nothing."""
        try:
            found = parse_abilities(self._files.read(self._path))
        except FileNotFoundError:
            return Abilities(of=of)
        except (OSError, ValueError) as error:
            self._warn(f"abilities of this model cannot be read, not used: {self._path}: {error}")
            return Abilities(of=of)
        return found if found.of == of else Abilities(of=of)

    def save(self, found: Abilities) -> None:
        """Replace the kept results. Raises VolumeError."""
        with self._files.locked(self._id), refusing(f"abilities of this model cannot be kept: {self._path}"):
            self._files.drop_leftovers(self._id)
            self._files.put(self._path, dump_abilities(found).encode())
