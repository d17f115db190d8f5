"""Builds a cell twice without a cache and compares the manifests, or names the first place that differs."""

from __future__ import annotations

import hashlib
import json
import re
import tarfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import zip_longest
from pathlib import Path
from typing import IO, Any

from images import docker
from images.build.build import Job, buildx_argv, explain_failure, manifest_digest, refuse_moved, refuse_platform, seal
from images.errors import BuildError, UsageError
from images.layers import oci
from images.layers.tree import members

CHUNK_BYTES = 1 << 20
ABSENT = "absent"
CONFIGURATION = "configuration"
DIGEST = re.compile(r"sha256:[0-9a-f]{64}")


@dataclass(frozen=True, kw_only=True)
class Difference:
    """The first place where two images differ. A file's hashes cover its header and its content."""

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
    is_locked: bool = True  # False: both of the newest Debian packages, since the lock could not be met

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
    """Builds twice, each step again; of `stages` only, if some are named. Raises BuildError if it cannot be built.

    Nothing is loaded into the engine, and both archives are gone when this returns.
    """
    refuse_platform((job.cell,), engine.platform, done="reproduced")
    archives = [job.archive.with_name(f"{job.cell.id}.{number}.oci.tar") for number in (1, 2)]
    job.archive.parent.mkdir(parents=True, exist_ok=True)
    try:
        for archive in archives:
            export(root, replace(job, archive=archive), stages)
        first, second = (manifest_digest(archive) for archive in archives)
        difference = None if first == second else compare(archives[0], archives[1])
    finally:
        for archive in archives:
            archive.unlink(missing_ok=True)
    return Reproduction(cell=job.cell.id, first=first, second=second, difference=difference, is_locked=job.is_locked)


@dataclass(frozen=True, kw_only=True)
class Published:
    """A build of somebody else: the digest of its manifest, and the archive if it is at hand."""

    manifest: str
    archive: Path | None = None


def published(what: str, platform: str, *, cwd: Path) -> Published:
    """Finds a published build by an archive, a manifest's digest, or an image of a registry.

    A registry's index is asked for the platform's manifest. Raises UsageError for anything else, BuildError if no
    registry answers.
    """
    if Path(what).is_file():
        with oci.opened(Path(what)) as tar:
            return Published(manifest=oci.read(tar, platform).manifest, archive=Path(what))
    if DIGEST.fullmatch(what):
        return Published(manifest=what)
    if not DIGEST.fullmatch(what.rpartition("@")[2]):
        message = f"--against is neither an archive that is here nor a digest: {what}"
        raise UsageError(message, hint="IMAGE@sha256:…, sha256:… of the platform's manifest, or FILE.oci.tar")
    return Published(manifest=_query_manifest(what, platform, cwd))


def against(root: Path, job: Job, engine: docker.Engine, other: Published) -> Reproduction:
    """Builds once, each step again, and compares. The place of a difference needs the other's archive."""
    refuse_platform((job.cell,), engine.platform, done="reproduced")
    archive = job.archive.with_name(f"{job.cell.id}.1.oci.tar")
    job.archive.parent.mkdir(parents=True, exist_ok=True)
    try:
        export(root, replace(job, archive=archive), ())
        mine = manifest_digest(archive)
        is_comparable = mine != other.manifest and other.archive is not None
        difference = compare(archive, other.archive, engine.platform) if is_comparable and other.archive else None
    finally:
        archive.unlink(missing_ok=True)
    return Reproduction(cell=job.cell.id, first=mine, second=other.manifest, difference=difference)


def uncached_argv(job: Job, stages: tuple[str, ...]) -> tuple[str, ...]:
    """Returns the build's command with every step run again, or every step of these stages."""
    if not stages:
        return buildx_argv(replace(job, no_cache=True))
    *words, context = buildx_argv(replace(job, no_cache=False))
    return (*words, "--no-cache-filter", ",".join(stages), context)


def compare(first: Path, second: Path, platform: str | None = None) -> Difference | None:
    """Returns the first difference of two OCI archives, layers before configuration; None if their manifests agree.

    Raises VerificationError if one of them is no OCI archive of a single image.
    """
    with oci.opened(first) as one, oci.opened(second) as two:
        manifests = [oci.manifest_of(tar, platform) for tar in (one, two)]
        left, right = ([str(layer["digest"]) for layer in manifest["layers"]] for manifest in manifests)
        for number, (before, after) in enumerate(zip_longest(left, right, fillvalue=ABSENT)):
            if before != after:
                return _layer_difference(number, (one, two), (before, after))
        configs = [
            oci.json_blob(tar, str(found["config"]["digest"])) for tar, found in zip((one, two), manifests, strict=True)
        ]
        return _value_difference(*configs) or _value_difference(*manifests)


def _query_manifest(reference: str, platform: str, cwd: Path) -> str:
    """Returns an image's own digest, or in an index that for `platform`."""
    argv = ("docker", "buildx", "imagetools", "inspect", "--raw", reference)
    text, asked = docker.feed(argv, "\n".join, cwd=cwd)
    if asked.code != 0:
        message = f"no registry answers for what was published: {reference}: {' '.join(asked.lines)}"
        raise BuildError(message, hint="docker login, or give the digest of its manifest alone: sha256:…")
    document = json.loads(text)
    if "manifests" not in document:
        return reference.rpartition("@")[2]
    images = oci.platform_manifests(document["manifests"], platform)
    if len(images) != 1:
        message = f"what was published has {len(images)} images for {platform}: {reference}"
        raise BuildError(message)
    return str(images[0]["digest"])


def export(root: Path, job: Job, stages: tuple[str, ...]) -> None:
    """Exports an archive of steps that all ran again. Its manifest label needs a second export, from the cache.

    Raises BuildError if the second export has other layers.
    """
    _stream(root, job, uncached_argv(job, stages))
    layers = _layers(job.archive)
    sealed = seal(root, replace(job, no_cache=False))
    if sealed.files_sha256 is None:
        return
    _stream(root, job, buildx_argv(sealed))
    refuse_moved(root, job)
    if _layers(job.archive) != layers:
        message = f"cell {job.cell.id}: the builder's cache does not give the layers that were just built"
        raise BuildError(message, hint="is another build of this cell running? run it again")


def _stream(root: Path, job: Job, argv: tuple[str, ...]) -> None:
    finished = docker.stream(argv, cwd=root)
    if finished.code != 0:
        raise explain_failure(job.cell, finished.lines)


def _layers(archive: Path) -> list[str]:
    with oci.opened(archive) as tar:
        return [str(layer["digest"]) for layer in oci.manifest_of(tar)["layers"]]


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
    for member, reader in members(oci.member(tar, oci.blob(digest))):
        yield _Member(path=member.name, header=_header(member), content=_content_hash(reader))


def _header(member: tarfile.TarInfo) -> dict[str, object]:
    """Returns a layer's metadata of a file. Times are kept as they are, fractions included."""
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


def _content_hash(file: IO[bytes] | None) -> str:
    total = hashlib.sha256()
    while file and (chunk := file.read(CHUNK_BYTES)):
        total.update(chunk)
    return total.hexdigest()


def _value_difference(one: Mapping[str, Any], two: Mapping[str, Any]) -> Difference | None:
    """Returns the first difference of two JSON documents: configurations, or manifests."""
    left, right = dict(oci.leaves("", one)), dict(oci.leaves("", two))
    for path in sorted(left.keys() | right.keys()):
        if left.get(path) != right.get(path):
            values = [repr(each[path]) if path in each else ABSENT for each in (left, right)]
            return Difference(layer=None, path=path, what="value", first=values[0], second=values[1])
    return None
