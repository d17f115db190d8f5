"""The hub's cache on disk, `models--org--name/{blobs,refs,snapshots}`: find whole models in it, and add to it.

Layout and names are those of huggingface_hub 2.4.0, file_download.py: a blob is named by its sha256, or by git's
sha1 for small files; a snapshot holds relative links into blobs; refs/<branch> holds a commit.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from appliance.reference import is_safe_path
from appliance.system.disk import read_file
from appliance.values import dataclass
from appliance.weights.cache.download_set import Wanted, WantedFile

# Another user of group 0 must be able to resume and remove: the setgid bit passes the group on to new folders.
FOLDER_MODE = 0o2775
FILE_MODE = 0o664
_REF_BYTES = 256
_SNAPSHOTS_LIMIT = 1_000
_UNKNOWN_NAMES = 64  # digits of a sha256: a blob with a shorter name is not named by a sha256

OnUnreadable = Callable[[Path, OSError], None]


@dataclass(frozen=True, kw_only=True)
class RepoFolder:
    """Paths of one repository's files in a cache."""

    root: Path
    name: str

    @property
    def path(self) -> Path:
        return self.root / self.name

    @property
    def blobs(self) -> Path:
        return self.path / "blobs"

    def blob(self, key: str) -> Path:
        return self.blobs / key

    def partial(self, key: str) -> Path:
        return self.blobs / f"{key}.incomplete"

    def lock(self, key: str) -> Path:
        return self.root / ".locks" / self.name / f"{key}.lock"

    def snapshot(self, revision: str) -> Path:
        return self.path / "snapshots" / revision

    def ref(self, name: str) -> Path:
        return self.path / "refs" / name

    def make(self) -> None:
        for folder in (self.blobs, self.path / "snapshots", self.lock("").parent):
            make_folders(folder, below=self.root)


def make_folders(folder: Path, *, below: Path) -> None:
    """Create each missing folder with FOLDER_MODE, whatever the umask is."""
    missing = []
    while folder != below and not folder.is_dir():
        missing.append(folder)
        folder = folder.parent
    for path in reversed(missing):
        with suppress(FileExistsError):  # another container created it first, possibly as another user
            path.mkdir()
            path.chmod(FOLDER_MODE)


def is_whole(blob: Path, file: WantedFile) -> bool:
    """True if the blob exists with the expected size. A blob of another size was damaged and is fetched again."""
    try:
        size = blob.stat().st_size
    except (FileNotFoundError, NotADirectoryError, PermissionError):
        return False  # an inaccessible blob counts as missing; writing it reports the error
    return file.bytes in (None, size)


def ignore_unreadable(_path: Path, _error: OSError) -> None:
    """Ignore the error, for callers that fetch what they cannot read."""


def find(
    wanted: Wanted, roots: Sequence[Path], on_unreadable: OnUnreadable = ignore_unreadable
) -> tuple[Path, ...] | None:
    """Return the paths of all files in one snapshot of one root; None if no snapshot has all of them, whole.

    The wanted commit is tried first, then other commits with the same bytes. Unreadable files are reported and
    skipped. Only sizes are compared: the hash was checked when the file became a blob.
    """
    for root in roots:
        folder = RepoFolder(root=root, name=wanted.folder)
        others = (path for path in _snapshots(folder, on_unreadable) if path.name != wanted.revision)
        for snapshot in (folder.snapshot(wanted.revision), *others):
            is_same_commit = snapshot.name == wanted.revision
            paths = tuple(snapshot / file.path for file in wanted.files)
            if all(
                _has(path, file, is_same_commit, on_unreadable) for path, file in zip(paths, wanted.files, strict=True)
            ):
                return paths
    return None


def _has(path: Path, file: WantedFile, is_same_commit: bool, on_unreadable: OnUnreadable) -> bool:
    try:
        size = path.stat().st_size
        name = path.readlink().name if path.is_symlink() else ""
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError as error:
        on_unreadable(path, error)
        return False
    is_named = name in (file.sha256, file.git_sha1) and bool(name)
    if file.bytes not in (None, size) or not (is_named or is_same_commit):
        return False
    if len(name) == _UNKNOWN_NAMES and file.sha256 and name != file.sha256:
        return False  # the branch moved to another file under the same reference
    if not os.access(path, os.R_OK, effective_ids=True):
        on_unreadable(path, PermissionError(13, "Permission denied"))
        return False
    return True


def read_ref(folder: RepoFolder, name: str) -> str | None:
    """Return the commit that the branch or tag led to when it was last queried; None if unknown."""
    try:
        text = read_file(folder.ref(name), _REF_BYTES).decode("ascii").strip()
    except (OSError, UnicodeDecodeError):
        return None
    return text if is_safe_path(text) and "/" not in text else None


def _snapshots(folder: RepoFolder, on_unreadable: OnUnreadable) -> list[Path]:
    try:
        found = [Path(entry.path) for entry in os.scandir(folder.path / "snapshots") if entry.is_dir()]
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        on_unreadable(folder.path, error)
        return []
    return sorted(found)[:_SNAPSHOTS_LIMIT]


def link_snapshot(wanted: Wanted, folder: RepoFolder, blobs: Sequence[Path]) -> tuple[Path, ...]:
    """Link all files of a complete set, the first file last: it makes the model visible, so it must come when all
    are there."""
    snapshot = folder.snapshot(wanted.revision)
    paths = tuple(snapshot / file.path for file in wanted.files)
    for path, blob in reversed(tuple(zip(paths, blobs, strict=True))):
        make_folders(path.parent, below=folder.root)
        _link(path, os.path.relpath(blob, path.parent))
    if wanted.ref and wanted.ref != wanted.revision:
        _write_ref(folder, wanted.ref, wanted.revision)
    return paths


def keep_ref(wanted: Wanted, folder: RepoFolder) -> None:
    """Write the ref if the snapshot exists: the branch may have pointed elsewhere or the ref may be damaged. Raises
    OSError."""
    ref = wanted.ref if wanted.ref != wanted.revision else None
    if ref and folder.snapshot(wanted.revision).is_dir() and read_ref(folder, ref) != wanted.revision:
        _write_ref(folder, ref, wanted.revision)


def _link(path: Path, target: str) -> None:
    if path.is_symlink() and path.readlink() == Path(target):
        return
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
    temporary.symlink_to(target)
    temporary.replace(path)


def _write_ref(folder: RepoFolder, name: str, commit: str) -> None:
    path = folder.ref(name)
    make_folders(path.parent, below=folder.root)
    temporary = path.with_name(f"{path.name}.{secrets.token_hex(4)}.tmp")
    temporary.write_text(commit, encoding="ascii")
    temporary.chmod(FILE_MODE)
    temporary.replace(path)
