"""A small cell built from copied snapshots of Debian's archive: whole, moved on, silent, lying, with gaps."""

from __future__ import annotations

import json
import re
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from images import docker
from images.build import build, installed, mirror, packages, snapshot
from images.build.packages import Archives
from images.errors import ArchiveError, BuildError
from images.matrix import render
from images.pins import debian
from images.proof import reproduce
from tests.container.small_cell import HERE, ROOT, make_job, make_root, only_runtime
from tests.container.stages.mirror import BASE, IMPORT, TIMESTAMP, debian_mirror, snapshot_service

pytestmark = pytest.mark.build_half
CELL = "llama-cu130-sm90"
PART = "tini"
NOWHERE = "http://127.0.0.1:9/archive"
TEMPLATE = """\
FROM {{ base_reference }} AS runtime
RUN apt-get update \\
 && apt-get install -y --no-install-recommends tini \\
 && rm -rf /var/cache/apt/*.bin /var/cache/apt/archives/*.deb /var/cache/ldconfig/aux-cache \\
      /var/cache/debconf/*-old /var/lib/dpkg/*-old /tmp/* \\
 && find /var/log -type f -delete
LABEL {{ labels }}
"""


@dataclass(kw_only=True)
class Place:
    """A project with one small cell, its job held to a lock of what the archive has today."""

    root: Path
    job: build.Job
    copy: Path  # of the archive, as far as this cell needs it
    said: list[str]

    def hold(self, archives: Archives, job: build.Job | None = None) -> build.Job:
        return packages.hold(self.root, job or self.job, docker.Engine(), archives, self.said.append)

    def locked(self, version: str) -> build.Job:
        """The job under a lock that says this version of its package."""
        assert self.job.lock
        tini = self.job.lock.parts[PART]["tini"].model_copy(update={"version": version})
        lock = self.job.lock.model_copy(update={"parts": {PART: {"tini": tini}}})
        return replace(self.job, lock=lock)


@pytest.fixture(scope="module")
def copied(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, debian.Lock]:
    """The files of the public archive that this cell's apt asks for, and the lock that they give."""
    root, job = _small(tmp_path_factory.mktemp("copied"))
    copy = tmp_path_factory.mktemp("archive")
    with debian_mirror(copy) as passing_on, mirror.workplace(root, job):
        given = mirror.parse_mirror(passing_on.root)
        committed = debian.load(root, job.cell.base, "linux/amd64")
        assert committed
        lock = packages.resolve(root, job, committed, given)
        installed.query(root, replace(packages.through(root, job, given), no_cache=True))
    assert list(copy.glob("debian/pool/main/t/tini/tini_*.deb"))
    return copy, lock.model_copy(update={"snapshot": TIMESTAMP})


@pytest.fixture
def place(copied: tuple[Path, debian.Lock], tmp_path: Path) -> Iterator[Place]:
    copy, lock = copied
    root, job = _small(tmp_path / "place")
    with mirror.workplace(root, job):
        yield Place(root=root, job=replace(job, lock=lock), copy=copy, said=[])


def _small(folder: Path) -> tuple[Path, build.Job]:
    root, cell = make_root(folder, CELL, (HERE / "cell.Dockerfile").read_text("utf-8"))
    for path in (*render.inputs(cell), cell.folder / "image_facts.json"):  # what the build id is made of
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        if not (root / path).exists():
            (root / path).write_text("", "utf-8")
    return only_runtime(root, make_job(root, cell, docker.Engine()), keeps_lists=True)


def test_the_snapshot_of_the_lock_is_where_packages_come_from(place: Place) -> None:
    with snapshot_service(place.copy) as service:
        held = place.hold(Archives(service.root), replace(place.job, no_cache=True))
    assert (held.is_locked, place.said) == (True, [])
    assert service.asked[0] == f"/archive/debian/{TIMESTAMP}/dists/bookworm/InRelease"
    assert f"/archive/debian-security/{TIMESTAMP}/dists/bookworm-security/InRelease" in service.asked
    assert any(re.match(rf"/archive/debian/{IMPORT}/pool/main/t/tini/tini_.*\.deb", path) for path in service.asked)


