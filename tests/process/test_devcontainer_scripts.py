"""The scripts of .devcontainer on the machine: what they say when something is missing; npm is not believed."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SCRIPTS = ROOT / ".devcontainer"
PROGRAMS = ("bash", "base64", "cat", "dirname", "env", "mkdir", "mktemp", "mv", "openssl", "rm", "sed", "tar")
ANOTHER = "#!/bin/sh\nprintf another >devcontainers-cli-0.89.0.tgz\n"
NO_NETWORK = "#!/bin/sh\necho getaddrinfo ENOTFOUND >&2\nexit 1\n"


@pytest.fixture
def programs(tmp_path: Path) -> Path:
    """A PATH with what the scripts need, and without node and npm."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for name in PROGRAMS:
        found = shutil.which(name)
        assert found, name
        (folder / name).symlink_to(found)
    return folder


def put(folder: Path, name: str, script: str) -> None:
    (folder / name).write_text(script)
    (folder / name).chmod(0o755)


def run(name: str, *words: str, path: Path | None = None, cli: Path | None = None) -> subprocess.CompletedProcess[str]:
    environment = {"PATH": str(path) if path else "/usr/local/bin:/usr/bin:/bin", "DEVCONTAINER_CLI_DIR": str(cli)}
    return subprocess.run(
        [SCRIPTS / name, *words], env=environment, capture_output=True, text=True, timeout=120, check=False
    )


def test_the_command_line_needs_node(programs: Path, tmp_path: Path) -> None:
    done = run("cli", "--version", path=programs, cli=tmp_path)
    assert done.returncode == 60
    assert "error: node is missing" in done.stderr


@pytest.mark.parametrize(
    ("npm", "code", "said"),
    [
        (NO_NETWORK, 60, "npm has no @devcontainers/cli@0.89.0"),
        (ANOTHER, 61, "npm gave another @devcontainers/cli@0.89.0: sha512-"),
    ],
    ids=["no network", "another file"],
)
def test_what_npm_gives_is_held_to_its_hash(npm: str, code: int, said: str, programs: Path, tmp_path: Path) -> None:
    put(programs, "node", "#!/bin/sh\necho it was run\n")
    put(programs, "npm", npm)
    done = run("cli", "--version", path=programs, cli=tmp_path / "cli")
    assert (done.returncode, done.stdout) == (code, "")
    assert said in done.stderr
    assert list((tmp_path / "cli").iterdir()) == []


def test_outside_of_a_devcontainer_its_commands_say_so() -> None:
    done = run("dev", "engine")
    assert done.returncode == 2
    assert "this is not a devcontainer of the project" in done.stderr
    assert "hint:" in done.stderr


def test_one_that_does_not_exist_is_refused_with_those_that_do() -> None:
    done = run("verify", "cdua")
    assert done.returncode == 2
    assert "no devcontainer is called that: cdua" in done.stderr
    assert "cpu cuda" in done.stderr.replace("\n", " ")


def test_a_check_of_none_is_refused() -> None:
    done = run("check", "cdua")
    assert done.returncode == 2
    assert "'cpu', 'cuda'" in done.stderr


def test_what_is_promised_is_looked_for(tmp_path: Path) -> None:
    """This machine is no devcontainer, so that nearly nothing is as promised. Each line says what was seen."""
    done = run("check", "cpu")
    lines = done.stdout.splitlines()
    assert done.returncode == 61
    assert "FAIL  variable ENGINE_CELL=llama-cpu: is None" in lines
    assert any(line.startswith("FAIL  volume at /home/developer/engine: no volume") for line in lines)
    assert any(line.startswith("PASS  git --version") for line in lines)
