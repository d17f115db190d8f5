"""The rows of engines: one each, looked up when the matrix is loaded; a new engine is a new row."""

from __future__ import annotations

import ast
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from images import docker
from images.errors import MatrixError
from images.layers.tree import Entry, Tree
from images.matrix import compat, matrix, render
from images.matrix.engines import ENGINES, LIBRARY_FOLDER, EngineFiles
from images.matrix.matrix import Cell
from images.proof import licenses, verify

THIRD = EngineFiles(
    repository="third/third",
    serves="gguf",
    folder="/opt/third",
    binary="/opt/third/serve",
    version_line="third {version}, {commit}",
    packages="python3 tini tcc",
    caches={"HOME": "home", "THIRD_CACHE": "third"},
    gpu_files=re.compile(r"^opt/third/kernels/.+\.so$"),
    tools=re.compile(r"^usr/bin/cc$"),
    headers=re.compile(r"^opt/third/"),
    needed=(re.compile(r"^usr/bin/cc$"),),
    code=(LIBRARY_FOLDER, "opt/third/lib/"),
    wheel_folders=("opt/third/lib/",),
)


@pytest.fixture
def third(matrix_data: dict[str, Any], lock_texts: dict[str, str]) -> Cell:
    """A cell of an engine that only the matrix and one row know."""
    matrix_data["engines"]["third"] = {**matrix_data["engines"]["llama"], "title": "third"}
    row = next(row for row in matrix_data["cells"] if "cpu" in row["targets"])
    matrix_data["cells"].append({**row, "engine": "third", "targets": ["cpu", "cu130-sm90"]})
    cells = matrix.parse_matrix(matrix_data, lock_texts, {**ENGINES, "third": THIRD}).cells
    compat.check(cells)
    return matrix.select(cells, "third-cpu")[0]


def test_each_engine_of_the_matrix_has_a_row_and_each_row_an_engine(project: Path) -> None:
    engines = matrix.load(project).engines
    assert {name: engine.files for name, engine in engines.items()} == ENGINES


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("third", "it has llama, vllm; a new engine needs its packages, binary, caches and files to check"),
        ("lama", "perhaps you meant llama"),
    ],
)
def test_an_engine_without_a_row_is_refused(
    matrix_data: dict[str, Any], lock_texts: dict[str, str], name: str, hint: str
) -> None:
    matrix_data["engines"][name] = matrix_data["engines"]["llama"]
    with pytest.raises(MatrixError) as caught:
        matrix.parse_matrix(matrix_data, lock_texts)
    assert (caught.value.message, caught.value.hint) == (
        f"images/matrix/engines.py has no row for engine: {name}",
        hint,
    )


def test_a_third_engine_is_rendered_from_its_row(third: Cell) -> None:
    files = render.render(third, "{{ runtime_packages }}|{{ engine_binary }}|{{ caches }}\n{{ labels }}\n")
    text = files[third.folder / "Dockerfile"]
    caches = [f"{name}=/data/cache/${{APPLIANCE_BUILD_ID}}/{folder}" for name, folder in THIRD.caches.items()]
    assert text.startswith("python3 tini tcc|/opt/third/serve|" + " \\\n    ".join(caches))
    assert 'io.appliance.engine="third"' in text
    assert "third-cpu" in files[third.folder / "image_facts.json"]


def test_a_third_engine_is_held_to_its_row(third: Cell) -> None:
    said = f"third {third.engine.version}, {third.engine.commit_short}"
    good = _evidence(third, said, "usr/bin/cc", "opt/third/tcc.h", "opt/third/lib/x-1.dist-info/LICENSE")
    assert verify.check_engine_version(good).ok
    assert verify.check_tools(good).ok
    assert verify.check_licenses(good).ok
    bad = _evidence(third, "third 0", "usr/bin/gcc", "opt/x.h", "opt/third/lib/x.py", "opt/third/lib/x-1.dist-info/X")
    assert verify.check_engine_version(bad).detail == f"third 0; expected {said}"
    assert verify.check_tools(bad).detail == "tools: usr/bin/gcc; headers: opt/x.h; missing: ^usr/bin/cc$"
    assert "missing: x-1.dist-info" in verify.check_licenses(bad).detail
    assert verify.check_byte_code(bad).detail == "without byte code: opt/third/lib/x.py"


def test_no_other_file_names_an_engine(project: Path) -> None:
    """No other file has a string that is only the name of an engine. A dispatch by name would need such a string."""
    found = {
        (path.name, node.value)
        for path in (project / "images").rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text("utf-8")))
        if isinstance(node, ast.Constant) and node.value in ENGINES
    }
    assert {name for name, _ in found} == {"engines.py", "select.py"}
    assert ("select.py", "vllm") not in found  # it names the default alone


def _evidence(cell: Cell, said: str, *paths: str) -> verify.ImageSnapshot:
    entry = Entry(path="", kind="file", mode=0o644, uid=0, gid=0, size_bytes=1, layer=1)
    files = {
        path: replace(entry, path=path)
        for path in (
            f"opt/appliance/licenses/{cell.engine.title}/LICENSE",
            *licenses.components()["appliance"].paths,
            *paths,
        )
    }
    return verify.ImageSnapshot(
        cell=cell,
        platform="linux/amd64",
        config={},
        tree=Tree(files=files, base={}, certificates={}, base_certificates=set()),
        version=docker.Finished(code=0, lines=()),
        engine_version=docker.Finished(code=0, lines=(said,)),
    )
