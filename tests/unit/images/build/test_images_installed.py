"""What stages hold: asked through a second Dockerfile that shares the first one's layers, and held to the lock."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from images.build import build, installed
from images.errors import BuildError
from images.matrix import matrix
from images.matrix.matrix import Cell
from images.pins import debian
from images.pins.debian import Lock, Locked

SHA, OTHER = "0" * 64, "1" * 64
BASE = "sha256:" + "b" * 64
DOCKERFILE = """FROM debian@sha256:1 AS base
ENV A=1

FROM base AS toolchain
RUN apt-get update \\
 && apt-get install -y --no-install-recommends cmake \\
      g++

FROM base AS wheels
RUN apt-get install -y --no-install-recommends python3
COPY a /
RUN pip install

FROM debian@sha256:1 AS runtime
RUN apt-get install -y --no-install-recommends tini && true
COPY --from=wheels /a /a
"""
LISTING = f"""@stage .
installed libc6 amd64 2.36
@stage runtime
installed libc6 amd64 2.36
installed tini amd64 0.19
config-files gone amd64 1
@file tini 0.19 {SHA}
@lists 1"""


@pytest.fixture
def job(cell: Cell, tmp_path: Path) -> build.Job:
    return build.Job(
        cell=cell,
        base=build.BaseChoice(identity=BASE),
        origin=build.Origin(epoch_s=0, revision=None),
        build_id="b" * 32,
        version="0",
        tag=cell.tag,
        archive=tmp_path / "o.tar",
    )


def lock_of(version: str = "0.19", sha256: str = SHA) -> Lock:
    tini = Locked(version=version, architecture="amd64", sha256=sha256)
    return Lock(
        image="debian",
        base=BASE,
        platform="linux/amd64",
        archive_date="2026-07-18T02:00:00Z",
        snapshot="20260718T060000Z",
        suites=["bookworm"],
        parts={"tini": {"tini": tini}},
    )


def test_each_stage_is_repeated_as_far_as_its_last_package() -> None:
    added = installed.listing(DOCKERFILE)
    toolchain = DOCKERFILE[DOCKERFILE.index("RUN apt-get update") : DOCKERFILE.index("\n\nFROM base AS wheels")]
    assert f"FROM base AS packages-toolchain\n{toolchain}\n" in added
    assert "FROM base AS packages-wheels\nRUN apt-get install -y --no-install-recommends python3\n\n" in added
    assert "FROM debian@sha256:1 AS packages-runtime\nRUN apt-get install" in added
    assert "pip install" not in added
    assert "packages-base" not in added
    assert added.endswith("COPY --from=packages /packages.txt /")


def test_every_cell_can_be_asked_for_the_stages_that_its_lock_has(project: Path) -> None:
    for cell in matrix.load(project).cells:
        text = (project / cell.folder / "Dockerfile").read_text("utf-8")
        copies = {name.removeprefix("packages-") for _, name in debian.STAGE.findall(installed.listing(text))}
        assert {"wheels", "runtime"} <= copies & set(debian.asked(text)), cell.id


def test_a_dockerfile_without_packages_is_refused() -> None:
    with pytest.raises(BuildError, match="no stage of the Dockerfile installs a package"):
        installed.listing("FROM a AS b\nRUN make\n")


def test_a_listing_is_read(job: build.Job) -> None:
    holding = installed.parse_listing(LISTING.splitlines())
    assert holding.versions == {".": {"libc6": "2.36"}, "runtime": {"libc6": "2.36", "tini": "0.19"}}
    assert holding.files == {("tini", "0.19"): frozenset({SHA})}
    assert list(installed.faults(job, lock_of(), {"runtime": "tini"}, holding)) == []


@pytest.mark.parametrize(
    ("lock", "said"),
    [
        (lock_of(version="0.20"), "tini moved: 0.19, the lock says 0.20"),
        (lock_of(sha256=OTHER), f"tini 0.19 is another file: SHA-256 {SHA}, the lock says {OTHER}"),
    ],
)
def test_a_moved_package_is_named(job: build.Job, lock: Lock, said: str) -> None:
    holding = installed.parse_listing(LISTING.splitlines())
    assert list(installed.faults(job, lock, {"runtime": "tini"}, holding)) == [said]


def test_a_package_beyond_the_lock_is_named_on_the_locks_own_base(job: build.Job) -> None:
    holding = installed.parse_listing(LISTING.replace("config-files gone", "installed curl").splitlines())
    asked = {"runtime": "tini"}
    assert list(installed.faults(job, lock_of(), asked, holding)) == ["curl 1 is not in the lock"]
    elsewhere = replace(job, base=build.BaseChoice(identity="sha256:else"))
    assert list(installed.faults(elsewhere, lock_of(), asked, holding)) == []


@pytest.mark.parametrize("kept", range(4))
def test_a_listing_that_is_cut_is_refused(kept: int) -> None:
    with pytest.raises(BuildError, match="did not say which packages they hold"):
        installed.parse_listing(LISTING.splitlines()[:kept])


@pytest.mark.parametrize("lines", [LISTING.splitlines()[:-1], LISTING.replace("@file", "@else").splitlines()])
def test_lists_that_could_not_be_read_are_no_answer(lines: list[str]) -> None:
    with pytest.raises(BuildError, match="name no file of an installed package"):
        installed.parse_listing(lines)


def test_a_stage_that_kept_no_lists_is_known_by_versions() -> None:
    text = LISTING.replace(f"@file tini 0.19 {SHA}\n", "").replace("@lists 1", "@lists 0")
    assert installed.parse_listing(text.splitlines()).files == {}


def test_the_listing_itself_is_never_from_the_cache(job: build.Job) -> None:
    argv = installed.query_argv(job, job.archive)
    assert argv[-3:] == ("--no-cache-filter", "packages", ".")
    uncached = installed.query_argv(replace(job, no_cache=True), job.archive)
    assert ("--no-cache" in uncached, "--no-cache-filter" in uncached) == (True, False)


def test_as_far_as_one_stage_is_the_same_build_with_another_end(job: build.Job) -> None:
    argv = build.targeted_argv(replace(job, cache_to=("type=local,dest=c",)), "x", "type=local,dest=o")
    assert argv[-5:] == ("--target", "x", "--output", "type=local,dest=o", ".")
    assert argv.count("--output") == 1
    assert "--cache-to" not in argv
