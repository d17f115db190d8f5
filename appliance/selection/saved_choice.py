"""What an earlier start chose: a choice takes half a second, which is not spent twice for the same question."""

from __future__ import annotations

import hashlib
import json
import secrets
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from appliance.disk import read_file
from appliance.documents import load
from appliance.probe import Hardware, fingerprint
from appliance.settings import SETTINGS, Settings
from appliance.start.inputs import Located
from appliance.values import dataclass

NAME = "choice.json"
_MOST_BYTES = 2**20
# Settings that say neither what is offered nor how it would be planned.
_OTHERS = frozenset({
    "alias", "auth", "budget_s", "data_dir", "drain_s", "engine_dir", "facts_dir", "hf_cache", "host", "idle_s", "log",
    "port", "runtime_dir", "stall_timeout_s", "tune", "workload",
})  # fmt: skip
# Free memory goes up and down by itself; less than this of it decides for another model seldom, and looking costs
# half a second.
_ROOM_MIB = 1024
_ROOM_SHARE = 0.125


@dataclass(frozen=True, kw_only=True)
class Better:
    """What would have been chosen if the chosen one had not been there."""

    name: str
    bytes: int
    is_here: bool


@dataclass(frozen=True, kw_only=True)
class Saved:
    """`is_current`: machine and room are as they were, so that nothing else would be chosen now."""

    name: str
    located: Located
    better: Better | None
    is_current: bool


@dataclass(frozen=True, kw_only=True)
class SavedChoice:
    """`here` are the candidates that are on the volume, by name: with another set of them it is chosen anew."""

    folder: Path  # of the build on the volume: another image chooses anew
    settings: Settings
    hardware: Hardware
    here: Mapping[str, Located]

    def load(self) -> Saved | None:
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
            return None  # damaged, of an older version, or not there: it is chosen anew

    def save(self, name: str, located: Located, *, better: Better | None = None, fetched_bytes: int = 0) -> None:
        """`located` is on the volume, or came just now and took `fetched_bytes` of its room. A volume that is full or
        read-only keeps nothing."""
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
        temporary = self.folder / f".{NAME}.{secrets.token_hex(4)}"  # whatever lies there, a pipe too, is replaced
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
        """MiB that are free now."""
        gpus = {f"gpu {gpu.pci_bus_id or gpu.index}": gpu.vram_free_mib for gpu in self.hardware.gpus.gpus}
        return {"volume": self.hardware.volume.free_mib, "memory": self.hardware.memory.usable_mib, **gpus}


def _stamps(here: Mapping[str, Located]) -> dict[str, list[int]]:
    """A file that was written anew may be another one, or damaged."""
    return {name: _stamp(located.path) for name, located in here.items()}


def _stamp(path: Path) -> list[int]:
    try:
        found = path.stat()
    except OSError:
        return []
    return [found.st_size, found.st_mtime_ns]


def _is_other_room(then: Mapping[str, int | None], now: Mapping[str, int | None]) -> bool:
    """Whether so much more or less is free that another model may be the best. Less on the volume is no matter: what
    was chosen is on it."""
    return then.keys() != now.keys() or any(_is_other(name, then[name], now[name]) for name in now)


def _is_other(name: str, then: int | None, now: int | None) -> bool:
    if then is None or now is None:
        return then is not now
    change = now - then if name == "volume" else abs(now - then)
    return change > max(_ROOM_MIB, _ROOM_SHARE * then)


def _hash(document: Any) -> str:  # noqa: ANN401 - JSON, and what str() makes of the rest
    text = json.dumps(document, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()
