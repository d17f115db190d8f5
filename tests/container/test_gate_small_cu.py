"""nvcc's own output for every SM of CUDA 12.4 and 13, read by the gate: what runs natively where, what is caught."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

from images import docker
from images.build import build
from images.proof import gate
from tests.container.small_cell import HERE, make_job, make_root

pytestmark = pytest.mark.build_half
FolderOf = Callable[[str], Path]
# Every chip of a release in the forms that a cell may ask for, and a family. The cells are those whose nvcc is asked.
CUDA_12_4 = ("75", "80", "86", "89", "90", "90a")
CUDA_13_0 = ("75", "80", "86", "87", "89", "90", "100", "100a", "103", "103a", "110", "110a", "120a", "121a", "120f")
TARGETS = {
    "llama-cu124-sm90": CUDA_12_4,
    "llama-cu130-sm90": CUDA_13_0,
    "llama-cu134-sm90": (*CUDA_13_0, "107"),
}
EACH = [(cell, target) for cell, targets in TARGETS.items() for target in targets]
CHIPS = (75, 80, 86, 87, 89, 90, 100, 103, 107, 110, 120, 121)
# Beyond its own chip, by NVIDIA's rule; every other pair needs a JIT, and these files carry no PTX for it.
ALSO_RUNS_ON = {"80": {86, 89}, "86": {89}, "100": {103, 107}, "103": {107}, "120f": {121}}
KERNELS = {"_Z5scaleIfLi2EEvPT_i", "_Z5scaleIdLi3EEvPT_i", "sum"}


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory: pytest.TempPathFactory) -> FolderOf:
    """Return the output of each nvcc, by cell. Unchanged sources are compiled once: the layers stay in BuildKit's
    cache."""
    return cache(lambda cell: compile_small(tmp_path_factory.mktemp("gate"), cell, TARGETS[cell]))


@pytest.fixture(params=TARGETS)
def compiled(folder_of: FolderOf, request: pytest.FixtureRequest) -> Path:
    return folder_of(request.param)


@pytest.mark.parametrize(("cell", "target"), EACH)
def test_a_library_runs_natively_where_nvidia_says(folder_of: FolderOf, cell: str, target: str) -> None:
    library = query(folder_of(cell) / f"libsm{target}.so")
    assert {kernel.sass for kernel in library.kernels} == {(target,)}
    names = {kernel.name for kernel in library.kernels}
    assert names > KERNELS
    assert [name for name in names - KERNELS if "apply" not in name] == []
    native = {chip for chip in CHIPS if not gate.judge([library], chip).faults}
    assert native == {int(target.rstrip("af"))} | ALSO_RUNS_ON.get(target, set())


def test_the_wrong_sm_is_named(compiled: Path) -> None:
    faults = gate.judge([query(compiled / "libsm86.so")], 80).faults
    assert len(faults) == 4
    assert f"{compiled}/libsm86.so: sum has only sm_86" in faults


def test_a_ptx_only_object_is_named(compiled: Path) -> None:
    faults = gate.judge([query(compiled / "ptx_only.o")], 90).faults
    assert faults == [f"{compiled}/ptx_only.o: sum has only PTX of compute_80"]


def test_ptx_beside_sass_is_no_fault(compiled: Path) -> None:
    library = query(compiled / "beside.o")
    assert [(kernel.sass, kernel.ptx) for kernel in library.kernels] == [(("90",), ("90",))]
    assert gate.judge([library], 90).faults == []


def test_one_kernel_that_lacks_the_sm_is_named(compiled: Path) -> None:
    """The file has code for sm_90, but one of its kernels has none."""
    faults = gate.judge([query(compiled / "libmixed.so")], 90).faults
    assert faults == [f"{compiled}/libmixed.so: sum has only sm_80"]


def test_a_kernel_is_judged_in_each_file_that_has_it(compiled: Path) -> None:
    """The name has sm_90 in one translation unit; the other loads its own, which is PTX."""
    faults = gate.judge([query(compiled / "libshared.so")], 90).faults
    assert faults == [f"{compiled}/libshared.so: _Z5scaleIfLi2EEvPT_i has only PTX of compute_80"]


def test_a_library_without_kernels_proves_nothing(compiled: Path) -> None:
    assert gate.judge([query(compiled / "libplain.so")], 90).faults == ["no kernel in any of 1 files"]


def compile_small(folder: Path, cell_id: str, targets: tuple[str, ...]) -> Path:
    text = (HERE / "gate.Dockerfile").read_text("utf-8").replace("@TARGETS@", " ".join(targets))
    root, cell = make_root(folder, cell_id, text)
    engine = docker.Engine()
    if engine.image(cell.base.image) is None:  # the image under test stands on bookworm, so only trixie can be missing
        pytest.skip(f"{cell.base.image} is not here, and no registry gave it: docker pull {cell.base.image}")
    words = list(build.buildx_argv(make_job(root, cell, engine)))
    words[words.index("--output") + 1] = f"type=local,dest={root / 'out'}"
    done = docker.stream((*words[:-1], "--target", "gate", "."), cwd=root)
    assert done.code == 0, build.explain_failure(cell, done.lines).message
    return root / "out"


def query(file: Path) -> gate.Library:
    return gate.query_library(gate.find_tool(), file)
