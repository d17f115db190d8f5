"""What the fake hub serves: `FOLDER/org/repo/files…`, hashed as a hub hashes them."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

LFS_SUFFIXES = (".gguf", ".safetensors", ".bin")


@dataclass(frozen=True, kw_only=True)
class HubFile:
    path: str
    data_path: Path
    size: int
    sha256: str
    git_sha1: str

    @property
    def is_lfs(self) -> bool:
        return self.path.endswith(LFS_SUFFIXES)

    @property
    def etag(self) -> str:
        return self.sha256 if self.is_lfs else self.git_sha1


@dataclass(frozen=True, kw_only=True)
class Repo:
    name: str
    commit: str
    files: tuple[HubFile, ...]

    def file(self, path: str) -> HubFile | None:
        return next((file for file in self.files if file.path == path), None)

    def document(self, changes: dict[str, Any]) -> dict[str, Any]:
        """Return the answer of /api/models/ORG/REPO/revision/REV?blobs=true. `changes` are wrong sizes and hashes."""
        siblings = [_sibling(file, changes) for file in self.files]
        return {"_id": "1", "id": self.name, "modelId": self.name, "sha": self.commit, "siblings": siblings}

    def tree(self) -> list[dict[str, Any]]:
        return [
            {"type": "file", "path": file.path, "size": file.size, "oid": file.git_sha1}
            | ({"lfs": {"oid": file.sha256, "size": file.size, "pointerSize": 134}} if file.is_lfs else {})
            for file in self.files
        ]


def _sibling(file: HubFile, changes: dict[str, Any]) -> dict[str, Any]:
    """Return one file of the listing. `changes` are sizes and hashes that it reports wrongly."""
    size = file.size + changes.get("size", 0)
    row: dict[str, Any] = {"rfilename": file.path, "size": size, "blobId": file.git_sha1}
    if file.is_lfs:
        row["lfs"] = {"sha256": changes.get("sha256", file.sha256), "size": size, "pointerSize": 134}
    return row


def read_repo(folder: Path, name: str) -> Repo | None:
    """Return the repository as it is on the disk now, or None. If a test changes a file, the commit changes too."""
    place = folder / name
    if not place.is_dir() or name.count("/") != 1:
        return None
    files = tuple(
        _hashed(path, path.stat().st_mtime_ns, path.relative_to(place).as_posix())
        for path in sorted(place.rglob("*"))
        if path.is_file()
    )
    commit = hashlib.sha1("".join(f"{file.path} {file.sha256}" for file in files).encode()).hexdigest()
    return Repo(name=name, commit=commit, files=files)


def names(folder: Path) -> list[str]:
    return sorted(path.relative_to(folder).as_posix() for path in folder.glob("*/*") if path.is_dir())


@cache
def _hashed(path: Path, _modified: int, name: str) -> HubFile:
    data = path.read_bytes()
    git = hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()
    return HubFile(path=name, data_path=path, size=len(data), sha256=hashlib.sha256(data).hexdigest(), git_sha1=git)
