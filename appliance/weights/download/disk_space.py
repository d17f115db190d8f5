"""Room on the volume: checked before a byte is fetched, and taken back from partial files that nobody will finish."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path

from appliance.errors import VolumeError
from appliance.weights.cache.download_set import WantedFile
from appliance.weights.cache.hub_layout import RepoFolder, is_whole
from appliance.weights.cache.size import as_size
from appliance.weights.download.locks import if_free

# Beside weights the volume keeps profiles, caches and a key: a start that fills it to the last block ends with 50.
SPARED_BYTES = 16 * 2**20
KEPT_S = 7 * 86400.0  # a partial file that nobody went on with for a week
_PARTIAL = re.compile(r"(?P<key>[\w-]{8,80}?)(?P<unique>\.[0-9a-f]{8})?\.incomplete")


def bytes_missing(files: Iterable[WantedFile], folder: RepoFolder) -> int:
    """What is to be fetched, as far as sizes are known; blobs and partial files that are there are subtracted."""
    missing = 0
    for file in files:
        if not is_whole(folder.blob(file.key), file):
            missing += max(0, (file.bytes or 0) - size_of(folder.partial(file.key)))
    return missing


def size_of(path: Path) -> int:
    try:
        return path.stat().st_size
    except (FileNotFoundError, NotADirectoryError, PermissionError):
        return 0


def check_room(files: Sequence[WantedFile], folder: RepoFolder, what: str) -> None:
    """VolumeError, with figures, where the rest of the set does not fit. Of unknown sizes nothing is demanded."""
    missing = bytes_missing(files, folder)
    status = os.statvfs(folder.root)
    free = status.f_bavail * status.f_frsize
    if missing and missing + SPARED_BYTES > free:
        message = (
            f"volume has no room for {what}: {folder.root}: {as_size(free)} are free, "
            f"{as_size(missing + SPARED_BYTES)} are needed"
        )
        hint = "remove models that are not served (`appliance models list`, `models remove`), or take a smaller one"
        raise VolumeError(message, hint=hint)


def drop_orphans(folder: RepoFolder, wanted: Iterable[WantedFile]) -> int:
    """Removes partial files that nobody will go on with; returns their bytes.

    Those are: of a blob that is there by now; of a run of the hub's own client, which never resumes and is gone when
    its lock is free; and those that nobody touched for a week. Of the wanted files none goes.
    """
    keys = {file.key for file in wanted}
    freed = 0
    for path in folder.blobs.glob("*.incomplete"):
        found = _PARTIAL.fullmatch(path.name)
        if found and not (found["key"] in keys and not found["unique"]):
            freed += _drop(path, found, folder)
    return freed


def _drop(path: Path, found: re.Match[str], folder: RepoFolder) -> int:
    # What may not be looked at, belongs to somebody else or is just gone: no reason not to fetch, and seen again.
    with suppress(OSError), if_free(folder.lock(found["key"])) as is_free:
        status = path.stat()
        is_done = bool(found["unique"]) or folder.blob(found["key"]).exists()
        if is_free and (is_done or time.time() - status.st_mtime > KEPT_S):
            path.unlink()
            return status.st_size
    return 0
