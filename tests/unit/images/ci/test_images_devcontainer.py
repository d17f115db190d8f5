from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest

from images.ci import devcontainer
from images.errors import MatrixError
from images.matrix import drift, matrix, render
from images.matrix.matrix import Cell

LOADED = matrix.load(Path(__file__).parents[4])
NAMES = sorted(LOADED.devcontainers)
COMPILING = {"cpu": ["compile"], "cuda": ["compile", "compile-cuda"]}
FLAG = re.compile(r"^\s+(-D\S+|-D\w+='[^']*') \\$", re.MULTILINE)


def files(name: str, project: Path) -> dict[Path, str]:
    return devcontainer.files(project, name, LOADED.devcontainers[name])


def dockerfile(name: str, project: Path) -> str:
    return files(name, project)[Path(".devcontainer") / name / "Dockerfile"]


def configuration(name: str, project: Path) -> dict[str, Any]:
    text = files(name, project)[Path(".devcontainer") / name / "devcontainer.json"]
    first, _, rest = text.partition("\n")
    assert first.startswith("// DO NOT EDIT")
    found: dict[str, Any] = json.loads(rest)
    return found


def stage(text: str, name: str) -> str:
    """The instructions of one stage, without comments: the last ones belong to the next stage."""
    (body,) = re.findall(rf"^FROM \S+ AS {name}\n(.*?)(?=^FROM |\Z)", text, re.MULTILINE | re.DOTALL)
    return "\n".join(line for line in str(body).splitlines() if line and not line.startswith("#"))


def test_there_is_one_without_a_gpu_and_one_with() -> None:
    assert {name: cell.target.cuda is not None for name, cell in LOADED.devcontainers.items()} == {
        "cpu": False,
        "cuda": True,
    }


@pytest.mark.parametrize("name", NAMES)
def test_committed_files_are_what_the_matrix_renders(name: str, project: Path) -> None:
    assert drift.drift(project, files(name, project)) == []


@pytest.mark.parametrize("name", NAMES)
def test_the_stages_before_it_are_those_of_the_cell(name: str, project: Path) -> None:
    """With other stages the cell's build cache would not be used, and people would compile with another toolchain."""
    cell = LOADED.devcontainers[name]
    of_cell = render.render(cell, render.load_template(project, cell))[cell.folder / "Dockerfile"]
    shared = ["toolchain", "source", *(["nvcc"] if cell.toolkit else [])]
    assert [stage(dockerfile(name, project), each) for each in shared] == [stage(of_cell, each) for each in shared]


@pytest.mark.parametrize("name", NAMES)
def test_the_engine_is_compiled_with_the_flags_of_the_cell(name: str, project: Path) -> None:
    cell = LOADED.devcontainers[name]
    of_cell = render.render(cell, render.load_template(project, cell))[cell.folder / "Dockerfile"]
    expected = [FLAG.findall(stage(of_cell, each)) for each in COMPILING[name]]
    assert all(len(flags) > 15 for flags in expected)
    found = FLAG.findall(stage(dockerfile(name, project), "developer"))
    assert sorted(found) == sorted(flag for flags in expected for flag in flags)


@pytest.mark.parametrize("name", NAMES)
def test_what_the_command_line_of_devcontainers_cannot_take(name: str, project: Path) -> None:
    """It looks at what FROM names, and at nothing else: a digest, or what BASE says."""
    text = dockerfile(name, project)
    assert "# syntax" not in text
    assert f"FROM ${{BASE:-{LOADED.devcontainers[name].base.reference}}} AS base\n" in text
    described = configuration(name, project)
    assert described["build"]["args"] == {"BASE": "${localEnv:BASE}"}
    assert "features" not in described


@pytest.mark.parametrize("name", NAMES)
def test_it_is_nobody_with_more_rights_than_needed(name: str, project: Path) -> None:
    described = configuration(name, project)
    assert described["remoteUser"] == devcontainer.USER != "root"
    assert described["updateRemoteUserUID"]
    assert re.findall(r"^USER (\S+)$", dockerfile(name, project), re.MULTILINE)[-1] == devcontainer.USER
    assert described["securityOpt"] == ["no-new-privileges"]
    assert not {"privileged", "appPort"} & set(described)
    assert "docker.sock" not in json.dumps(described)


@pytest.mark.parametrize("name", NAMES)
def test_volumes_lie_in_the_home_whose_owner_is_changed(name: str, project: Path) -> None:
    """`updateRemoteUserUID` changes the home's owner and nothing else."""
    targets = re.findall(r"target=([^,]+)", " ".join(configuration(name, project)["mounts"]))
    assert len(targets) == 3
    assert all(Path(target).is_relative_to(devcontainer.HOME) for target in targets)


def test_a_new_engine_has_a_new_volume(project: Path) -> None:
    """A volume keeps the source that it was filled with."""
    cell = LOADED.devcontainers["cpu"]
    assert any(cell.engine.commit_short in mount for mount in configuration("cpu", project)["mounts"])


def test_the_gpu_is_optional_and_the_architecture_is_that_of_the_cell(project: Path) -> None:
    described = configuration("cuda", project)
    cell = LOADED.devcontainers["cuda"]
    assert described["hostRequirements"] == {"gpu": "optional"}
    architectures = ";".join(f"{form}-real" for form in cell.forms)
    assert f"-DCMAKE_CUDA_ARCHITECTURES='{architectures}'" in dockerfile("cuda", project)
    environment = described["containerEnv"]
    assert environment["CMAKE_CUDA_ARCHITECTURES"] == environment["CUDAARCHS"] == architectures
    assert environment["CUDA_HOME"] == "/opt/cuda"
    assert "/opt/cuda/bin" in dockerfile("cuda", project)
    assert "hostRequirements" not in configuration("cpu", project)


def test_no_variable_is_a_setting_of_the_appliance(project: Path) -> None:
    """It would configure every appliance that a test starts in there."""
    for name in NAMES:
        assert not [each for each in configuration(name, project)["containerEnv"] if each.startswith("APPLIANCE_")]


def test_tasks_and_debuggers_call_what_there_is(project: Path) -> None:
    tasks = json.loads((project / ".vscode/tasks.json").read_text())["tasks"]
    script = (project / ".devcontainer/dev").read_text()
    verbs = {shlex.split(task["command"])[1] for task in tasks}
    assert {"engine", "rebuild", "test", "serve", "debug"} <= verbs
    assert all(re.search(rf"^  {verb}\)", script, re.MULTILINE) for verb in verbs)
    debugged = json.loads((project / ".vscode/launch.json").read_text())["configurations"]
    assert [each["module"] for each in debugged if each["type"] == "debugpy"] == ["appliance", "pytest"]


def test_a_cell_that_is_none_is_refused_with_the_nearest(matrix_data: Any, lock_texts: dict[str, str]) -> None:
    matrix_data["devcontainers"]["cuda"] = "llama-cu130-sm8"
    with pytest.raises(MatrixError, match=r"devcontainer cuda .* none is called: llama-cu130-sm8$") as caught:
        matrix.parse_matrix(matrix_data, lock_texts)
    assert "llama-cu130-sm8" in str(caught.value.hint)


def test_a_cell_whose_template_has_no_such_stage_is_refused(project: Path) -> None:
    cell: Cell = matrix.select(LOADED.cells, "llama-cu124-sm86")[0]
    with pytest.raises(MatrixError, match=r"llama-cuda-debian\.devcontainer\.j2"):
        devcontainer.files(project, "cuda", cell)
