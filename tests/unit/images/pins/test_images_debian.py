"""The Debian lock: what apt says becomes it, and an image that differs from it is told by the package's name."""

from __future__ import annotations

from pathlib import Path
from typing import get_args

import pytest

from images import docker
from images.errors import BuildError, MatrixError
from images.matrix import matrix
from images.matrix.matrix import Cell
from images.pins import debian
from images.pins.debian import Lock, Locked

SHA = "0" * 64
BASE = "sha256:" + "b" * 64
PART = "libgomp1 python3"
DOCKERFILE = """FROM debian@sha256:1 AS base
ENV A=1
FROM base AS toolchain
RUN apt-get update \\
 && apt-get install -y --no-install-recommends cmake g++ \\
      python3-pip
FROM toolchain AS nvcc
RUN apt-get install -y --no-install-recommends g++-13 nvidia-cuda-toolkit=12.4.131~12.4.1-2 \\
 && nvcc --version
FROM toolchain AS compile
RUN make
FROM debian@sha256:1 AS runtime
RUN apt-get update && DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends libgomp1 python3 && x
"""
ANSWER = f"""W: something on stderr
@list bookworm Sat, 11 Jul 2026 10:16:37 UTC
@list bookworm-updates Sat, 18 Jul 2026 02:00:00 UTC
@list bookworm-security Fri, 17 Jul 2026 23:12:41 UTC
@part {PART}
'ADDRESS/libgomp1_12.2.0-14%2bdeb12u1_amd64.deb' libgomp1_12.2.0-14+deb12u1_amd64.deb 116320 SHA256:{SHA}
'ADDRESS/python3_1%3a3.11.2-1+b1_amd64.deb' python3_1%3a3.11.2-1+b1_amd64.deb 26312 SHA256:{SHA}
@part cmake
'ADDRESS/cmake_3_all.deb' cmake_3_all.deb 26 SHA256:{SHA}
"""


@pytest.fixture
def lock() -> Lock:
    return debian.parse_answer(ANSWER.splitlines(), image="debian:x", identity=BASE, platform="linux/amd64")


def test_what_stages_install_is_read_with_what_stands_below_them() -> None:
    toolchain = "cmake g++ python3-pip"
    assert debian.asked(DOCKERFILE) == {
        "toolchain": toolchain,
        "nvcc": f"{toolchain} g++-13 nvidia-cuda-toolkit=12.4.131~12.4.1-2",
        "compile": toolchain,
        "runtime": PART,
    }


def test_apts_answer_becomes_a_lock_without_an_address(lock: Lock) -> None:
    assert lock.archive_date == "2026-07-18T02:00:00Z"
    assert lock.suites == ["bookworm", "bookworm-security", "bookworm-updates"]
    assert lock.parts[PART] == {
        "libgomp1": Locked(version="12.2.0-14+deb12u1", architecture="amd64", sha256=SHA),
        "python3": Locked(version="1:3.11.2-1+b1", architecture="amd64", sha256=SHA),
    }
    assert "ADDRESS" not in debian.dump(lock)


def test_a_lock_names_a_snapshot_that_has_its_packages(lock: Lock) -> None:
    """The snapshot lies after the import of the youngest list, which follows the list's date, and before the next
    import."""
    assert lock.snapshot == "20260718T060000Z"
    of_a_snapshot = debian.parse_answer(
        ANSWER.splitlines(), image="x", identity=BASE, platform="linux/amd64", snapshot="20260719T000000Z"
    )
    assert of_a_snapshot.snapshot == "20260719T000000Z"


def test_a_lock_of_fewer_suites_than_the_official_image_has_is_refused(lock: Lock, cell: Cell) -> None:
    debian.refuse_partial(lock, cell.base)
    with pytest.raises(BuildError, match="would lack the packages of bookworm-updates, bookworm-security") as caught:
        debian.refuse_partial(lock.model_copy(update={"suites": ["bookworm"]}), cell.base)
    assert caught.value.exit_code == 60
    assert caught.value.hint == "take the official image: docker pull debian:x"


