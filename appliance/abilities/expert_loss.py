"""Loss of quality by fewer experts a token: `<id>.experts`, under the key of a profile; it may exist without one."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

from appliance.documents import Rules, load, read
from appliance.model.files.quantized import Loss
from appliance.profile.files import ProfileFiles, refusing
from appliance.profile.record import Key
from appliance.system.disk import Disk

SUFFIX = ".experts"
_RULES: Rules = {Loss: lambda loss: loss.is_finite and loss.tokens > 0}


class KeptExpertLoss:
    """Kept loss of one key. `warn` is called for an unreadable file, which counts as none and is replaced."""

    def __init__(self, folder: Path, key: Key, warn: Callable[[str], None], disk: Disk | None = None) -> None:
        self._files = ProfileFiles(folder, disk)
        self._id = key.id
        self._path = self._files.path(key.id, SUFFIX)
        self._warn = warn

    def load(self) -> Loss | None:
        try:
            return read(Loss, load(self._files.read(self._path)), rules=_RULES)
        except FileNotFoundError:
            return None
        except (OSError, ValueError) as error:
            self._warn(f"loss by fewer experts cannot be read, not used: {self._path}: {error}")
        return None

    def save(self, loss: Loss) -> None:
        """Replace the kept loss. Raises VolumeError."""
        with self._files.locked(self._id), refusing(f"loss by fewer experts cannot be kept: {self._path}"):
            self._files.drop_leftovers(self._id)
            self._files.put(self._path, json.dumps(asdict(loss), sort_keys=True).encode())
