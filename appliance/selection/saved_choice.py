"""The choice of an earlier start, saved on the volume: choosing takes half a second, and is not repeated."""

from __future__ import annotations

import hashlib
import json
import secrets
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from appliance.documents import load
from appliance.probe import Hardware, fingerprint
from appliance.settings import SETTINGS, Settings
from appliance.start.inputs import Located
from appliance.system.disk import read_file
from appliance.values import dataclass

NAME = "choice.json"
_MOST_BYTES = 2**20
# Settings that change neither the candidates nor their plans.
_OTHERS = frozenset({
    "alias", "auth", "budget_s", "data_dir", "drain_s", "engine_dir", "facts_dir", "hf_cache", "host", "idle_s", "log",
    "port", "runtime_dir", "stall_timeout_s", "tune", "workload",
})  # fmt: skip
# Free memory always varies a little. A smaller change seldom decides for another model, and choosing takes half a
# second.
_ROOM_MIB = 1024
_ROOM_SHARE = 0.125


@dataclass(frozen=True, kw_only=True)
class Better:
    """The candidate that would have been chosen if the chosen one had not been here."""

    name: str
    bytes: int
    is_here: bool


@dataclass(frozen=True, kw_only=True)
class Saved:
    """A saved choice. `is_current` is True if machine and room are unchanged: the choice would be the same now."""

    name: str
    located: Located
    better: Better | None
    is_current: bool


@dataclass(frozen=True, kw_only=True)
class SavedChoice:
    """Access to the saved choice. `here` are the candidates on the volume by name; another set makes it invalid."""

    folder: Path  # of this build on the volume: another image chooses anew
    settings: Settings
    hardware: Hardware
    here: Mapping[str, Located]

    def load(self) -> Saved | None:
        """Return the choice; None if it was made for other settings or files, or cannot be read."""
        try:
            kept = load(read_file(self.folder / NAME, _MOST_BYTES))
            if kept["asked"] != self._asked or kept["here"] != _stamps(self.here):
                return None
            return Saved(
                name=kept["chosen"],
                located=self.here[kept["chosen"]],
                better=Better(**kept["better"]) if kept["better"] else None,
                is_current=kept["machine"] == self._machine and not _is_other_room(kept["room"], self._room),
            )
        except (OSError, ValueError, LookupError, TypeError, AttributeError):
            return None  # damaged, of an older version, or missing: chosen anew

    def save(self, name: str, located: Located, *, better: Better | None = None, fetched_bytes: int = 0) -> None:
        """Save a choice. `located` is on the volume; fetching it took `fetched_bytes` of the room seen before.

        A volume that is full or read-only keeps nothing.
        """
        room = self._room
        if room["volume"] is not None:
            room["volume"] -= fetched_bytes // 2**20
        kept = {
            "asked": self._asked,
            "machine": self._machine,
            "room": room,
            "here": _stamps({**self.here, name: located}),
            "chosen": name,
            "better": asdict(better) if better else None,
        }
        temporary = self.folder / f".{NAME}.{secrets.token_hex(4)}"  # replaces any file there, even a pipe
        with suppress(OSError):
            try:
                temporary.write_text(json.dumps(kept), encoding="utf-8")
                temporary.replace(self.folder / NAME)
            finally:
                temporary.unlink(missing_ok=True)

    @property
    def _asked(self) -> str:
        return _hash({name: getattr(self.settings, name) for name in SETTINGS if name not in _OTHERS})

    @property
    def _machine(self) -> str:
        return _hash([fingerprint(self.hardware), self.hardware.speeds])

    @property
    def _room(self) -> dict[str, int | None]:
        """The free MiB of volume, memory and GPUs."""
        gpus = {f"gpu {gpu.pci_bus_id or gpu.index}": gpu.vram_free_mib for gpu in self.hardware.gpus.gpus}
        return {"volume": self.hardware.volume.free_mib, "memory": self.hardware.memory.usable_mib, **gpus}


def _stamps(here: Mapping[str, Located]) -> dict[str, list[int]]:
    """Return size and time of each file: one that was written anew may be another one, or damaged."""
    return {name: _stamp(located.path) for name, located in here.items()}


def _stamp(path: Path) -> list[int]:
    try:
        found = path.stat()
    except OSError:
        return []
    return [found.st_size, found.st_mtime_ns]


def _is_other_room(then: Mapping[str, int | None], now: Mapping[str, int | None]) -> bool:
    """True if free memory or room changed so much that another model may be the best.

    Less room on the volume does not count: the chosen model is on it.
    """
    return then.keys() != now.keys() or any(_is_other(name, then[name], now[name]) for name in now)


def _is_other(name: str, then: int | None, now: int | None) -> bool:
    if then is None or now is None:
        return then is not now
    change = now - then if name == "volume" else abs(now - then)
    return change > max(_ROOM_MIB, _ROOM_SHARE * then)


def _hash(document: Any) -> str:  # noqa: ANN401 - JSON, and what str() makes of the rest
    text = json.dumps(document, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()
