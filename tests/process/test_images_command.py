"""`python -m images` as a process, on a copy of the project that a test may damage."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.process.stages.made_once import made_once

PROJECT = Path(__file__).parents[2]


@pytest.fixture
def project() -> Path:
    return PROJECT


@pytest.fixture(scope="module")
def rendered(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the project in which everything was rendered; a test takes a copy of it."""
    return made_once(tmp_path_factory, "rendered", _render)


def _render(folder: Path) -> Path:
    _copy(PROJECT, folder)
    assert _run(folder, "render").returncode == 0
    return folder


def test_render_check_names_the_file_that_differs(project: Path, tmp_path: Path) -> None:
    _copy(project, tmp_path)
    changed = tmp_path / "images/rendered/llama-cpu/Dockerfile"
    changed.write_text(changed.read_text("utf-8") + "RUN curl\n", "utf-8")
    done = _run(tmp_path, "render", "--check")
    assert done.returncode == 61
    assert "images/rendered/llama-cpu/Dockerfile: differs" in done.stderr
    assert "hint: python -m images render" in done.stderr


def test_a_wheel_without_a_hash_is_exit_10_and_named(project: Path, tmp_path: Path) -> None:
    _copy(project, tmp_path)
    path = tmp_path / "images/locks/appliance.txt"
    text = path.read_text("utf-8")
    path.write_text(re.sub(r"(?m)^(idna==\S+) \\\n(?:    --hash=\S+(?: \\)?\n)+", r"\1\n", text), "utf-8")
    done = _run(tmp_path, "render")
    assert done.returncode == 10
    assert "images/locks/appliance.txt holds a requirement without a version or a hash: idna==" in done.stderr


def test_generated_files_are_held_to_the_matrix(rendered: Path, tmp_path: Path) -> None:
    shutil.copytree(rendered, tmp_path, dirs_exist_ok=True)
    assert _run(tmp_path, "render", "--check").returncode == 0
    for name in ("docker-bake.json", ".github/images.json"):
        path = tmp_path / name
        text = path.read_text("utf-8")
        path.write_text(text.replace("llama-cpu", "llama-gpu"), "utf-8")
        done = _run(tmp_path, "render", "--check")
        assert done.returncode == 61
        assert f"{name}: differs" in done.stderr
        path.write_text(text, "utf-8")


@pytest.mark.parametrize(("verb", "file"), [("bake", "docker-bake.json"), ("ci-matrix", ".github/images.json")])
def test_one_generated_file_is_written_by_its_verb(project: Path, tmp_path: Path, verb: str, file: str) -> None:
    _copy(project, tmp_path)
    assert _run(tmp_path, verb, "--dry-run").returncode == 0
    assert not (tmp_path / file).exists()
    done = _run(tmp_path, verb)
    assert (done.returncode, done.stdout) == (0, f"{file}\n")
    assert (tmp_path / file).read_bytes() == (project / file).read_bytes()


def test_a_misspelt_key_of_the_file_is_exit_10(project: Path, tmp_path: Path) -> None:
    _copy(project, tmp_path)
    path = tmp_path / "build_matrix.yaml"
    path.write_text(path.read_text("utf-8").replace("size_budget_mib", "size_budget_mb"), "utf-8")
    done = _run(tmp_path, "list")
    assert done.returncode == 10
    assert "hint: perhaps you meant size_budget_mib" in done.stderr


@pytest.mark.parametrize(
    ("file", "content", "words"),
    [
        ("build_matrix.yaml", b"a:\n\t- b", "build_matrix.yaml cannot be read: "),
        ("images/locks/appliance.txt", b"\xff", "lock cannot be read: images/locks/appliance.txt: "),
        ("images/facts/nvidia.yaml", b"a: [b", "images/facts/nvidia.yaml cannot be read: "),
        ("images/facts/vllm.yaml", b"a: [b", "images/facts/vllm.yaml cannot be read: "),
        ("images/models/demo.yaml", b"\xff", "images/models/demo.yaml cannot be read: "),
    ],
)
def test_a_file_that_is_none_is_one_line_and_exit_10(
    project: Path, tmp_path: Path, file: str, content: bytes, words: str
) -> None:
    _copy(project, tmp_path)
    (tmp_path / file).write_bytes(content)
    verb = ("fetch", "demo", "--dry-run") if "models" in file else ("render",)
    done = _run(tmp_path, *verb)
    assert done.returncode == 10
    assert words in done.stderr
    assert [line.partition(":")[0] for line in done.stderr.splitlines()] in (["error"], ["error", "hint"])


