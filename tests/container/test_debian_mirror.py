"""A small cell held to its Debian lock, and built through a mirror that leaves no trace in the image."""

from __future__ import annotations

import tarfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from images import docker
from images.build import build, installed, mirror, packages
from images.errors import BuildError
from images.pins import debian
from tests.container.small_cell import HERE, make_job, make_root, only_runtime
from tests.container.stages.mirror import PassingOn, debian_mirror

pytestmark = pytest.mark.build_half
CELL = "llama-cu130-sm90"
PART = "tini"


@pytest.fixture(scope="module")
def passing_on() -> Iterator[PassingOn]:
    with debian_mirror() as found:
        yield found


@pytest.fixture
def small(tmp_path: Path) -> tuple[Path, build.Job]:
    root, cell = make_root(tmp_path, CELL, (HERE / "cell.Dockerfile").read_text("utf-8"))
    return root, make_job(root, cell, docker.Engine())


@pytest.fixture
def locked(small: tuple[Path, build.Job]) -> tuple[Path, build.Job]:
    """Return the cell with a lock of the packages in its cached layers, which may be older than those of the
    archive."""
    root, job = small
    holding = installed.query(root, job)
    asked = debian.asked((root / job.dockerfile).read_text("utf-8"))
    base = holding.versions[installed.BASE]
    parts = {
        asked[stage]: {
            name: debian.Locked(version=version, architecture="amd64", sha256=min(holding.files[name, version]))
            for name, version in image.items()
            if base.get(name) != version
        }
        for stage, image in holding.versions.items()
        if stage != installed.BASE
    }
    lock = debian.Lock(
        image=job.cell.base.image,
        base=job.base.identity,
        platform="linux/amd64",
        archive_date="2026-07-18T02:00:00Z",
        snapshot="20260718T060000Z",
        suites=["bookworm"],
        parts=parts,
    )
    return root, replace(job, lock=lock)


def test_stages_that_are_as_locked_are_built_from_the_cache(locked: tuple[Path, build.Job]) -> None:
    root, job = locked
    assert installed.hold_to_lock(root, job, docker.Engine()) == job


@pytest.mark.parametrize(
    ("planted", "said"),
    [
        ({"version": "0.0-1"}, "tini moved: {version}, the lock says 0.0-1"),
        ({"sha256": "0" * 64}, "tini {version} is another file: SHA-256 {sha256}, the lock says " + "0" * 64),
    ],
)
def test_a_moved_package_is_exit_60_and_named(
    locked: tuple[Path, build.Job], planted: dict[str, str], said: str
) -> None:
    """The error remains after a second build without the cache. The cell has one stage only, so a test may repeat the
    build."""
    root, job = only_runtime(*locked, keeps_lists=True)
    assert job.lock
    was = job.lock.parts[PART]["tini"]
    parts = {**job.lock.parts, PART: {"tini": was.model_copy(update=planted)}}
    with pytest.raises(BuildError) as caught:
        installed.hold_to_lock(root, replace(job, lock=job.lock.model_copy(update={"parts": parts})), docker.Engine())
    assert caught.value.exit_code == 60
    assert said.format(version=was.version, sha256=was.sha256) in caught.value.message
    assert debian.LOCK_COMMAND in (caught.value.hint or "")


def test_packages_that_no_lock_names_are_not_built(small: tuple[Path, build.Job]) -> None:
    """The real cells' lock has no part for the additional packages of this cell, so no build is tried."""
    root, job = small
    job = replace(job, lock=debian.load(root, job.cell.base, "linux/amd64"))
    with pytest.raises(BuildError, match=r"asks for packages that images/locks/debian-.*json has no part for: tini"):
        installed.hold_to_lock(root, job, docker.Engine())


def test_a_platform_without_a_lock_is_not_built(small: tuple[Path, build.Job]) -> None:
    root, job = small
    with pytest.raises(BuildError, match="has no Debian lock for linux/amd64"):
        installed.hold_to_lock(root, job, docker.Engine())


def test_a_mirror_changes_no_digest_and_leaves_no_address(
    small: tuple[Path, build.Job], passing_on: PassingOn, tmp_path: Path
) -> None:
    root, job = only_runtime(*small)
    job = replace(job, no_cache=True)
    archives = tmp_path / "live.tar", tmp_path / "mirrored.tar"
    assert docker.stream(build.buildx_argv(replace(job, archive=archives[0])), cwd=root).code == 0
    with mirror.workplace(root, job):
        mirrored = packages.through(root, job, mirror.parse_mirror(passing_on.root))
        assert docker.stream(build.buildx_argv(replace(mirrored, archive=archives[1])), cwd=root).code == 0
    assert not (root / mirrored.dockerfile.parent).exists()
    assert [path for path in passing_on.asked if "tini" in path and path.startswith("/planted/debian/pool/main/")]
    assert build.manifest_digest(archives[0]) == build.manifest_digest(archives[1])
    assert mentions(archives[1], passing_on.root.partition("//")[2].encode()) == []
    assert "etc/debian_version" in mentions(archives[1], b"12.")  # the search does find what is there


def test_a_mirror_that_has_no_such_archive_is_an_error_of_the_build(
    small: tuple[Path, build.Job], passing_on: PassingOn
) -> None:
    root, job = only_runtime(*small)
    nowhere = mirror.parse_mirror(f"{passing_on.root}/nowhere@20260718T020000Z")
    with mirror.workplace(root, job):
        done = docker.stream(build.buildx_argv(packages.through(root, replace(job, no_cache=True), nowhere)), cwd=root)
    assert done.code != 0
    assert "/planted/nowhere/debian/20260718T020000Z/dists/bookworm/InRelease" in passing_on.asked


def mentions(archive: Path, wanted: bytes) -> list[str]:
    """Return the files of an image, including configuration and manifest, that contain these bytes."""
    found = []
    with tarfile.open(archive) as image:
        for blob in image:
            file = image.extractfile(blob)
            if file is None:
                continue
            data = file.read()
            if wanted in data:
                found.append(blob.name)
            if data[:2] == b"\x1f\x8b":
                found += in_layer(archive, blob.name, wanted)
    return found


def in_layer(archive: Path, name: str, wanted: bytes) -> list[str]:
    with tarfile.open(archive) as image, tarfile.open(fileobj=image.extractfile(name), mode="r:gz") as layer:
        members = [member for member in layer if member.isfile()]
        return [member.name for member in members if wanted in read(layer, member) or wanted in member.name.encode()]


def read(layer: tarfile.TarFile, member: tarfile.TarInfo) -> bytes:
    file = layer.extractfile(member)
    return file.read() if file else b""
