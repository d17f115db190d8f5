"""Reads OCI archives: a platform's manifest, its configuration and layers, and its attestations."""

from __future__ import annotations

import json
import tarfile
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from images.errors import VerificationError

# BuildKit hangs an image's attestations beside it in the index, as a manifest that carries this annotation.
ABOUT = "vnd.docker.reference.digest"


@dataclass(frozen=True, kw_only=True)
class Contents:
    """Contents of an archive. `index` is the digest that a tag would name; the manifest's own without attestations."""

    index: str
    manifest: str
    statements: tuple[Mapping[str, Any], ...]  # in-toto


@contextmanager
def opened(archive: Path) -> Iterator[tarfile.TarFile]:
    """Raises VerificationError if it is no archive at all, or turns out to be cut or to lack what one must hold."""
    try:
        with tarfile.open(archive) as tar:
            yield tar
    except (OSError, EOFError, tarfile.TarError, zlib.error) as error:
        message = f"not an OCI archive: {archive}: {' '.join(str(error).split())}"
        raise VerificationError(message) from error
    except (AttributeError, KeyError, TypeError) as error:  # whoever wrote it: JSON of another form
        message = f"not an OCI archive: {archive}: its documents are not of the form that they must have: {error!r}"
        raise VerificationError(message) from error


def read(tar: tarfile.TarFile, platform: str | None = None) -> Contents:
    """Reads the only image of an archive, or that of `platform`. Raises VerificationError for none or several."""
    top = _one(json_file(tar, "index.json").get("manifests") or [], tar, None)
    document = json_blob(tar, str(top["digest"]))
    if "manifests" not in document:
        return Contents(index=str(top["digest"]), manifest=str(top["digest"]), statements=())
    return read_index(tar, str(top["digest"]), document, platform)


def read_index(tar: tarfile.TarFile, index: str, document: Mapping[str, Any], platform: str | None) -> Contents:
    manifest = str(_one(document["manifests"], tar, platform)["digest"])
    said = [entry for entry in document["manifests"] if (entry.get("annotations") or {}).get(ABOUT) == manifest]
    layers = [layer for entry in said for layer in json_blob(tar, str(entry["digest"]))["layers"]]
    statements = tuple(json_blob(tar, str(layer["digest"])) for layer in layers)
    return Contents(index=index, manifest=manifest, statements=statements)


def platform_manifests(entries: list[Mapping[str, Any]], platform: str | None) -> list[Mapping[str, Any]]:
    """Returns the images of an index without their attestations, for one platform if it is named."""
    images = [entry for entry in entries if ABOUT not in (entry.get("annotations") or {})]
    return [entry for entry in images if platform is None or _platform(entry) in (platform, "")]


def manifest_of(tar: tarfile.TarFile, platform: str | None = None) -> dict[str, Any]:
    return json_blob(tar, read(tar, platform).manifest)


def compressed_bytes(document: Mapping[str, Any]) -> int:
    """Returns what a registry sends for a platform's manifest: the bytes of its configuration and its layers."""
    return sum(int(part["size"]) for part in (document["config"], *document["layers"]))


def json_blob(tar: tarfile.TarFile, digest: str) -> dict[str, Any]:
    return json_file(tar, blob(digest))


def json_file(tar: tarfile.TarFile, name: str) -> dict[str, Any]:
    try:
        found = json.load(member(tar, name))
    except ValueError as error:
        message = f"not an OCI archive: {tar.name!r}: {name}: {error}"
        raise VerificationError(message) from error
    return dict(found)


def member(tar: tarfile.TarFile, name: str) -> IO[bytes]:
    try:
        file = tar.extractfile(name)
    except KeyError:
        file = None
    if file is None:
        message = f"not an OCI archive: {tar.name!r}: {name} is missing"
        raise VerificationError(message)
    return file


def leaves(path: str, value: object) -> Iterator[tuple[str, object]]:
    """Yields every value of a JSON document by its place: `config.Labels.version`. Empty containers count as values."""
    items: list[tuple[object, object]] = []
    if isinstance(value, dict):
        items = list(value.items())
    elif isinstance(value, list):
        items = list(enumerate(value))
    if not items:
        yield path, value
    for key, inner in items:
        yield from leaves(f"{path}.{key}".removeprefix("."), inner)


def blob(digest: str) -> str:
    return f"blobs/{digest.replace(':', '/')}"


def _one(entries: list[Mapping[str, Any]], tar: tarfile.TarFile, platform: str | None) -> Mapping[str, Any]:
    images = platform_manifests(entries, platform)
    if len(images) != 1:
        which = f" for {platform}" if platform else ""
        message = f"one image{which} expected, and the archive holds {len(images)}: {tar.name!r}"
        raise VerificationError(message)
    return images[0]


def _platform(entry: Mapping[str, Any]) -> str:
    """Returns `linux/amd64`; empty if the entry does not tell."""
    said = entry.get("platform") or {}
    return f"{said['os']}/{said['architecture']}" if said else ""
