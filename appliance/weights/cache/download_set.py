"""The files to fetch, with sizes and hashes, and their names in a hub cache."""

from __future__ import annotations

import hashlib

from appliance.values import dataclass


@dataclass(frozen=True, kw_only=True)
class WantedFile:
    """One file; `url` is absolute.

    `sha256` is None for plain URLs, and for small files that the hub keeps in git; `git_sha1` is the hub's hash of
    such a small file. `validator` is a plain URL's ETag or Last-Modified; it shows whether a partial file still
    belongs to the file at the URL. `registry` is the host of the container registry that has the file: requests carry
    that registry's login, and never the hub's token.
    """

    path: str  # below the snapshot, with slashes
    bytes: int | None
    sha256: str | None
    url: str
    git_sha1: str | None = None
    validator: str | None = None
    registry: str | None = None

    @property
    def key(self) -> str:
        """Name of the blob, its lock and its partial file, as in the hub's own client.

        A plain URL without a hash has no such name before the download ends, so its key is made from address,
        validator and size.
        """
        return self.sha256 or self.git_sha1 or f"url-{short_hash(f'{self.url} {self.validator} {self.bytes}', 32)}"


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """The files of one model, in order: the first names the model, a projector is last.

    `revision` is a commit, or 40 digits of a hash if the source has none. `ref` is the branch or tag that led to it.
    """

    repo: str | None
    revision: str
    folder: str  # "models--org--name"
    files: tuple[WantedFile, ...]
    name: str  # as the user called it
    ref: str | None = None

    @property
    def bytes(self) -> int | None:
        """Total size; None if the size of a file is unknown."""
        sizes = [file.bytes for file in self.files]
        return sum(size for size in sizes if size is not None) if None not in sizes else None


def folder_of_repo(repo: str) -> str:
    return "--".join(("models", *repo.split("/")))


def folder_of_url(url: str, host: str) -> str:
    return f"models--url--{host}--{short_hash(url, 12)}"


def short_hash(text: str, digits: int) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:digits]
