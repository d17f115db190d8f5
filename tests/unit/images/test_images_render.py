from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from appliance.image_facts import parse_image_facts
from images import drift, matrix, render
from images.errors import MatrixError
from images.matrix import Cell


def test_committed_files_are_what_the_matrix_renders(project: Path) -> None:
    for cell in matrix.load(project).cells:
        assert drift.drift(project, render.render(cell, render.load_template(project, cell))) == []


def test_every_folder_of_rendered_files_is_a_cell(project: Path) -> None:
    folders = {path.name for path in (project / "images/rendered").iterdir()}
    assert folders == {cell.id for cell in matrix.load(project).cells}


def test_drift_names_missing_different_and_stray_files(tmp_path: Path) -> None:
    folder = Path("images/rendered/x")
    drift.write(tmp_path, {folder / "Dockerfile": "old", folder / "stray": ""})
    lines = drift.drift(tmp_path, {folder / "Dockerfile": "new", folder / "image_facts.json": "{}"})
    assert lines == [
        "images/rendered/x/Dockerfile: differs from what the matrix renders",
        "images/rendered/x/image_facts.json: missing",
        "images/rendered/x/stray: nothing renders it",
    ]


def test_facts_say_what_the_matrix_says(project: Path, cell: Cell) -> None:
    facts = parse_image_facts(_rendered(project, cell)["image_facts.json"])
    assert (facts.cell, facts.engine_build, facts.cuda) == ("llama-cpu", 11312, None)
    assert facts.cpu_variants == cell.cpu_variants
    assert facts.build_id == render.BUILD_ID_MARK


def test_everything_copied_is_in_the_context_and_nothing_else(project: Path, cell: Cell) -> None:
    files = _rendered(project, cell)
    allowed = {line[1:] for line in files["Dockerfile.dockerignore"].splitlines() if line.startswith("!")}
    dockerfile = files["Dockerfile"]
    copied = {
        word for line in re.findall(r"^COPY (?!--from)(.+)$", dockerfile, re.MULTILINE) for word in line.split()[:-1]
    }
    copied |= set(re.findall(r"type=bind,source=([^/,][^,]*)", dockerfile))
    assert copied == allowed


def test_a_sha256_pins_every_from_that_is_no_stage(project: Path, cell: Cell) -> None:
    sources = re.findall(r"^FROM (\S+) AS (\S+)$", _rendered(project, cell)["Dockerfile"], re.MULTILINE)
    stages = {name for _, name in sources}
    outside = {source for source, _ in sources if source not in stages}
    assert outside == {cell.base.reference}


def test_nothing_expensive_follows_the_build_id(project: Path, cell: Cell) -> None:
    before, _, after = _rendered(project, cell)["Dockerfile"].partition("ARG APPLIANCE_BUILD_ID")
    assert "cmake --build" in before
    assert "apt-get" not in after
    assert "ARG" not in before


def test_templates_hold_values_and_at_most_one_if(project: Path) -> None:
    for path in (project / render.TEMPLATES).glob("*.j2"):
        text = path.read_text("utf-8")
        blocks = re.findall(r"{%-?\s*(\w+)", text)
        assert set(blocks) <= {"if", "else", "endif"}
        assert blocks.count("if") <= 1
        assert "# syntax=" not in text


def test_a_template_that_asks_for_more_is_refused(cell: Cell) -> None:
    with pytest.raises(MatrixError, match="'nvcc' is undefined"):
        render.render(cell, "FROM {{ nvcc }}\n")


def test_a_missing_template_is_named(tmp_path: Path, cell: Cell) -> None:
    with pytest.raises(MatrixError, match=r"llama-cpu\.Dockerfile\.j2"):
        render.load_template(tmp_path, cell)


def test_variants_of_the_matrix_reach_the_compiler(project: Path, cell: Cell) -> None:
    variants = replace(cell.engine.cpu_variants["linux/amd64"], built=("x64", "zen4"))
    changed = replace(cell, engine=replace(cell.engine, cpu_variants={"linux/amd64": variants}))
    assert "APPLIANCE_CPU_VARIANTS='x64;zen4'" in _rendered(project, changed)["Dockerfile"]


def _rendered(project: Path, cell: Cell) -> dict[str, str]:
    return {path.name: text for path, text in render.render(cell, render.load_template(project, cell)).items()}
