"""The hub's cache on disk, `models--org--name/{blobs,refs,snapshots}`: finding whole models in it, and adding to it.

Layout and names are those of huggingface_hub 2.4.0, file_download.py: a blob is named by its sha256, or by git's sha1
for small files; a snapshot holds relative links into blobs; refs/<branch> holds a commit.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from urllib.parse import urlsplit

from appliance.errors import ConfigError
from appliance.reference import Reference, file_name, is_safe_path
from appliance.values import dataclass
from appliance.weights.quants import folder_files, gguf_sets, pick, projector_of
from appliance.weights.wanted import Wanted, WantedFile, folder_of_repo, folder_of_url

# Another user of group 0 must be able to go on, and to remove: folders hand their group on.
FOLDER_MODE = 0o2775
FILE_MODE = 0o664
_FILES_LIMIT = 10_000  # of one snapshot; the largest sets of weights have some hundreds
_SNAPSHOTS_LIMIT = 1_000
_UNKNOWN_NAMES = 64  # digits of a sha256: a blob whose name is shorter tells nothing about its content

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
    """Each missing one with FOLDER_MODE, whatever the umask is."""
    missing = []
    while folder != below and not folder.is_dir():
        missing.append(folder)
        folder = folder.parent
    for path in reversed(missing):
        with suppress(FileExistsError):  # another container was faster, and it may be another user's
            path.mkdir()
            path.chmod(FOLDER_MODE)


def is_whole(blob: Path, file: WantedFile) -> bool:
    """Whether it is there. One of another size was cut by a disk or a hand, and is fetched anew."""
    try:
        size = blob.stat().st_size
    except (FileNotFoundError, NotADirectoryError, PermissionError):
        return False  # what cannot be looked at is refused, in words, by whoever writes it
    return file.bytes in (None, size)


def ignore_unreadable(_path: Path, _error: OSError) -> None:
    """For callers that go on and fetch what they cannot read."""


def find(
    wanted: Wanted, roots: Sequence[Path], on_unreadable: OnUnreadable = ignore_unreadable
) -> tuple[Path, ...] | None:
    """Paths of all files in one snapshot of one root; None where none has all of them, whole.

    Of the wanted commit first, then of any other that holds the same bytes. What may not be read is told and passed
    over. Sizes are compared; the hash was checked when a file became a blob, whose name it is.
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
        return False  # the branch moved under a reference that stayed
    if not os.access(path, os.R_OK, effective_ids=True):
        on_unreadable(path, PermissionError(13, "Permission denied"))
        return False
    return True


def lookup(
    reference: Reference,
    roots: Sequence[Path],
    *,
    is_folder: bool = False,
    on_unreadable: OnUnreadable = ignore_unreadable,
) -> tuple[Path, ...] | None:
    """Without a network: the newest snapshot that has the whole of what is meant; None where no root has it.

    `is_folder`: a folder of safetensors is wanted, not a GGUF file. A quantization that several files bear is refused.
    """
    if reference.repo is None:
        return _lookup_url(reference.url or "", roots, on_unreadable)
    for root in roots:
        folder = RepoFolder(root=root, name=folder_of_repo(reference.repo))
        for snapshot in _newest_first(folder, reference.revision, on_unreadable):
            names = _names(snapshot)
            found = folder_files(names) if is_folder else _gguf_set(names, reference)
            if found and all(_is_readable(snapshot / name, on_unreadable) for name in found):
                return tuple(snapshot / name for name in found)
    return None


def _lookup_url(url: str, roots: Sequence[Path], on_unreadable: OnUnreadable) -> tuple[Path, ...] | None:
    """The file that came last from there."""
    for root in roots:
        folder = RepoFolder(root=root, name=folder_of_url(url, urlsplit(url).hostname or ""))
        path = folder.snapshot(read_ref(folder, "main") or "none") / file_name(url)
        if path.exists() and _is_readable(path, on_unreadable):
            return (path,)
    return None


def _gguf_set(names: Sequence[str], reference: Reference) -> tuple[str, ...]:
    sets = [each for each in gguf_sets(names) if not each.missing]
    if reference.path:
        sets = [each for each in sets if reference.path in each.paths]
    if not sets:
        return ()
    try:
        picked = pick(sets, reference.quant, reference.repo or "", lambda _: "")
    except ConfigError:  # this snapshot lacks it; another may have it
        return ()
    projector = projector_of(names)
    return (*picked.paths, projector) if projector else picked.paths


def _newest_first(folder: RepoFolder, revision: str | None, on_unreadable: OnUnreadable) -> list[Path]:
    """Of a revision that was named only that; else what `main` points to, then the others by age."""
    commit = read_ref(folder, revision or "main")
    if revision:
        return [folder.snapshot(commit or revision)]
    found = sorted(_snapshots(folder, on_unreadable), key=lambda path: path.stat().st_mtime_ns, reverse=True)
    return sorted(found, key=lambda path: path.name != commit)


def read_ref(folder: RepoFolder, name: str) -> str | None:
    """The commit that a branch or tag led to when it was last asked for."""
    try:
        text = folder.ref(name).read_text(encoding="ascii").strip()
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


def _names(snapshot: Path) -> list[str]:
    """Files that are there, links that lead nowhere left out."""
    found = []
    for path in _files(snapshot, 3):
        if path.exists():
            found.append(path.relative_to(snapshot).as_posix())
        if len(found) >= _FILES_LIMIT:
            break
    return found


def _files(folder: Path, depth: int) -> Iterator[Path]:
    try:
        entries = sorted(os.scandir(folder), key=lambda entry: entry.name)
    except OSError:  # gone since it was listed, or not for us: a snapshot that cannot be listed has no model
        return
    for entry in entries:
        if entry.is_dir(follow_symlinks=False) and depth:
            yield from _files(Path(entry.path), depth - 1)
        elif not entry.is_dir(follow_symlinks=False):
            yield Path(entry.path)


def _is_readable(path: Path, on_unreadable: OnUnreadable) -> bool:
    if os.access(path, os.R_OK, effective_ids=True):
        return True
    on_unreadable(path, PermissionError(13, "Permission denied"))
    return False


def link_snapshot(wanted: Wanted, folder: RepoFolder, blobs: Sequence[Path]) -> tuple[Path, ...]:
    """Links all files of a whole set, the first last: by its name a model is found, and then it is complete."""
    snapshot = folder.snapshot(wanted.revision)
    paths = tuple(snapshot / file.path for file in wanted.files)
    for path, blob in reversed(tuple(zip(paths, blobs, strict=True))):
        make_folders(path.parent, below=folder.root)
        _link(path, os.path.relpath(blob, path.parent))
    if wanted.ref and wanted.ref != wanted.revision:
        _write_ref(folder, wanted.ref, wanted.revision)
    return paths


def keep_ref(wanted: Wanted, folder: RepoFolder) -> None:
    """Where the snapshot is there: the branch that led to it may have pointed elsewhere, or be damaged. Raises
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
