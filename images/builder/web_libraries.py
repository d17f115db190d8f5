"""Fetches the libraries of the pages by their lock: npm's tarballs, of which few files are taken.

    python3 web_libraries.py LOCK FOLDER [LICENSES] [--tarballs FOLDER] [--ca FILE]

Each tarball has to have the lock's SHA-512, and each file taken its SHA-256. Files land flat in FOLDER, license texts
in LICENSES/NAME/. With --tarballs nothing is fetched that lies there. Standard library only: it runs in an image's
build and in a checkout alike.
"""

from __future__ import annotations

import argparse
import base64
import hashlib
import io
import json
import os
import re
import ssl
import sys
import tarfile
import urllib.error
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from typing import Any

TARBALL_BYTES_MAX = 32 * 2**20
FILE_BYTES_MAX = 4 * 2**20
TIMEOUT_S = 60
FLAT = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
SOURCE_MAP = re.compile(rb"^//# sourceMappingURL=.*\n?|/\*# sourceMappingURL=.*?\*/\n?", re.MULTILINE)


class LibraryError(Exception):
    """Says what is wrong with a lock, a tarball or a file."""


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("lock", type=Path)
    parser.add_argument("folder", type=Path)
    parser.add_argument("licenses", type=Path, nargs="?")
    parser.add_argument("--tarballs", type=Path, help="folder with tarballs fetched before")
    parser.add_argument("--ca", type=Path, help="certificates to trust, in PEM; ignored if empty")
    options = parser.parse_args()
    try:
        for library in json.loads(options.lock.read_text("utf-8"))["libraries"]:
            data = tarball(library, options.tarballs, options.ca)
            take(library, data, options.folder, options.licenses)
    except (LibraryError, OSError, ValueError, KeyError) as error:
        print(f"error: the libraries of the pages cannot be had: {error}", file=sys.stderr)
        return 1
    return 0


def tarball(library: Mapping[str, Any], folder: Path | None, ca: Path | None) -> bytes:
    """Return the bytes of the library's tarball. Raises LibraryError if they are not those of the lock."""
    path = folder / library["url"].rpartition("/")[2] if folder else None
    data = path.read_bytes() if path and path.is_file() else fetched(library["url"], ca)
    found = "sha512-" + base64.b64encode(hashlib.sha512(data).digest()).decode()
    if found != library["integrity"]:
        message = f"{library['url']}: the lock has {library['integrity']}, this is {found}"
        raise LibraryError(message)
    return data


def fetched(url: str, ca: Path | None) -> bytes:
    """Return what is at `url`. Raises LibraryError."""
    if not url.startswith("https://"):
        message = f"{url}: not an https address"
        raise LibraryError(message)
    context = ssl.create_default_context(cafile=str(ca) if ca and ca.is_file() and ca.stat().st_size else None)
    try:
        with urllib.request.urlopen(url, timeout=TIMEOUT_S, context=context) as answer:  # noqa: S310 - https, see above
            data: bytes = answer.read(TARBALL_BYTES_MAX + 1)
    except urllib.error.URLError as error:
        message = f"{url}: {error.reason}"
        raise LibraryError(message) from error
    if len(data) > TARBALL_BYTES_MAX:
        message = f"{url}: more than {TARBALL_BYTES_MAX // 2**20} MiB"
        raise LibraryError(message)
    return data


def members(data: bytes) -> dict[str, bytes]:
    """Return the plain files of a tarball by their paths in it. Raises LibraryError for a file that is too large."""
    found = {}
    with tarfile.open(fileobj=io.BytesIO(data), mode="r:gz") as archive:
        for member in archive:
            if not member.isfile():
                continue
            if member.size > FILE_BYTES_MAX:
                continue  # of no use to a page, and never read
            stream = archive.extractfile(member)
            if stream is not None:
                found[member.name.partition("/")[2]] = stream.read(FILE_BYTES_MAX)
    return found


def for_pages(data: bytes) -> bytes:
    """Return a file as a page loads it: with a path where the bare name of a package stands, and no source map."""
    plain = re.sub(rb"""(from\s*)(["'])preact\2""", rb"\1\2./preact.module.js\2", data)
    return SOURCE_MAP.sub(b"", plain)


def take(library: Mapping[str, Any], data: bytes, folder: Path, licenses: Path | None) -> None:
    """Write the files that the lock names. Raises LibraryError if one is missing or another than the lock's."""
    found = members(data)
    for file in library["files"]:
        name = file["name"]
        if not FLAT.fullmatch(name):
            message = f"{library['name']}: {name!r} is no plain file name"
            raise LibraryError(message)
        if file["path"] not in found:
            message = f"{library['name']} {library['version']} has no file {file['path']}"
            raise LibraryError(message)
        body = for_pages(found[file["path"]])
        sha256 = hashlib.sha256(body).hexdigest()
        if sha256 != file["sha256"]:
            message = f"{library['name']}: {file['path']} is {sha256}, the lock has {file['sha256']}"
            raise LibraryError(message)
        _write(folder / name, body)
    if licenses is not None:
        text = found.get(library["license_file"])
        if text is None:
            message = f"{library['name']} {library['version']} has no file {library['license_file']}"
            raise LibraryError(message)
        _write(licenses / library["name"].replace("/", "-").lstrip("@") / "LICENSE", text)


def _write(path: Path, body: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(body)
    path.chmod(0o644)
    os.utime(path, (0, 0))


if __name__ == "__main__":
    raise SystemExit(main())
