"""Builds a cell twice without a cache and compares: same manifest digest, or the first place where they differ."""

from __future__ import annotations

import hashlib
import json
import tarfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import zip_longest
from pathlib import Path
from typing import IO, Any

from images import docker
from images.build import Job, buildx_argv, explain_failure, manifest_digest
from images.errors import BuildError, VerificationError

CHUNK_BYTES = 1 << 20
ABSENT = "absent"
CONFIGURATION = "configuration"


@dataclass(frozen=True, kw_only=True)
class Difference:
    """The first place where two images differ. Of a file the hashes cover its header and its content."""

    layer: int | None  # 0 is the base; None: its configuration or manifest
    path: str
    what: str  # `content`, `mtime 1 and 2` …
    first: str
    second: str

    def __str__(self) -> str:
        where = CONFIGURATION if self.layer is None else f"layer {self.layer}"
        return f"{where}: {self.path}: {self.what}: {self.first} and {self.second}"


@dataclass(frozen=True, kw_only=True)
class Reproduction:
    cell: str
    first: str  # manifest digests
    second: str
    difference: Difference | None

    @property
    def is_same(self) -> bool:
        return self.first == self.second


@dataclass(frozen=True, kw_only=True)
class _Member:
    path: str
    header: Mapping[str, object]
    content: str  # SHA-256

    @property
    def hash(self) -> str:
        return hashlib.sha256(json.dumps([self.header, self.content], sort_keys=True).encode()).hexdigest()


def reproduce(root: Path, job: Job, engine: docker.Engine, *, stages: tuple[str, ...] = ()) -> Reproduction:
    """Builds twice, each step again; of `stages` only, if some are named. BuildError when it cannot be built.

    Nothing is loaded into the engine, and both archives are gone when this returns.
    """
    if engine.platform not in job.cell.platforms:
        message = f"cell {job.cell.id} cannot be reproduced here: the engine is {engine.platform}"
        raise BuildError(message, hint=f"it is for {', '.join(job.cell.platforms)}")
    archives = [job.archive.with_name(f"{job.cell.id}.{number}.oci.tar") for number in (1, 2)]
    job.archive.parent.mkdir(parents=True, exist_ok=True)
    try:
        for archive in archives:
            _export(root, replace(job, archive=archive), stages)
        first, second = (manifest_digest(archive) for archive in archives)
        difference = None if first == second else compare(*archives)
    finally:
        for archive in archives:
            archive.unlink(missing_ok=True)
    return Reproduction(cell=job.cell.id, first=first, second=second, difference=difference)


def uncached_argv(job: Job, stages: tuple[str, ...]) -> tuple[str, ...]:
    """The build's own command, with every step run again, or every step of these stages."""
    if not stages:
        return buildx_argv(replace(job, no_cache=True))
    *words, context = buildx_argv(replace(job, no_cache=False))
    return (*words, "--no-cache-filter", ",".join(stages), context)


def compare(first: Path, second: Path) -> Difference | None:
    """The first difference of two OCI archives, layers before configuration; None when their manifests are the same.

    VerificationError when one of them is no OCI archive of a single image.
    """
    with _opened(first) as one, _opened(second) as two:
        manifests = [_manifest(tar) for tar in (one, two)]
        left, right = ([str(layer["digest"]) for layer in manifest["layers"]] for manifest in manifests)
        for number, (before, after) in enumerate(zip_longest(left, right, fillvalue=ABSENT)):
            if before != after:
                return _layer_difference(number, (one, two), (before, after))
        configs = [_json(tar, str(found["config"]["digest"])) for tar, found in zip((one, two), manifests, strict=True)]
        return _value_difference(*configs) or _value_difference(*manifests)


def _export(root: Path, job: Job, stages: tuple[str, ...]) -> None:
    finished = docker.stream(uncached_argv(job, stages), cwd=root)
    if finished.code != 0:
        raise explain_failure(job.cell, finished.lines)


def _opened(archive: Path) -> tarfile.TarFile:
    try:
        return tarfile.open(archive)
    except (OSError, tarfile.TarError) as error:
        message = f"not an OCI archive: {archive}: {error}"
        raise VerificationError(message) from error


def _manifest(tar: tarfile.TarFile) -> dict[str, Any]:
    index = _json_file(tar, "index.json")
    if len(index["manifests"]) != 1:
        message = f"one image expected, and the archive holds {len(index['manifests'])}: {tar.name!r}"
        raise VerificationError(message)
    return _json(tar, str(index["manifests"][0]["digest"]))


