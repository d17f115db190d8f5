"""The build half against a real engine: bake's reading, a disk that fills up, what prune may take, the SBOM."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path

import docker as docker_py
import pytest
from spdx_tools.spdx.parser.jsonlikedict.json_like_dict_parser import JsonLikeDictParser
from spdx_tools.spdx.validation.document_validator import validate_full_spdx_document

from images import docker
from images.build import bake, build, prune
from images.errors import BuildError
from images.matrix import matrix
from images.matrix.matrix import Cell
from images.pins import debian
from images.proof import sbom

pytestmark = pytest.mark.build_half
MARK = re.compile(r"appliance-test-[0-9a-f]+")
ROOT = Path(__file__).parents[2]
BASE = "debian:bookworm-slim"
# Nothing that compresses: the archive must not fit.
FULL = "RUN head -c 16000000 /dev/urandom > /big"


@pytest.fixture
def cell() -> Cell:
    return matrix.select(matrix.load(ROOT).cells, "llama-cpu")[0]


@pytest.fixture
def away(tmp_path: Path) -> Path:
    """Return another folder with the same bake file: bake opens the archives of its targets even if it only prints."""
    (tmp_path / bake.ARCHIVES).mkdir(parents=True)
    (tmp_path / bake.BAKE_FILE).write_bytes((ROOT / bake.BAKE_FILE).read_bytes())
    return tmp_path


@pytest.fixture
def mark() -> Iterator[str]:
    """A word that only this test's layers hold; what it left in the builder's cache goes with it."""
    word = f"appliance-test-{uuid.uuid4().hex}"
    yield word
    engine, client = docker.Engine(), docker_py.from_env()
    for image in client.images.list(name=word):
        client.images.remove(str(image.id), force=True)
    for _ in range(2):
        for record in engine.build_cache():
            if word in record.description:
                engine.prune_cache(record.id)


def test_bake_reads_the_file_as_it_was_meant(away: Path) -> None:
    known = json.loads((ROOT / bake.BAKE_FILE).read_text("utf-8"))
    done = _run("docker", "buildx", "bake", "--print", "--file", str(bake.BAKE_FILE), *known["target"], cwd=away)
    assert done.returncode == 0, done.stderr
    targets = json.loads(done.stdout)["target"]
    assert set(targets) == set(known["target"])
    for name, target in targets.items():
        meant = known["target"][name]
        assert {key: target[key] for key in ("attest", "dockerfile", "output", "platforms")} == {
            key: meant[key] for key in ("attest", "dockerfile", "output", "platforms")
        }
        assert target["secret"] == ["id=ca,src=/dev/null"]
        assert set(target["labels"]) == set(meant["labels"])


@pytest.mark.parametrize("group", ["amd64", "arm64", "default"])
def test_bake_reads_every_group(away: Path, group: str) -> None:
    groups = json.loads((ROOT / bake.BAKE_FILE).read_text("utf-8"))["group"]
    done = _run("docker", "buildx", "bake", "--print", "--file", str(bake.BAKE_FILE), group, cwd=away)
    assert done.returncode == 0, done.stderr
    wanted = groups["amd64" if group == "default" else group]["targets"]
    assert set(json.loads(done.stdout)["target"]) == set(wanted)


def test_bake_takes_its_variables_from_the_environment(away: Path) -> None:
    bundle = away / "ca.pem"  # bake looks whether it is there
    bundle.write_text("")
    words = ("env", "llama_cpu_EPOCH=1700000000", f"CA_BUNDLE={bundle}")
    done = _run(*words, "docker", "buildx", "bake", "--print", "--file", str(bake.BAKE_FILE), "llama-cpu", cwd=away)
    target = json.loads(done.stdout)["target"]["llama-cpu"]
    assert target["args"]["SOURCE_DATE_EPOCH"] == "1700000000"
    assert target["secret"] == [f"id=ca,src={bundle}"]


def test_a_disk_that_is_full_is_exit_60_and_leaves_nothing(tmp_path: Path, cell: Cell, mark: str) -> None:
    job = _job(tmp_path, cell, f"{FULL} && echo {mark}")
    job.archive.symlink_to("/dev/full")
    with pytest.raises(BuildError, match="the disk is full") as caught:
        build.build(tmp_path, job, docker.Engine())
    assert caught.value.exit_code == 60
    assert list(job.archive.parent.iterdir()) == []
    assert docker.Engine().image(job.tag) is None


@pytest.mark.skipif(os.geteuid() != 0, reason="mounts a small disk")
def test_a_small_disk_that_fills_up_is_left_empty(tmp_path: Path, cell: Cell, mark: str) -> None:
    job = _job(tmp_path, cell, f"{FULL} && echo {mark}")
    program = (
        "import sys\nfrom pathlib import Path\nsys.path.insert(0, sys.argv[1])\n"
        "from tests.container.test_container_images import fill\nfill(Path(sys.argv[2]), sys.argv[3])\n"
    )
    small = 'mount -t tmpfs -o size=2m tmpfs "$1"; shift; exec "$@"'
    argv = (sys.executable, "-c", program, str(ROOT), str(tmp_path), f"{FULL} && echo {mark}")
    done = _run("unshare", "--mount", "sh", "-euc", small, "sh", str(job.archive.parent), *argv)
    assert (done.returncode, done.stdout.splitlines()[-2:]) == (60, ["[]", "2097152"]), done.stdout + done.stderr


def fill(root: Path, run: str) -> None:
    """Build in a process that sees the small disk, and print what is left on the disk."""
    cell = matrix.select(matrix.load(ROOT).cells, "llama-cpu")[0]
    job = _job(root, cell, run)
    try:
        build.build(root, job, docker.Engine())
    except BuildError as error:
        disk = os.statvfs(job.archive.parent)
        print(error.message, list(map(str, job.archive.parent.iterdir())), disk.f_bavail * disk.f_frsize, sep="\n")
        sys.exit(error.exit_code)


def test_prune_takes_our_layers_and_images_and_no_others(tmp_path: Path, cell: Cell, mark: str) -> None:
    foreign = f"RUN echo {mark}-foreign > /foreign"
    ours = f"RUN echo {mark} /opt/llama/mine > /ours"
    engine = docker.Engine()
    built = [build.build(tmp_path, _job(tmp_path, cell, step), engine) for step in (foreign, ours)]
    assert {each.tag for each in built} == {f"{mark}:test"}
    dry = {each.what: each for each in prune.prune(tmp_path, engine, with_cache=True, is_dry=True)}
    assert [what for what in dry if f"{mark} /opt/llama/mine" in what]
    assert not [what for what in dry if f"{mark}-foreign" in what]


def test_a_record_of_the_cache_goes_alone(tmp_path: Path, cell: Cell, mark: str) -> None:
    engine = docker.Engine()
    job = _job(tmp_path, cell, f"RUN echo {mark} > /one\nRUN echo {mark} gone > /two\nRUN echo {mark} gone > /three")
    docker_py.from_env().images.remove(build.build(tmp_path, job, engine).tag, force=True)  # it holds its layers
    # Of its own records alone: what other tests do meanwhile takes theirs away.
    mine = {each.id: each.description for each in engine.build_cache() if mark in each.description}
    gone = {record_id for record_id, description in mine.items() if f"{mark} gone" in description}
    assert (len(mine), len(gone)) == (3, 2)
    for _ in range(2):
        for record_id in gone:
            engine.prune_cache(record_id)
    left = {each.id for each in engine.build_cache()}
    assert not left & gone
    assert mine.keys() - gone <= left


def test_the_bill_of_materials_of_the_built_image_is_valid(tmp_path: Path, cell: Cell) -> None:
    out = tmp_path / "cpu.spdx.json"
    sbom.write(ROOT, cell, docker.Engine(), image=cell.tag, out=out)
    document = JsonLikeDictParser().parse(  # type: ignore[no-untyped-call]
        json.loads(out.read_text("utf-8"))
    )
    assert validate_full_spdx_document(document) == []
    names = {package.name for package in document.packages}
    assert {"libc6", "tini", "fastapi", "llama.cpp", "llama-cpp-python", "appliance:llama-cpu"} <= names
    before = out.read_bytes()
    sbom.write(ROOT, cell, docker.Engine(), image=cell.tag, out=out)
    assert out.read_bytes() == before


def test_apt_in_the_base_says_what_it_would_install() -> None:
    archive = debian.Archive()
    lock = debian.query(
        docker.Engine(), archive, image=BASE, identity="sha256:x", platform="linux/amd64", parts=["tini"]
    )
    assert lock.parts["tini"]["tini"].architecture == "amd64"
    with pytest.raises(BuildError, match="no-such-package"):
        debian.query(
            docker.Engine(), archive, image=BASE, identity="", platform="linux/amd64", parts=["no-such-package"]
        )


def _job(root: Path, cell: Cell, steps: str) -> build.Job:
    """A small build under the cell's name; its context is a folder of the test's own."""
    folder = root / cell.folder
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "Dockerfile").write_text(f"FROM {cell.base.reference}\n{steps}\n")
    archive = root / build.ARCHIVES / "o.oci.tar"
    archive.parent.mkdir(parents=True, exist_ok=True)
    return build.Job(
        cell=cell,
        base=build.BaseChoice(identity="sha256:x", context=f"docker-image://{BASE}", override=BASE),
        origin=build.Origin(epoch_s=1700000000, revision=None),
        build_id="b" * 32,
        version="0",
        tag=f"{MARK.findall(steps)[0]}:test",
        archive=archive,
    )


def _run(*argv: str, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    return subprocess.run(argv, cwd=cwd, capture_output=True, text=True, check=False)
