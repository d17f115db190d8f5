"""Abilities on the volume: `<id>.abilities`, under the key of a profile; the file may exist without a profile."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from appliance.abilities.record import Abilities, dump_abilities, parse_abilities
from appliance.profile.files import KeptResult, ProfileFiles
from appliance.system.disk import Disk

SUFFIX = ".abilities"


class KeptAbilities:
    """Kept results of one key. `warn` is called for an unreadable file, which counts as none and is replaced."""

    def __init__(self, folder: Path, id_: str, warn: Callable[[str], None], disk: Disk | None = None) -> None:
        files, what = ProfileFiles(folder, disk), "abilities of this model"
        self._kept = KeptResult(files, id_, SUFFIX, what, parse_abilities)
        self._warn = warn

    def load(self, of: str) -> Abilities:
        """Return the kept results; none if they depend on something else than `of`. Changes nothing."""
        found = self._kept.load(self._warn)
        return found if found is not None and found.of == of else Abilities(of=of)

    def save(self, found: Abilities) -> None:
        """Replace the kept results. Raises VolumeError."""
        self._kept.save(dump_abilities(found).encode())
