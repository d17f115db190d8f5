"""The memory peak of a served plan: `<id>.peak`, beside the profile of the same key or where there is none."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict

from appliance.documents import Rules, load, read
from appliance.plan import CardPeak, MemoryPeak
from appliance.profile.files import ProfileFiles, refusing
from appliance.profile.record import Key, parse_plan

_RULES: Rules = {
    CardPeak: lambda card: card.is_possible,
    MemoryPeak: lambda peak: (
        tuple(card.device for card in peak.cards) == tuple(share.gpu.id for share in peak.plan.placement.shares)
    ),
}


class MemoryPeaks:
    """By the profile's id, which changes with the schema. `warn` is told about a file that cannot be read."""

    def __init__(self, files: ProfileFiles, warn: Callable[[str], None]) -> None:
        self._files = files
        self._warn = warn

    def kept(self, key: Key) -> MemoryPeak | None:
        """Changes nothing: what cannot be read is said, and counts as none until another is kept."""
        path = self._files.path(key.id, ".peak")
        try:
            return parse_peak(self._files.read(path))
        except FileNotFoundError:
            return None
        except OSError as error:
            self._warn(f"memory peak of an earlier start cannot be read, not used: {path}: {error.strerror}")
        except ValueError as error:
            self._warn(f"memory peak of an earlier start cannot be read, not used: {path}: {error}")
        return None

    def keep(self, key: Key, peak: MemoryPeak) -> MemoryPeak:
        """With what is there, which another container may have kept; returns both as one. A file that cannot be read is
        set aside. Raises VolumeError."""
        path = self._files.path(key.id, ".peak")
        with self._files.locked(key.id), refusing(f"memory peak cannot be kept: {path}"):
            self._files.drop_leftovers(key.id)
            try:
                before = parse_peak(self._files.read(path))
            except FileNotFoundError:
                before = None
            except ValueError as error:
                before = None
                aside = path.with_suffix(".peak-corrupt")
                self._files.rename(path, aside)
                self._warn(f"memory peak of an earlier start set aside as {aside.name}: {error}")
            merged = peak.merged_with(before)
            if merged != before:
                self._files.put(path, json.dumps(asdict(merged), sort_keys=True).encode())
        return merged

    def forget(self, id_: str) -> None:
        """Under the profile's lock. Raises OSError."""
        self._files.remove(self._files.path(id_, ".peak"))


def parse_peak(data: bytes) -> MemoryPeak:
    """Raises ValueError for what `keep` did not write."""
    return read(MemoryPeak, load(data.decode()), rules=_RULES, plan=parse_plan)
