"""Cells that cannot exist, planted one by one."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from images.errors import BuildError, MatrixError
from images.matrix import compat, matrix
from images.matrix.matrix import Cell, Matrix


@pytest.fixture
def loaded(project: Path) -> Matrix:
    return matrix.load(project)


def test_every_committed_cell_can_exist(loaded: Matrix) -> None:
    compat.check(loaded.cells)
    assert len(loaded.cells) == 38


def _add(data: dict[str, Any], like: str, **target: str) -> None:
    """A cell beside the one that is named, of another release or chip."""
    name = f"cu{target['cuda'].replace('.', '')}-sm{target['sm']}"
    data["targets"][name] = target
    next(row for row in data["cells"] if like in row["targets"])["targets"].append(name)
    data["engines"]["llama"]["sm_forms"].setdefault(target["sm"], {"form": target["sm"], "why": "a test's"})


@pytest.mark.parametrize(
    ("like", "target", "said"),
    [
        ("cu124-sm75", {"cuda": "12.4", "sm": "120"}, "CUDA 12.4 has no target sm_120 (first in 12.8)"),
        ("cu130-sm75", {"cuda": "13.0", "sm": "70"}, "CUDA 13.0 has no target sm_70 (last in 12.9)"),
        ("cu124-sm75", {"cuda": "12.4", "sm": "87"}, "SM 87 is Orin (Jetson), which is built into linux/arm64 and not"),
        ("cu130-sm75", {"cuda": "13.0", "sm": "95"}, "SM 95 is unknown"),
    ],
)
def test_an_impossible_target_is_refused(
    matrix_data: dict[str, Any], lock_texts: dict[str, str], like: str, target: dict[str, str], said: str
) -> None:
    matrix_data["out_of_scope"] = []
    _add(matrix_data, like, **target)
    _refused(matrix_data, lock_texts, said)


def test_cuda_12_4_does_not_read_the_headers_of_this_c_library_on_arm(
    matrix_data: dict[str, Any], lock_texts: dict[str, str]
) -> None:
    """The glibc patch is of NVIDIA's headers, and does not help its front end."""
    row = next(row for row in matrix_data["cells"] if "cu124-sm90" in row["targets"])
    row["platforms"] = ["linux/amd64", "linux/arm64"]
    matrix_data["out_of_scope"] = []
    row["targets"] = ["cu124-sm90"]
    said = "CUDA 12.4's front end reads the headers of glibc up to 2.37 on linux/arm64, debian-13 has 2.41"
    _refused(matrix_data, lock_texts, said)


def test_an_unknown_release_is_refused(matrix_data: dict[str, Any], lock_texts: dict[str, str]) -> None:
    matrix_data["toolkits"]["11.8"] = {**matrix_data["toolkits"]["12.4"]}
    _add(matrix_data, "cu124-sm75", cuda="11.8", sm="75")
    _refused(matrix_data, lock_texts, "CUDA 11.8 is unknown, known are 12.4")


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("host_compiler", None, "its host compiler is too new: gcc 14 of debian-13, CUDA 12.4 takes up to 13"),
        ("host_compiler", 9, "debian-13 has no gcc 9, it has 14, 13, 12"),
        ("glibc_patch", None, "CUDA 12.4's headers compile on glibc up to 2.40, debian-13 has 2.41"),
        ("base", "bookworm", "its toolkit is bookworm's, whose binaries need that C library, and its base is trixie"),
    ],
)
def test_a_toolkit_that_does_not_fit_its_base_is_refused(
    matrix_data: dict[str, Any], lock_texts: dict[str, str], key: str, value: object, said: str
) -> None:
    matrix_data["toolkits"]["12.4"][key] = value
    _refused(matrix_data, lock_texts, said)


def test_a_toolkit_image_without_the_platform_is_refused(
    matrix_data: dict[str, Any], lock_texts: dict[str, str]
) -> None:
    matrix_data["bases"]["cuda-12.9"]["platforms"] = ["linux/amd64"]
    _refused(matrix_data, lock_texts, "nvidia/cuda:12.9.1-devel-ubuntu24.04 has no platform linux/arm64")


@pytest.mark.parametrize(
    ("sm", "form", "said"),
    [("75", "75a", "CUDA 12.4 has no form sm_75a"), ("86", "89", "code of the form sm_89 does not run on SM 86")],
)
def test_a_form_must_exist_and_run_on_its_chip(
    matrix_data: dict[str, Any], lock_texts: dict[str, str], sm: str, form: str, said: str
) -> None:
    matrix_data["engines"]["llama"]["sm_forms"][sm]["form"] = form
    _refused(matrix_data, lock_texts, said)


def test_a_distribution_without_facts_is_named(matrix_data: dict[str, Any], lock_texts: dict[str, str]) -> None:
    matrix_data["bases"]["trixie"]["distribution"] = "debian-31"
    error = _refused(matrix_data, lock_texts, "does not know: debian-31")
    assert error.hint in ("perhaps you meant debian-13", "perhaps you meant debian-12")


def test_every_form_is_one_that_each_release_of_its_cells_has(loaded: Matrix) -> None:
    known = compat.facts()
    for cell in loaded.cells:
        for form in cell.forms:
            assert form in known.releases[cell.target.cuda or ""].forms
            told = f"arch=compute_{form},code=sm_{form}"
            assert (told in (cell.gencode or "")) is cell.engine.is_compiled


def test_an_unresolved_toolkit_image_renders_and_is_not_built(loaded: Matrix) -> None:
    cell = matrix.select(loaded.cells, "llama-cu128-sm90")[0]
    compat.refuse_unresolved(cell)
    open_cell = _unresolved(cell)
    compat.check([open_cell])
    with pytest.raises(BuildError, match=r"no digest yet: nvidia/cuda:12\.8\.1-devel-ubuntu24\.04") as caught:
        compat.refuse_unresolved(open_cell)
    assert caught.value.exit_code == 60
    assert caught.value.hint == "python -m images lock --bases asks a registry; --toolkit-image takes one that is here"
    assert [base.image for base in open_cell.unresolved] == ["nvidia/cuda:12.8.1-devel-ubuntu24.04"]


def test_what_has_no_cuda_has_no_floor(cell: Cell) -> None:
    assert compat.cell_floors(cell) is None


def _unresolved(cell: Cell) -> Cell:
    assert cell.toolkit is not None
    assert cell.toolkit.image is not None
    image = replace(cell.toolkit.image, digest=None, status="unresolved")
    return replace(cell, toolkit=replace(cell.toolkit, image=image))


def _refused(data: dict[str, Any], locks: dict[str, str], said: str) -> MatrixError:
    with pytest.raises(MatrixError) as caught:
        compat.check(matrix.parse_matrix(data, locks).cells)
    assert said in caught.value.message
    return caught.value
