"""Looking through folders of models: how far, and what is said of one that may not be looked into."""

from __future__ import annotations

import os
from pathlib import Path

from appliance.errors import ModelUnreadableError, printable

ENTRIES_LIMIT = 50_000  # more is no folder of models, and a start must not wait for it


def unreadable(folder: Path, error: OSError) -> ModelUnreadableError:
    message = f"folder of models cannot be read: {printable(str(folder))}: {(error.strerror or str(error)).lower()}"
    hint = f"make it readable for user {os.getuid()} or group {os.getgid()} of the container"
    return ModelUnreadableError(message, hint=hint)
