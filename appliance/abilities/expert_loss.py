"""Loss of quality by fewer experts a token: `<id>.experts`, under the key of a profile; it may exist without one."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

from appliance.documents import Rules, load, read
from appliance.model.files.quantized import Loss
from appliance.profile.files import KeptResult, ProfileFiles
from appliance.profile.record import Key
from appliance.system.disk import Disk

SUFFIX = ".experts"
_RULES: Rules = {Loss: lambda loss: loss.is_finite and loss.tokens > 0}


class KeptExpertLoss:
    """Kept loss of one key. `warn` is called for an unreadable file, which counts as none and is replaced."""

    def __init__(self, folder: Path, key: Key, warn: Callable[[str], None], disk: Disk | None = None) -> None:
        files, what = ProfileFiles(folder, disk), "loss by fewer experts"
        self._kept = KeptResult(files, key.id, SUFFIX, what, lambda data: read(Loss, load(data), rules=_RULES))
        self._warn = warn

    def load(self) -> Loss | None:
        return self._kept.load(self._warn)

    def save(self, loss: Loss) -> None:
        """Replace the kept loss. Raises VolumeError."""
        self._kept.save(json.dumps(asdict(loss), sort_keys=True).encode())
