"""images/locks/web.json: the libraries of the pages, by npm's tarballs. `lock --web` writes it.

The lock is its own list of what is wanted: which libraries, and which of their files under which flat names. npm tells
version, address and hash of a tarball; the hashes of the files are of what is in it.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from images import rows
from images.builder import web_libraries
from images.errors import BuildError, MatrixError
from images.matrix.matrix import LOCKS
from images.pins import lock_sums
from images.rows import Row, Text

WEB = LOCKS / "web.json"
FOLDER = "opt/appliance/web/"
"""Folder of an image that has the files."""
REGISTRY = "https://registry.npmjs.org"


class WebFile(Row):
    """A file that is taken: its path in the tarball, its flat name in the image, its SHA-256 there."""

    path: Text
    name: Text
    sha256: Text


class WebLibrary(Row):
    """A library as the lock has it. `license` is an SPDX expression."""

    name: Text
    version: Text
    license: Text
    url: Text
    integrity: Text
    license_file: Text
    files: tuple[WebFile, ...]

    @property
    def folder(self) -> str:
        """Folder of its license text."""
        return self.name.lstrip("@").replace("/", "-")


class _Lock(Row):
    libraries: tuple[WebLibrary, ...]


def libraries(root: Path) -> tuple[WebLibrary, ...]:
    """Return the libraries of the lock. Raises MatrixError if it cannot be read."""
    try:
        data = json.loads((root / WEB).read_text("utf-8"))
    except (OSError, ValueError) as error:
        message = f"the lock of the pages' libraries cannot be read: {WEB}: {error}"
        raise MatrixError(message, hint="git checkout has it") from error
    return rows.check(data, _Lock, name=WEB.as_posix(), hint="python -m images lock --web writes it").libraries


def lock(root: Path, *, ca_bundle: Path | None, upgrade: bool) -> list[str]:
    """Write the lock anew, with the newest versions if `upgrade`. Returns a line for each library."""
    found = [_locked(library, ca_bundle, upgrade=upgrade) for library in libraries(root)]
    text = json.dumps({"libraries": [each.model_dump() for each in found]}, indent=1) + "\n"
    before = {each.name: each.version for each in libraries(root)}
    (root / WEB).write_text(text, "utf-8")
    lock_sums.record(root, WEB)
    return [
        f"{each.name}: {each.version}" + (f", was {before[each.name]}" if each.version != before[each.name] else "")
        for each in found
    ]


def _locked(library: WebLibrary, ca_bundle: Path | None, *, upgrade: bool) -> WebLibrary:
    about = _asked(f"{REGISTRY}/{library.name.replace('/', '%2F')}", ca_bundle)
    try:
        version = about["dist-tags"]["latest"] if upgrade else library.version
        release = about["versions"][version]
        url, integrity, spdx = release["dist"]["tarball"], release["dist"]["integrity"], release["license"]
    except (KeyError, TypeError) as error:
        message = f"npm's answer about {library.name} lacks {error}"
        raise BuildError(message, hint="is this version still published?") from error
    try:
        data = web_libraries.tarball({"url": url, "integrity": integrity}, None, ca_bundle)
        inside = web_libraries.members(data)
        files = tuple(
            WebFile(path=file.path, name=file.name, sha256=_sha256(web_libraries.for_pages(inside[file.path])))
            for file in library.files
        )
    except (web_libraries.LibraryError, OSError) as error:
        raise BuildError(str(error), hint="the lock is as it was") from error
    except KeyError as error:
        message = f"{library.name} {version} has no file {error}"
        raise BuildError(message, hint=f"name its new path in {WEB}") from error
    return WebLibrary(
        name=library.name,
        version=version,
        license=str(spdx).strip("()"),
        url=url,
        integrity=integrity,
        license_file=library.license_file,
        files=files,
    )


def _asked(url: str, ca_bundle: Path | None) -> Mapping[str, Any]:
    try:
        found: Mapping[str, Any] = json.loads(web_libraries.fetched(url, ca_bundle))
    except (web_libraries.LibraryError, OSError, ValueError) as error:
        message = f"npm does not answer: {error}"
        raise BuildError(message, hint="behind an intercepting proxy: --ca-bundle FILE") from error
    return found


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