def test_a_build_takes_its_own_parts_of_a_lock_and_no_date(lock: Lock) -> None:
    mine = debian.content(lock, [PART])
    younger = lock.model_copy(update={"archive_date": "2027-01-01T00:00:00Z", "snapshot": "20270101T000000Z"})
    assert debian.content(younger, [PART]) == mine
    assert debian.content(lock.model_copy(update={"parts": {PART: lock.parts[PART]}}), [PART]) == mine
    moved = {PART: {**lock.parts[PART], "libgomp1": lock.parts["cmake"]["cmake"]}}
    assert debian.content(lock.model_copy(update={"parts": moved}), [PART]) != mine


@pytest.mark.parametrize(
    ("planted", "said"),
    [
        ({"platform": "linux/arm64"}, "linux/arm64"),
        ({"parts": {"x": {"y": Locked(version="1", architecture="arm64", sha256=SHA)}}}, "packages for arm64"),
    ],
)
def test_a_lock_of_another_architecture_is_exit_10(
    tmp_path: Path, lock: Lock, cell: Cell, planted: dict[str, object], said: str
) -> None:
    path = tmp_path / debian.path_for(cell.base, "linux/amd64")
    path.parent.mkdir(parents=True)
    path.write_text(debian.dump(lock.model_copy(update=planted)))
    with pytest.raises(MatrixError, match=f"{path.name} is a Debian lock of another platform.*: {said}") as caught:
        debian.load(tmp_path, cell.base, "linux/amd64")
    assert caught.value.exit_code == 10
    assert "python -m images lock --debian" in (caught.value.hint or "")


@pytest.mark.parametrize(
    "answer",
    [
        "",
        "@list bookworm Sat, 11 Jul 2026 10:16:37 UTC",
        "@list bookworm Sat, 11 Jul 2026 10:16:37 UTC\n@part cmake",
        f"@part cmake\n'A' cmake_3_all.deb 26 SHA256:{SHA}",
        "@list bookworm Sat, 11 Jul 2026 10:16:37 UTC\n@part cmake\n'A' cmake_3_all.deb 26 MD5Sum:00",
    ],
)
def test_an_answer_that_is_none_is_refused(answer: str) -> None:
    with pytest.raises(BuildError, match="named no packages"):
        debian.parse_answer(answer.splitlines(), image="debian:x", identity=BASE, platform="linux/amd64")


def test_a_lock_is_read_as_it_was_written(tmp_path: Path, lock: Lock, cell: Cell) -> None:
    path = tmp_path / debian.path_for(cell.base, "linux/amd64")
    assert debian.load(tmp_path, cell.base, "linux/amd64") is None
    path.parent.mkdir(parents=True)
    path.write_text(debian.dump(lock))
    assert debian.load(tmp_path, cell.base, "linux/amd64") == lock
    path.write_text(debian.dump(lock).replace(SHA, "none"))
    with pytest.raises(MatrixError, match="is no Debian lock"):
        debian.load(tmp_path, cell.base, "linux/amd64")


def test_committed_locks_hash_every_package_and_name_no_machine(project: Path) -> None:
    paths = list((project / "images/locks").glob("debian-*.json"))
    assert paths
    for path in paths:
        text = path.read_text("utf-8")
        lock = Lock.model_validate_json(text)
        assert debian.dump(lock) == text
        assert "://" not in text
        name = path.name.split("-")[1]
        assert lock.suites == sorted((name, f"{name}-security", f"{name}-updates"))
        assert all(lock.parts.values())


def test_the_committed_lock_has_every_part_that_its_cells_install(project: Path) -> None:
    for cell in matrix.load(project).cells:
        dockerfile = project / cell.folder / "Dockerfile"
        for platform in cell.platforms:
            lock = debian.load(project, cell.base, platform)
            assert lock, (cell.id, platform)
            assert set(debian.asked(dockerfile.read_text("utf-8")).values()) <= set(lock.parts), cell.id


