"""Limits and errors for searching folders of models."""

from __future__ import annotations

import os
from pathlib import Path

from appliance.errors import ModelUnreadableError, printable

ENTRIES_LIMIT = 50_000  # a larger folder is no folder of models, and a start must not wait for it


def unreadable(folder: Path, error: OSError) -> ModelUnreadableError:
    message = f"folder of models cannot be read: {printable(str(folder))}: {(error.strerror or str(error)).lower()}"
    hint = f"make it readable for user {os.getuid()} or group {os.getgid()} of the container"
    return ModelUnreadableError(message, hint=hint)


def why_no_target(path: Path) -> ModelUnreadableError | None:
    """Return an error for a link whose target is missing; None for anything else.

    Common cause: a hub cache links from snapshots/ into blobs/, and only one of the two folders was mounted.
    """
    try:
        target = str(path.readlink())
        if os.path.exists(path):  # noqa: PTH110 - pathlib's raises for what may not be looked at
            return None
    except (OSError, ValueError):  # no link; ValueError: a NUL byte
        return None
    message = f"model is a link to a missing file: {printable(str(path))} -> {printable(target)}"
    hub = ", for a Hugging Face cache the one with snapshots/ and blobs/" if "blobs" in Path(target).parts else ""
    return ModelUnreadableError(message, hint=f"mount the folder that has both the link and its target{hub}")