def test_a_rendered_file_that_is_no_text_is_drift(project: Path, tmp_path: Path) -> None:
    _copy(project, tmp_path)
    (tmp_path / "images/rendered/llama-cpu/Dockerfile").write_bytes(b"\xff")
    done = _run(tmp_path, "render", "--check")
    assert done.returncode == 61
    assert "images/rendered/llama-cpu/Dockerfile: differs" in done.stderr


def test_a_file_that_cannot_be_written_is_exit_60(project: Path, tmp_path: Path) -> None:
    """A folder stands where a generated file belongs."""
    _copy(project, tmp_path)
    (tmp_path / "docker-bake.json").mkdir()
    done = _run(tmp_path, "bake")
    assert done.returncode == 60
    assert done.stderr.startswith("error: a file cannot be used: ")
    assert "Traceback" not in done.stderr


def test_a_reader_that_leaves_ends_it_in_silence(project: Path) -> None:
    words = f"set -o pipefail; {shlex.quote(sys.executable)} -m images list --json | true"
    done = subprocess.run(["bash", "-c", words], cwd=project, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (141, "")


def test_a_patch_that_is_missing_is_named_before_a_build(project: Path, tmp_path: Path) -> None:
    _copy(project, tmp_path)
    (tmp_path / "images/patches/llama-amx-tiles.patch").rename(tmp_path / "images/patches/llama-amx-tile.patch")
    for verb in (["list"], ["render", "--check"]):
        done = _run(tmp_path, *verb)
        assert done.returncode == 10
        assert "names files that are not there: images/patches/llama-amx-tiles.patch" in done.stderr
        assert "hint: perhaps you meant images/patches/llama-amx-tile.patch" in done.stderr


def test_a_folder_of_a_cell_that_is_gone_fails_the_check(project: Path, tmp_path: Path) -> None:
    _copy(project, tmp_path)
    shutil.copytree(tmp_path / "images/rendered/llama-cpu", tmp_path / "images/rendered/llama-cu130-sm87")
    done = _run(tmp_path, "render", "--check")
    assert done.returncode == 61
    assert "images/rendered/llama-cu130-sm87: no cell of the matrix is called that" in done.stderr


@pytest.mark.parametrize(
    "path",
    [
        *(".devcontainer/old/Dockerfile", "images/gaps/vllm-cu130-sm70.yaml", "images/gaps/vllm-cu124-sm90.yaml"),
        *("images/locks/cuda-11.8.txt", "images/locks/old.in", "images/locks/debian-buster-slim-amd64.json"),
    ],
)
def test_what_the_matrix_names_no_more_fails_the_check(rendered: Path, tmp_path: Path, path: str) -> None:
    shutil.copytree(rendered, tmp_path, dirs_exist_ok=True)
    (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / path).write_text("x", "utf-8")
    done = _run(tmp_path, "render", "--check")
    assert done.returncode == 61
    named = ".devcontainer/old" if "devcontainer" in path else path
    assert f"{named}: nothing of the matrix is called that: git rm -r {named}" in done.stderr
    assert _run(tmp_path, "render", "--check", "--only", "llama-cpu").returncode == 0


def test_an_engine_that_does_not_run_is_exit_60(project: Path) -> None:
    environment = ("env", "DOCKER_HOST=unix:///nonexistent/docker.sock")
    done = _run(project, "build", "--all", "--base", "auto", before=environment)
    assert done.returncode == 60
    assert "the Docker engine does not answer" in done.stderr
    assert "docker info" in done.stderr


def _run(root: Path, *argv: str, before: tuple[str, ...] = ()) -> subprocess.CompletedProcess[str]:
    words = [*before, sys.executable, "-m", "images", *argv]
    return subprocess.run(words, cwd=root, capture_output=True, text=True, check=False)


def _copy(project: Path, target: Path) -> None:
    """Copy the files that `render` reads, so that a test may damage them. Their times are kept, so that the bytecode is
    that of the copies as well."""
    shutil.copy2(project / "build_matrix.yaml", target)
    (target / "appliance").mkdir()
    for name in ("__init__.py", "documents.py", "image_facts.py", "values.py"):
        shutil.copy2(project / "appliance" / name, target / "appliance")
    shutil.copytree(project / "images", target / "images")