def test_a_lock_that_changed_names_what_moved(lock: Lock) -> None:
    packages = {**lock.parts[PART], "libgomp1": Locked(version="13", architecture="amd64", sha256=SHA)}
    del packages["python3"]
    new = lock.model_copy(update={"parts": {PART: packages, "cmake": lock.parts["cmake"]}})
    assert debian.moved(lock, lock) == []
    assert debian.moved(lock, new) == ["libgomp1: 12.2.0-14+deb12u1 -> 13", "python3: 1:3.11.2-1+b1 -> gone"]
    other = lock.parts["cmake"]["cmake"].model_copy(update={"sha256": "1" * 64})
    moved = debian.moved(lock, lock.model_copy(update={"parts": {**lock.parts, "cmake": {"cmake": other}}}))
    assert moved == [f"cmake: 3 -> another file: SHA-256 {'1' * 64}"]


IMAGE = {"libc6": "2", "libgomp1": "12.2.0-14+deb12u1", "python3": "1:3.11.2-1+b1"}


@pytest.mark.parametrize(
    ("planted", "said"),
    [
        ({"libgomp1": "13"}, ["libgomp1 moved: 13, the lock says 12.2.0-14+deb12u1"]),
        ({"libgomp1": None}, ["libgomp1 moved: not installed, the lock says 12.2.0-14+deb12u1"]),
        ({"curl": "7"}, ["curl 7 is not in the lock"]),
        ({"libc6": "3"}, ["libc6 3 is not in the lock"]),
        ({}, []),
    ],
)
def test_a_moved_package_is_named(cell: Cell, lock: Lock, planted: dict[str, str | None], said: list[str]) -> None:
    image = {name: version for name, version in {**IMAGE, **planted}.items() if version}
    found = debian.faults(cell, lock, PART, image=image, base={"libc6": "2"}, identity=BASE)
    assert found == said


def test_on_another_base_only_what_is_locked_is_judged(cell: Cell, lock: Lock) -> None:
    image = {**IMAGE, "curl": "7"}
    assert debian.faults(cell, lock, PART, image=image, base={}, identity="sha256:else") == []
    image["python3"] = "4"
    found = debian.faults(cell, lock, PART, image=image, base={}, identity="sha256:else")
    assert found == ["python3 moved: 4, the lock says 1:3.11.2-1+b1"]


def test_without_a_lock_or_its_part_nothing_is_as_locked(cell: Cell, lock: Lock) -> None:
    assert "has no Debian lock" in debian.faults(cell, None, PART, image=IMAGE, base={}, identity=BASE)[0]
    assert debian.faults(cell, lock, "curl", image=IMAGE, base={}, identity=BASE) == ["the lock has no part for: curl"]


def test_a_status_file_gives_what_is_installed() -> None:
    text = "Package: a\nVersion: 1\n\nPackage: b\nStatus: deinstall ok config-files\nVersion: 2\n"
    assert [package.name for package in debian.parse_status(text)] == ["a"]
    assert list(debian.parse_status("")) == []


class Apt(docker.Engine):
    """An engine whose every base answers like apt at one moment, and that takes down what it was asked."""

    def __init__(self, answer: str, *, has_base: bool = True) -> None:
        self.answer, self.has_base, self.asked = answer, has_base, list[str]()

    @property
    def platform(self) -> str:
        return "linux/amd64"

    def image(self, reference: str) -> docker.Image | None:
        return docker.Image(id=BASE, tags=(reference,), digests=(), config={}) if self.has_base else None

    def run_shell(self, image: str, script: str) -> docker.Finished:
        self.asked.append(script)
        return docker.Finished(code=0, lines=tuple(self.answer.splitlines()))


def _locked(folder: Path, lock: Lock, cell: Cell) -> None:
    path = folder / debian.path_for(cell.base, "linux/amd64")
    path.parent.mkdir(parents=True)
    path.write_text(debian.dump(lock))


