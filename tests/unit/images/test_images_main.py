"""The command line as a user types it."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from images import __main__ as command

VERBS = ("list", "render", "build", "verify", "lock", "sbom", "bake", "ci-matrix", "prune")


def test_list_prints_cells_as_data(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["list", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert "llama-cpu" in [row["id"] for row in rows]
    assert all(row["size_budget_mib"] > 0 for row in rows)


def test_render_check_is_quiet_about_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["render", "--check"]) == 0
    assert "images/rendered/llama-cpu/Dockerfile\n" in capsys.readouterr().out


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


def test_generated_files_are_held_to_the_matrix(project: Path, tmp_path: Path) -> None:
    _copy(project, tmp_path)
    assert _run(tmp_path, "render").returncode == 0
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


def test_one_file_for_several_bills_of_materials_is_exit_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["sbom", "--only", "llama-*", "--out", "x.json"]) == 2
    assert "--out names one file" in capsys.readouterr().err


def test_a_mirror_that_is_none_is_exit_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["build", "--only", "llama-cpu", "--dry-run", "--debian-mirror", "mirror"]) == 2
    assert "--debian-mirror is no address of a mirror: mirror" in capsys.readouterr().err


def test_a_debian_lock_takes_no_names(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["lock", "--debian", "dev"]) == 2
    assert "takes no names: dev" in capsys.readouterr().err


def test_a_misspelt_key_of_the_file_is_exit_10(project: Path, tmp_path: Path) -> None:
    _copy(project, tmp_path)
    path = tmp_path / "build_matrix.yaml"
    path.write_text(path.read_text("utf-8").replace("size_budget_mib", "size_budget_mb"), "utf-8")
    done = _run(tmp_path, "list")
    assert done.returncode == 10
    assert "hint: perhaps you meant size_budget_mib" in done.stderr


def test_a_dry_build_prints_a_command_that_a_shell_understands(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["build", "--only", "llama-cpu", "--dry-run", "--epoch", "1700000000", "--tag", "x:1"]) == 0
    words = shlex.split(capsys.readouterr().out)
    assert words[:3] == ["docker", "buildx", "build"]
    assert "SOURCE_DATE_EPOCH=1700000000" in words
    assert any(word.startswith("type=oci,name=x:1,") for word in words)


def test_a_dry_verify_names_its_checks(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["verify", "--dry-run", "--json"]) == 0
    assert "no_secret_files" in json.loads(capsys.readouterr().out)


@pytest.mark.parametrize(
    ("argv", "hint"),
    [
        (["list", "--only", "lama-cpu"], "perhaps you meant llama-cpu"),
        (["lock", "aplience"], "perhaps you meant appliance"),
    ],
)
def test_a_name_that_is_not_there_is_exit_2_with_the_near_miss(
    argv: list[str], hint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command.main(argv) == 2
    assert f"hint: {hint}" in capsys.readouterr().err


@pytest.mark.parametrize("verb", VERBS)
def test_help_explains_each_verb(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        command.main([verb, "--help"])
    assert ended.value.code == 0
    said = capsys.readouterr().out
    assert "exit codes:" in said
    assert "--json" in said


def test_an_engine_that_does_not_run_is_exit_60(project: Path) -> None:
    environment = ("env", "DOCKER_HOST=unix:///nonexistent/docker.sock")
    done = _run(project, "build", "--base", "auto", before=environment)
    assert done.returncode == 60
    assert "the Docker engine does not answer" in done.stderr
    assert "docker info" in done.stderr


def _run(root: Path, *argv: str, before: tuple[str, ...] = ()) -> subprocess.CompletedProcess[str]:
    words = [*before, sys.executable, "-m", "images", *argv]
    return subprocess.run(words, cwd=root, capture_output=True, text=True, check=False)


def _copy(project: Path, target: Path) -> None:
    """What `render` reads, so that a test may damage it."""
    sources = [project / "build_matrix.yaml", project / "appliance/__init__.py", project / "appliance/image_facts.py"]
    sources += [path for path in (project / "images").rglob("*") if path.is_file() and "__pycache__" not in path.parts]
    for source in sources:
        copy = target / source.relative_to(project)
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_bytes(source.read_bytes())
