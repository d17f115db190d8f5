from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import yaml

from images.build import build
from images.matrix import matrix
from images.matrix.matrix import Cell

PROJECT = Path(__file__).resolve().parents[3]


@pytest.fixture
def project() -> Path:
    return PROJECT


@pytest.fixture(scope="session")
def written_matrix() -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load((PROJECT / "build_matrix.yaml").read_text("utf-8"))
    return found


@pytest.fixture
def matrix_data(written_matrix: dict[str, Any]) -> dict[str, Any]:
    """Return a copy of build_matrix.yaml's values that the test may damage."""
    return copy.deepcopy(written_matrix)


@pytest.fixture(scope="session")
def llama_cpu() -> Cell:
    return matrix.select(matrix.load(PROJECT).cells, "llama-cpu")[0]


@pytest.fixture
def lock_texts() -> dict[str, str]:
    return {path.stem: path.read_text("utf-8") for path in (PROJECT / "images/locks").glob("*.txt")}


@pytest.fixture
def cell(llama_cpu: Cell) -> Cell:
    return llama_cpu


@pytest.fixture
def job(cell: Cell, tmp_path: Path) -> build.Job:
    return build.Job(
        cell=cell,
        base=build.BaseChoice(identity=str(cell.base.digest)),
        origin=build.Origin(epoch_s=1700000000, revision="a" * 40),
        build_id="b" * 32,
        version="0.1.0",
        tag=cell.tag,
        archive=tmp_path / "o.tar",
    )