def _faults(folder: Path, cell: Cell, engine: docker.Engine) -> list[str]:
    moments: list[str] = []

    def at(moment: str) -> debian.Archive:
        moments.append(moment)
        return debian.Archive(timestamp=moment)

    found = debian.faults_of_locks(folder, [(cell, DOCKERFILE)], engine, at, platform="linux/amd64")
    assert set(moments) <= {"20260718T060000Z"}  # that of the lock
    return found


def test_a_debian_lock_as_its_snapshot_has_it_has_no_fault(tmp_path: Path, lock: Lock, cell: Cell) -> None:
    _locked(tmp_path, lock, cell)
    engine = Apt(ANSWER)
    assert _faults(tmp_path, cell, engine) == []
    assert PART in engine.asked[0]


def test_a_stranger_and_a_flipped_digit_in_a_debian_lock_are_found(tmp_path: Path, lock: Lock, cell: Cell) -> None:
    part = dict(lock.parts[PART])
    part["libgomp1"] = part["libgomp1"].model_copy(update={"sha256": "1" + SHA[1:]})
    part["curl"] = part["python3"]
    del part["python3"]
    _locked(tmp_path, lock.model_copy(update={"parts": {**lock.parts, PART: part, "sudo": part}}), cell)
    name = debian.path_for(cell.base, "linux/amd64").name
    assert _faults(tmp_path, cell, Apt(ANSWER)) == [
        f"{name}: nothing installs: sudo",
        f"{name}: curl: 1:3.11.2-1+b1 -> gone",
        f"{name}: libgomp1: 12.2.0-14+deb12u1 -> another file: SHA-256 {SHA}",
        f"{name}: python3 is missing: 1:3.11.2-1+b1",
    ]


def test_of_another_platform_apt_is_asked_as_that_one(tmp_path: Path, cell: Cell) -> None:
    """apt reads the index of that platform and takes the base's packages from it. The lock says that the base is the
    own platform's."""
    engine, archive = Apt(ANSWER.replace("_amd64.deb", "_arm64.deb")), debian.Archive()
    (tmp_path / "images/locks").mkdir(parents=True)
    for platform in ("linux/amd64", "linux/arm64"):
        debian.lock(tmp_path, [(cell, DOCKERFILE)], engine, archive, platform=platform, is_dry=False)
    own, other = engine.asked
    assert "APT::Architecture" not in own
    assert 'APT::Architecture "arm64"' in other
    assert other.index("99architecture") < other.index("apt-get update") < other.index("Status: install ok installed")
    found = debian.load(tmp_path, cell.base, "linux/arm64")
    assert found
    assert found.base == f"{BASE} as linux/amd64 has it"
    assert {each.architecture for part in found.parts.values() for each in part.values()} <= {"arm64", "all"}


def test_the_lock_of_another_platform_names_what_the_own_one_names(project: Path, cell: Cell) -> None:
    """Exceptions are packages that have the machine's name in theirs, or that exist for one platform only."""
    own, other = (debian.load(project, cell.base, each) for each in get_args(matrix.Platform))
    assert own
    assert other
    for part, packages in other.parts.items():
        assert abs(len(packages) - len(own.parts[part])) <= 2, part
        assert len(packages.keys() ^ own.parts[part].keys()) <= 4, part


def test_a_debian_lock_that_is_not_there_is_a_fault_and_a_missing_base_an_error(tmp_path: Path, cell: Cell) -> None:
    name = debian.path_for(cell.base, "linux/amd64").name
    assert _faults(tmp_path, cell, Apt(ANSWER)) == [f"{name}: there is no lock"]
    with pytest.raises(BuildError, match=rf"the base of images/locks/{name} is not here") as caught:
        _faults(tmp_path, cell, Apt(ANSWER, has_base=False))
    assert caught.value.hint == f"docker pull {cell.base.image}"
