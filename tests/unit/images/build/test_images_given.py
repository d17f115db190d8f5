from __future__ import annotations

import hashlib
from dataclasses import replace
from pathlib import Path

import pytest

from images.build import build, given
from images.errors import BuildError, UsageError
from images.matrix import matrix, render
from images.matrix.matrix import Cell, IndexFile

WHEEL = b"a wheel"
FILE = IndexFile(
    requirement="torch==1.0+cpu",
    file="torch-1.0+cpu-cp311-cp311-linux_x86_64.whl",
    sha256=hashlib.sha256(WHEEL).hexdigest(),
    index="https://wheels.example/cpu",
)


@pytest.fixture
def cell(project: Path) -> Cell:
    found = matrix.select(matrix.load(project).cells, "vllm-cpu")[0]
    return replace(found, engine=replace(found.engine, index_files=(FILE,)))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "wheels"
    made.mkdir()
    (made / FILE.file).write_bytes(WHEEL)
    (made / "other.whl").write_bytes(b"x")
    return made


def test_the_build_is_given_the_files_of_the_matrix_and_nothing_else(job: build.Job, folder: Path) -> None:
    given.check_wheels(job.cell, folder)
    planned = given.plan(job, folder)
    context = job.archive.with_name("vllm-cpu.wheels")
    argv = build.buildx_argv(planned)
    assert argv[argv.index("--build-context") + 1] == f"{render.GIVEN_WHEELS}={context}"
    with given.placed(planned):
        assert [path.name for path in context.iterdir()] == [FILE.file]
        assert (context / FILE.file).read_bytes() == WHEEL
    assert not context.exists()
    assert sorted(path.name for path in folder.iterdir()) == ["other.whl", FILE.file]


def test_what_an_earlier_build_left_is_replaced_and_a_failed_one_leaves_nothing(job: build.Job, folder: Path) -> None:
    context = job.archive.with_name("vllm-cpu.wheels")
    context.mkdir()
    (context / FILE.file).write_bytes(b"half")
    planned = given.plan(job, folder)
    with given.placed(planned):
        assert (context / FILE.file).read_bytes() == WHEEL
    with pytest.raises(BuildError, match="planted"):
        _fail(planned)
    assert not context.exists()


def _fail(job: build.Job) -> None:
    with given.placed(job):
        message = "planted"
        raise BuildError(message)


def test_without_a_folder_the_index_is_asked(job: build.Job) -> None:
    given.check_wheels(job.cell, None)
    assert given.plan(job, None) == job
    with given.placed(job):
        assert "--build-context" not in build.buildx_argv(job)


def test_a_missing_file_says_how_to_get_it(cell: Cell, folder: Path) -> None:
    (folder / FILE.file).unlink()
    with pytest.raises(BuildError, match=rf"--wheels lacks a file: .*{FILE.file[:9]}.*: No such file") as caught:
        given.check_wheels(cell, folder)
    assert caught.value.hint == "pip download --no-deps --index-url https://wheels.example/cpu torch==1.0+cpu"
    assert caught.value.exit_code == 60


def test_another_file_of_that_name_is_refused(cell: Cell, folder: Path) -> None:
    (folder / FILE.file).write_bytes(b"another")
    with pytest.raises(BuildError, match=f"SHA-256 {hashlib.sha256(b'another').hexdigest()}") as caught:
        given.check_wheels(cell, folder)
    assert FILE.sha256 in (caught.value.hint or "")


def test_a_cell_whose_wheels_are_all_on_pypi_takes_no_folder(llama_cpu: Cell, folder: Path) -> None:
    with pytest.raises(UsageError, match="--wheels fits no cell whose wheels are all on PyPI: llama-cpu") as caught:
        given.check_wheels(llama_cpu, folder)
    assert caught.value.exit_code == 2
