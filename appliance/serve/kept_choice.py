"""What an earlier start chose: a choice takes half a second, which is not spent twice for the same question."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from appliance.probe import Hardware, fingerprint
from appliance.serve.which import Located
from appliance.settings import SETTINGS, Settings
from appliance.values import dataclass

NAME = "choice.json"
# Settings that say neither what is offered nor how it would be planned.
_OTHERS = frozenset({
    "alias", "auth", "budget_s", "data_dir", "drain_s", "engine_dir", "facts_dir", "hf_cache", "host", "idle_s", "log",
    "port", "runtime_dir", "stall_timeout_s", "tune", "workload",
})  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class KeptChoice:
    """`here` are the candidates that are on the volume, by name: with another set of them it is chosen anew."""

    folder: Path  # of the build on the volume: another image chooses anew
    settings: Settings
    hardware: Hardware
    here: Mapping[str, Located]

    def load(self) -> Located | None:
        try:
            kept = json.loads((self.folder / NAME).read_text(encoding="utf-8"))
            is_same = kept["key"] == self._key and kept["here"] == sorted(self.here)
            return self.here.get(kept["chosen"]) if is_same else None
        except (OSError, ValueError, LookupError, TypeError):  # damaged or not there: it is chosen anew
            return None

    def save(self, name: str) -> None:
        """`name` is on the volume, or was fetched just now. A volume that is full or read-only keeps nothing."""
        text = json.dumps({"key": self._key, "here": sorted({*self.here, name}), "chosen": name})
        with suppress(OSError):
            (self.folder / NAME).write_text(text, encoding="utf-8")

    @property
    def _key(self) -> str:
        asked = {name: getattr(self.settings, name) for name in SETTINGS if name not in _OTHERS}
        text = json.dumps([asked, fingerprint(self.hardware)], sort_keys=True, default=str)
        return hashlib.sha256(text.encode()).hexdigest()
