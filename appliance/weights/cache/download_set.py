"""What is to be had: files with their sizes and hashes, and the names they get in a hub cache."""

from __future__ import annotations

import hashlib

from appliance.values import dataclass


@dataclass(frozen=True, kw_only=True)
class WantedFile:
    """One file; `url` is absolute. `sha256` is None for small files that the hub keeps in git, and for plain URLs.

    `git_sha1`: the hub's hash of such a small file. `validator`: a plain URL's ETag or Last-Modified, by which a
    partial file is known to belong to the file that is there now.
    """

    path: str  # below the snapshot, with slashes
    bytes: int | None
    sha256: str | None
    url: str
    git_sha1: str | None = None
    validator: str | None = None

    @property
    def key(self) -> str:
        """Name of the blob, of its lock and of its partial file, as the hub's own client has them.

        A plain URL without a hash has no such name before it has come: its key changes with the file behind it.
        """
        return self.sha256 or self.git_sha1 or f"url-{short_hash(f'{self.url} {self.validator} {self.bytes}', 32)}"


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """The files of one model, in order: the first names the model, a projector is last.

    `revision` is a commit, or 40 digits of a hash where the source has none; `ref` the branch or tag that led there.
    """

    repo: str | None
    revision: str
    folder: str  # "models--org--name"
    files: tuple[WantedFile, ...]
    name: str  # as the user called it
    ref: str | None = None

    @property
    def bytes(self) -> int | None:
        """None where one is unknown."""
        sizes = [file.bytes for file in self.files]
        return sum(size for size in sizes if size is not None) if None not in sizes else None


def folder_of_repo(repo: str) -> str:
    return "--".join(("models", *repo.split("/")))


def folder_of_url(url: str, host: str) -> str:
    return f"models--url--{host}--{short_hash(url, 12)}"


def short_hash(text: str, digits: int) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:digits]