def test_another_service_and_another_date_run_no_step_again(place: Place) -> None:
    """A refreshed lock must not compile the engine again if none of its packages moved."""
    assert place.job.lock
    with snapshot_service(place.copy) as first:
        place.hold(Archives(first.root), replace(place.job, no_cache=True))
    later = place.job.lock.model_copy(update={"snapshot": "20260719T060000Z"})
    with snapshot_service(place.copy) as second:
        held = place.hold(Archives(second.root), replace(place.job, lock=later))
    assert (held.is_locked, held.no_cache) == (True, False)
    assert second.asked == [
        f"/archive/debian/{at}/dists/bookworm/InRelease" for at in ("20260719T060000Z", IMPORT)
    ]  # whether it is there, and nothing else


def test_a_snapshot_that_is_not_what_the_lock_says_is_exit_60(place: Place) -> None:
    """The lock is wrong: the lock itself names this snapshot, so the newest packages would not help."""
    with snapshot_service(place.copy) as service, pytest.raises(BuildError) as caught:
        place.hold(Archives(service.root), place.locked("0.0-1"))
    assert caught.value.exit_code == 60
    assert "images/locks/debian-bookworm-slim-amd64.json says: tini moved: 0.19" in caught.value.message
    assert caught.value.hint == installed.TODAY


def test_a_snapshot_that_lies_is_refused_and_not_passed_over(place: Place) -> None:
    with snapshot_service(place.copy, lies=".deb") as service, pytest.raises(BuildError) as caught:
        place.hold(Archives(service.root), replace(place.job, no_cache=True))
    assert not isinstance(caught.value, ArchiveError)
    assert "an archive gave other bytes than its signed list names" in caught.value.message
    assert place.said == []


def test_a_snapshot_whose_list_is_forged_is_refused(place: Place) -> None:
    with (
        snapshot_service(place.copy, lies="bookworm-updates/InRelease") as service,
        pytest.raises(BuildError) as caught,
    ):
        place.hold(Archives(service.root), replace(place.job, no_cache=True))
    assert not isinstance(caught.value, ArchiveError)
    assert "an archive gave other bytes than its signed list names" in caught.value.message


def test_a_snapshot_with_a_gap_is_given_up_for_the_newest_packages(place: Place) -> None:
    with snapshot_service(place.copy, lacks=".deb") as service:
        job = replace(place.job, no_cache=True)
        held = place.hold(Archives(service.root), job)
        with pytest.raises(ArchiveError, match="404"):
            place.hold(Archives(service.root, is_strict=True), job)
    assert (held.is_locked, held.secrets) == (True, ())
    assert len(place.said) == 1
    assert "could not be had" in place.said[0]


