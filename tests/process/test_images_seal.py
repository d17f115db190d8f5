"""The manifest of files in a label: its steps run first, and the image is exported with the hash that they gave."""

from __future__ import annotations

import hashlib
import json
import shutil
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from images.build import build
from images.docker import Engine
from images.errors import BuildError
from images.layers import oci
from images.matrix import matrix, render, timing
from images.proof import reproduce

ROOT = Path(__file__).parents[2]
MANIFEST = "0  /bin/sh\n"
SHA256 = hashlib.sha256(MANIFEST.encode()).hexdigest()
Log = Callable[[], list[list[str]]]


@pytest.fixture
def log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Log:
    """Put a `docker` that builds nothing on the PATH, and return a function that tells how it was called."""
    program, said = tmp_path / "bin/docker", tmp_path / "log"
    program.parent.mkdir()
    text = (ROOT / "tests/fakes/fake_buildx.py").read_text("utf-8")
    program.write_text(text.replace("/usr/bin/env python3", sys.executable, 1), "utf-8")
    program.chmod(0o755)
    for name, value in {
        "PATH": str(program.parent),
        "FAKE_BUILDX_LOG": str(said),
        "FAKE_MANIFEST": MANIFEST,
        "FAKE_LAYERS": "one,one,one,one",
    }.items():
        monkeypatch.setenv(name, value)
    return lambda: [json.loads(line) for line in said.read_text("utf-8").splitlines()] if said.exists() else []


@pytest.fixture
def job(tmp_path: Path) -> build.Job:
    """Return a job with the cell's rendered files, in a project of its own."""
    cell = matrix.select(matrix.load(ROOT).cells, "llama-cpu")[0]
    shutil.copytree(ROOT / cell.folder, tmp_path / cell.folder)
    (tmp_path / build.ARCHIVES).mkdir(parents=True)
    return build.Job(
        cell=cell,
        base=build.BaseChoice(identity=str(cell.base.digest)),
        origin=build.Origin(epoch_s=1, revision=None),
        build_id="b" * 32,
        version="0",
        tag=cell.tag,
        archive=tmp_path / build.ARCHIVES / "o.oci.tar",
    )


def test_the_label_is_the_hash_of_what_the_steps_gave(tmp_path: Path, job: build.Job, log: Log) -> None:
    sealed = build.seal(tmp_path, replace(job, no_cache=True))
    assert (sealed.files_sha256, sealed.no_cache) == (SHA256, False)
    (words,) = log()
    assert "--no-cache" in words
    assert words[words.index("--target") + 1] == build.FILES_TARGET
    assert f"io.appliance.files-sha256={SHA256}" in build.buildx_argv(sealed)
    assert list(job.archive.parent.iterdir()) == []


def test_a_dockerfile_without_a_manifest_is_left_alone(tmp_path: Path, job: build.Job, log: Log) -> None:
    (tmp_path / job.dockerfile).write_text("FROM a AS b\n", "utf-8")
    assert build.seal(tmp_path, job) is job
    assert log() == []


def test_a_step_that_fails_is_exit_60(
    tmp_path: Path, job: build.Job, log: Log, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_CODE", "1")
    with pytest.raises(BuildError, match="a step failed"):
        build.seal(tmp_path, job)
    assert len(log()) == 1


def test_a_build_without_the_cache_ends_with_the_label(tmp_path: Path, job: build.Job, log: Log) -> None:
    """The first build runs every step. Two builds from the cache follow: for the manifest, and for the archive with its
    hash."""
    reproduce.export(tmp_path, job, ())
    with oci.opened(job.archive) as tar:
        config = oci.json_blob(tar, str(oci.manifest_of(tar)["config"]["digest"]))
    assert config["config"]["Labels"][build.FILES_LABEL] == SHA256
    assert ["--no-cache" in words for words in log()] == [True, False, False]


def test_a_cache_that_gives_other_layers_is_refused(
    tmp_path: Path, job: build.Job, log: Log, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_LAYERS", "one,of an earlier build")
    with pytest.raises(BuildError, match="does not give the layers that were just built"):
        reproduce.export(tmp_path, job, ())
    assert len(log()) == 3


class Loading(Engine):
    """Notes what it is given."""

    def __init__(self) -> None:
        self.loaded: list[Path] = []

    @property
    def platform(self) -> str:
        return "linux/amd64"

    @property
    def image_store(self) -> str:
        return "io.containerd.snapshotter.v1"

    def load(self, archive: Path) -> None:
        self.loaded.append(archive)


@pytest.mark.parametrize("run", [1, 2], ids=["as its steps ran", "as it was exported"])
def test_a_tree_that_is_edited_while_it_is_built_makes_no_image(
    run: int, tmp_path: Path, job: build.Job, log: Log, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The image's labels describe the files that were read before the edit."""
    for path in render.inputs(job.cell):
        copy = shutil.copytree if (ROOT / path).is_dir() else shutil.copy
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        copy(ROOT / path, tmp_path / path)
    engine = Loading()
    planned = replace(job, inputs=build.digests_of(tmp_path, job.cell))
    built = build.build(tmp_path, planned, engine)
    assert built.build_id == job.build_id
    took = timing.load(job.archive.parent, job.build_id, built.digest)
    assert took
    assert 0 <= took.seconds < 60
    edited = tmp_path / "appliance/errors.py"
    monkeypatch.setenv("FAKE_EDITS", f"{run + len(log())} {edited}")
    with pytest.raises(BuildError, match=r"the tree was edited meanwhile: appliance/errors\.py") as failed:
        build.build(tmp_path, planned, engine)
    assert failed.value.exit_code == 60
    assert len(engine.loaded) == 1
    assert len(log()) == 2 + run
    assert not job.archive.exists()
