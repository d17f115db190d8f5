"""Free space on the volume: checked before a download, and gained by removing partial files that will not be
resumed."""

from __future__ import annotations

import re
import shutil
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path

from appliance.errors import VolumeError
from appliance.weights.cache.download_set import WantedFile
from appliance.weights.cache.hub_layout import RepoFolder, is_whole
from appliance.weights.cache.size import as_size
from appliance.weights.download.locks import if_free

# The volume also keeps profiles, caches and a key: a start that fills it to the last block ends with 50.
SPARED_BYTES = 16 * 2**20
KEPT_S = 7 * 86400.0  # a partial file that was not resumed for a week is removed
_PARTIAL = re.compile(r"(?P<key>[\w-]{8,80}?)(?P<unique>\.[0-9a-f]{8})?\.incomplete")


def bytes_missing(files: Iterable[WantedFile], folder: RepoFolder) -> int:
    """Bytes still to fetch, as far as sizes are known; existing blobs and partial files are subtracted."""
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
    """Raise VolumeError, with figures, if the missing files do not fit. Files of unknown size count as 0."""
    if missing := bytes_missing(files, folder):
        hint = "remove models that are not served (`appliance models list`, `models remove`), or take a smaller one"
        refuse_full(folder.root, missing, what, hint)


def refuse_full(folder: Path, needed: int, what: str, hint: str) -> None:
    """Raise VolumeError, with figures, if so many bytes do not fit beside SPARED_BYTES."""
    free = shutil.disk_usage(folder).free
    if needed + SPARED_BYTES > free:
        message = (
            f"volume has no room for {what}: {folder}: {as_size(free)} free, {as_size(needed + SPARED_BYTES)} needed"
        )
        raise VolumeError(message, hint=hint)


def drop_orphans(folder: RepoFolder, wanted: Iterable[WantedFile]) -> int:
    """Remove partial files that will not be resumed, and return their bytes.

    These are partial files of a blob that is complete, of a run of the hub's own client (it never resumes, and is
    gone if its lock is free), and those not changed for a week. Partial files of the wanted files stay.
    """
    keys = {file.key for file in wanted}
    freed = 0
    for path in folder.blobs.glob("*.incomplete"):
        found = _PARTIAL.fullmatch(path.name)
        if found and not (found["key"] in keys and not found["unique"]):
            freed += _drop(path, found, folder)
    return freed


def _drop(path: Path, found: re.Match[str], folder: RepoFolder) -> int:
    # A file that is inaccessible, another user's or just gone must not stop the download; the next run tries it again.
    with suppress(OSError), if_free(folder.lock(found["key"])) as is_free:
        status = path.stat()
        is_done = bool(found["unique"]) or folder.blob(found["key"]).exists()
        if is_free and (is_done or time.time() - status.st_mtime > KEPT_S):
            path.unlink()
            return status.st_size
    return 0