def test_without_a_snapshot_packages_that_are_the_locks_lose_nothing(place: Place) -> None:
    """The service accepts a connection and never answers. The Dockerfile is the rendered one, with its layers."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        archives = Archives(f"http://127.0.0.1:{silent.getsockname()[1]}/archive")
        begin_s = time.monotonic()
        assert archives.choose(place.job.cell.base, TIMESTAMP) is None
        assert time.monotonic() - begin_s < 20 * snapshot.TIMEOUT_S
        held = place.hold(archives)
    assert replace(held, no_cache=False) == place.job
    assert len(place.said) == 1
    assert "no answer within 3 s" in place.said[0]
    assert "io.appliance.reproducible" not in build.moment_labels(held)


def test_without_a_snapshot_an_archive_that_moved_is_built_and_said(place: Place) -> None:
    job, archives, engine = place.locked("0.0-1"), Archives(NOWHERE), docker.Engine()
    held = place.hold(archives, job)
    assert not held.is_locked
    assert held.lock
    assert held.lock.parts[PART]["tini"].sha256 == (place.job.lock and place.job.lock.parts[PART]["tini"].sha256)
    assert held.build_id != job.build_id
    assert len(place.said) == 1
    assert "the newest packages are taken, 1 of them not the lock's" in place.said[0]
    assert packages.load(place.root, held.build_id) == held.lock
    assert packages.find_temporary(place.root, job, engine, archives) is None
    built = build.build(place.root, held, engine)
    try:
        image = engine.image(built.tag)
        assert image
        assert image.labels["io.appliance.reproducible"] == "no"
        again = packages.find_temporary(place.root, job, engine, archives)
        assert again
        assert again.build_id == held.build_id
        with snapshot_service(place.copy) as service:
            assert packages.find_temporary(place.root, job, engine, Archives(service.root)) is None
    finally:
        engine.remove(built.tag)


def test_what_may_only_be_locked_is_not_built_of_an_archive_that_moved(place: Place) -> None:
    job = place.locked("0.0-1")
    with pytest.raises(BuildError, match="no snapshot of Debian's archive can be reached"):
        place.hold(Archives(NOWHERE, is_strict=True), job)
    with debian_mirror() as live:
        archives = Archives(NOWHERE, given=mirror.parse_mirror(live.root), is_strict=True)
        with pytest.raises(BuildError, match=r"tini moved: 0\.19") as caught:
            place.hold(archives, job)
    named = re.findall(r"--debian-mirror (\S+)", caught.value.hint or "")
    assert [str(mirror.parse_mirror(each)) for each in named] == [f"{NOWHERE}@{TIMESTAMP}"]


def test_two_builds_of_the_newest_packages_are_compared_and_say_that_the_lock_was_not_met(place: Place) -> None:
    settled = packages.settle(place.root, place.locked("0.0-1"), docker.Engine(), Archives(NOWHERE), place.said.append)
    found = reproduce.reproduce(place.root, settled, docker.Engine())
    assert (found.is_same, found.is_locked) == (True, False)
    assert len(place.said) == 1


def test_two_builds_of_a_snapshot_meet_the_lock_or_are_not_begun(place: Place) -> None:
    with snapshot_service(place.copy) as service:
        archives = Archives(service.root)
        settled = packages.settle(place.root, place.job, docker.Engine(), archives, place.said.append)
        assert (settled.is_locked, bool(settled.secrets), place.said) == (True, True, [])
        with pytest.raises(BuildError, match="would not be built of what") as caught:
            packages.settle(place.root, place.locked("0.0-1"), docker.Engine(), archives, place.said.append)
    assert caught.value.hint == installed.TODAY


def test_a_lock_is_made_of_a_snapshot_and_names_it(place: Place) -> None:
    """All packages existed at the snapshot's moment, whatever the date of the archive's own lists."""
    dockerfile = (place.root / place.job.dockerfile).read_text("utf-8")
    path = place.root / debian.path_for(place.job.cell.base, "linux/amd64")
    path.write_text("no lock", "utf-8")
    with snapshot_service(place.copy) as service:
        archive = mirror.as_archive(mirror.Mirror(root=service.root, timestamp=TIMESTAMP))
        lines = debian.lock(
            place.root, [(place.job.cell, dockerfile)], docker.Engine(), archive, platform="linux/amd64", is_dry=False
        )
    lock = debian.load(place.root, place.job.cell.base, "linux/amd64")
    assert lock
    assert (lock.snapshot, lock.suites) == (TIMESTAMP, ["bookworm", "bookworm-security", "bookworm-updates"])
    assert lock.parts == (place.job.lock and place.job.lock.parts)
    assert len([line for line in lines if "is written anew" in line]) == 1


@dataclass(kw_only=True)
class Project:
    """A copy of what the command reads, in which cell llama-cpu is one package on the base."""

    root: Path
    tag: str

    def write(self, *, service: str, lock: debian.Lock) -> None:
        path = self.root / "build_matrix.yaml"
        text = re.sub(r"(?m)^(snapshot:\n  root: ).*$", rf"\g<1>{service}", path.read_text("utf-8"))
        path.write_text(text, "utf-8")
        (self.root / "images/locks/debian-bookworm-slim-amd64.json").write_text(debian.dump(lock), "utf-8")

    def run(self, *words: str) -> subprocess.CompletedProcess[str]:
        argv = [sys.executable, "-m", "images", *words]
        return subprocess.run(argv, cwd=self.root, capture_output=True, text=True, check=False)

    def build(self, *words: str) -> subprocess.CompletedProcess[str]:
        return self.run("build", "--only", "llama-cpu", "--base", BASE, "--tag", self.tag, "--no-space-check", *words)


@pytest.fixture
def project(tmp_path: Path) -> Iterator[Project]:
    folder = tmp_path / "project"
    shutil.copytree(ROOT / "images", folder / "images", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copytree(ROOT / "appliance", folder / "appliance", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("build_matrix.yaml", "pyproject.toml", "docker-bake.json"):
        shutil.copyfile(ROOT / name, folder / name)
    (folder / "images/templates/llama-cpu.Dockerfile.j2").write_text(TEMPLATE, "utf-8")
    made = Project(root=folder, tag=f"appliance-test:{tmp_path.name}".lower().replace("_", "-"))
    assert made.run("render").returncode == 0
    yield made
    docker.Engine().remove(made.tag)


def test_the_command_builds_of_a_snapshot_and_asks_nothing_of_an_image_that_is_here(
    project: Project, place: Place
) -> None:
    assert place.job.lock
    with snapshot_service(place.copy) as service:
        project.write(service=service.root, lock=place.job.lock)
        done = project.build("--locked")
        assert (done.returncode, done.stdout) == (0, f"{project.tag}\n"), done.stderr
        asked = len(service.asked)
        again = project.build("--locked")
        assert (again.returncode, len(service.asked)) == (0, asked)
    assert "no snapshot" not in done.stderr
    assert "has this build id already" in again.stderr
    image = docker.Engine().image(project.tag)
    assert image
    assert "io.appliance.reproducible" not in image.labels
    assert "not reproducible" not in (project.root / ".make/images/llama-cpu.spdx.json").read_text("utf-8")
    assert not list((project.root / ".make/images").glob("*.mirror"))


def test_the_command_builds_of_an_archive_that_moved_and_says_it_everywhere(project: Project, place: Place) -> None:
    lock = place.locked("0.0-1").lock
    assert lock
    project.write(service=NOWHERE, lock=lock)
    done = project.build()
    assert (done.returncode, done.stdout) == (0, f"{project.tag}\n"), done.stderr
    said = [line for line in done.stderr.splitlines() if "snapshot" in line]
    assert len(said) == 1
    assert said[0].startswith("llama-cpu: no snapshot of Debian's archive can be reached (")
    assert "the newest packages are taken, 1 of them not the lock's" in said[0]
    image = docker.Engine().image(project.tag)
    assert image
    assert image.labels["io.appliance.reproducible"] == "no"
    assert "not reproducible: " in (project.root / ".make/images/llama-cpu.spdx.json").read_text("utf-8")
    again = project.build()
    assert "of the packages that were the newest when it was built" in again.stderr
    assert json.loads(project.build("--json").stdout)[0]["digest"] == image.id
    locked = project.build("--locked")
    assert locked.returncode == 60
    assert f"error: no snapshot of Debian's archive can be reached ({NOWHERE}/debian/{TIMESTAMP}/" in locked.stderr
    twice = project.run("verify", "--reproduce", "llama-cpu", "--base", BASE)
    assert twice.returncode == 0, twice.stderr
    assert twice.stdout.endswith("of the newest Debian packages: the lock was not met\n")