def _json(tar: tarfile.TarFile, digest: str) -> dict[str, Any]:
    return _json_file(tar, _blob(digest))


def _json_file(tar: tarfile.TarFile, name: str) -> dict[str, Any]:
    try:
        found = json.load(_read(tar, name))
    except ValueError as error:
        message = f"not an OCI archive: {tar.name!r}: {name}: {error}"
        raise VerificationError(message) from error
    return dict(found)


def _read(tar: tarfile.TarFile, name: str) -> IO[bytes]:
    try:
        file = tar.extractfile(name)
    except KeyError:
        file = None
    if file is None:
        message = f"not an OCI archive: {tar.name!r}: {name} is missing"
        raise VerificationError(message)
    return file


def _blob(digest: str) -> str:
    return f"blobs/{digest.replace(':', '/')}"


def _layer_difference(
    number: int, tars: tuple[tarfile.TarFile, tarfile.TarFile], digests: tuple[str, str]
) -> Difference:
    whole = Difference(layer=number, path="the whole layer", what="blob", first=digests[0], second=digests[1])
    if ABSENT in digests:
        return whole
    one, two = ({each.path: each for each in _members(tar, digest)} for tar, digest in zip(tars, digests, strict=True))
    for path in sorted(one.keys() | two.keys()):
        if one.get(path) != two.get(path):
            return _member_difference(number, path, one.get(path), two.get(path))
    # The same files, and yet other bytes: packed in another order or by another compressor.
    return replace(whole, what="order or compression")


def _member_difference(number: int, path: str, one: _Member | None, two: _Member | None) -> Difference:
    hashes = [each.hash if each else ABSENT for each in (one, two)]
    what = "only in one build" if one is None or two is None else _what(one, two)
    return Difference(layer=number, path=path, what=what, first=hashes[0], second=hashes[1])


def _what(one: _Member, two: _Member) -> str:
    fields = [
        f"{name} {one.header.get(name)} and {two.header.get(name)}"
        for name in sorted(one.header.keys() | two.header.keys())
        if one.header.get(name) != two.header.get(name)
    ]
    return ", ".join([*(["content"] if one.content != two.content else []), *fields])


def _members(tar: tarfile.TarFile, digest: str) -> Iterator[_Member]:
    with tarfile.open(fileobj=_read(tar, _blob(digest)), mode="r:*") as layer:
        for member in layer:
            yield _Member(path=member.name, header=_header(member), content=_content_hash(layer, member))


def _header(member: tarfile.TarInfo) -> dict[str, object]:
    """All that a layer says of a file besides its bytes. Times as they stand there, fractions included."""
    return {
        "type": member.type.decode("ascii"),
        "mode": oct(member.mode),
        "uid": member.uid,
        "gid": member.gid,
        "mtime": member.mtime,
        "link": member.linkname,
        "device": [member.devmajor, member.devminor],
        **member.pax_headers,
    }


def _content_hash(layer: tarfile.TarFile, member: tarfile.TarInfo) -> str:
    total = hashlib.sha256()
    file = layer.extractfile(member) if member.isreg() else None
    while file and (chunk := file.read(CHUNK_BYTES)):
        total.update(chunk)
    return total.hexdigest()


def _value_difference(one: Mapping[str, Any], two: Mapping[str, Any]) -> Difference | None:
    """Of two JSON documents: an image's configuration, or its manifest with what that says beside the layers."""
    left, right = dict(_leaves("", one)), dict(_leaves("", two))
    for path in sorted(left.keys() | right.keys()):
        if left.get(path) != right.get(path):
            values = [repr(each[path]) if path in each else ABSENT for each in (left, right)]
            return Difference(layer=None, path=path, what="value", first=values[0], second=values[1])
    return None


def _leaves(path: str, value: object) -> Iterator[tuple[str, object]]:
    """Every value of a JSON document by its place: `config.Labels.version`."""
    items: list[tuple[object, object]] = []
    if isinstance(value, dict):
        items = list(value.items())
    elif isinstance(value, list):
        items = list(enumerate(value))
    if not items:
        yield path, value
    for key, inner in items:
        yield from _leaves(f"{path}.{key}".removeprefix("."), inner)
