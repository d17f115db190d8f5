"""images/locks/SHA256SUMS: the checksum of every lock, in the form of `sha256sum -c`.

Only `lock` and `lock --debian` write a lock's line, so a lock edited by hand is found without a network. The checksums
have their own file, since a lock is an input of builds: a line in it would make every layer anew.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from pathlib import Path

from images.errors import MatrixError
from images.matrix.matrix import LOCKS

SUMS = LOCKS / "SHA256SUMS"
_ENDINGS = (".txt", ".json")


def record(root: Path, path: Path) -> None:
    """Writes the line of this lock; the lines of others stay as they are. `path` is below `root`."""
    found = {**_read(root), path.name: _sha256(root / path)}
    text = "".join(f"{sha256}  {name}\n" for name, sha256 in sorted(found.items()) if (root / LOCKS / name).is_file())
    (root / SUMS).write_text(text, "ascii")


def faults(root: Path, paths: Iterable[Path] | None = None) -> Iterator[str]:
    """Yields a line for each changed lock and each line without a lock. `paths`: only these."""
    written = _read(root)
    names = {path.name for path in (root / LOCKS).iterdir() if path.suffix in _ENDINGS}
    asked = {path.name for path in paths if path.parent == LOCKS} if paths is not None else names | set(written)
    for name in sorted(asked & (names | set(written))):
        if name not in names:
            yield f"{SUMS}: {name} is not there"
        elif name not in written:
            yield f"{LOCKS / name}: no checksum in {SUMS.name}"
        elif _sha256(root / LOCKS / name) != written[name]:
            yield f"{LOCKS / name}: not what `lock` wrote, by {SUMS.name}"


def refuse_edited(root: Path, paths: Iterable[Path]) -> None:
    """Raises MatrixError if a lock among a build's inputs is not what `lock` wrote."""
    for fault in faults(root, paths):
        raise MatrixError(fault, hint="who changed it? git log -p says; `python -m images lock` writes it anew")


def _read(root: Path) -> dict[str, str]:
    path = root / SUMS
    lines = path.read_text("ascii").splitlines() if path.is_file() else []
    return {name: sha256 for sha256, _, name in (line.partition("  ") for line in lines)}


def _sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()
