"""The wheel of the host command: its files, what they import, and that two builds are one."""

from __future__ import annotations

import ast
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

from appliance.host.verb_table import VERBS
from images import __main__ as command
from images.errors import BuildError, UsageError
from images.host import wheel
from images.rows import PROJECT

# Rooms of appliance/ in the wheel, each with the files that it may have there; None: all that are imported.
ROOMS = {
    "abilities": {"__init__.py", "answer.py", "judge.py", "record.py", "rows.py", "suite.py"},
    "host": None,
    "console": {"__init__.py", "shown.py", "terminal.py"},
    "system": {"__init__.py", "disk.py"},
}
LEAVES = {
    "__init__.py", "documents.py", "errors.py", "keep_alive.py", "model_names.py", "reference.py", "run.py",
    "settings.py", "values.py",
}  # fmt: skip
DATA: dict[str, object] = {"choices": [], "images": [], "recipes": []}
# Of the distributions in DEPENDENCIES and EXTRAS; requests is docker's own, and `bench --plot` asks for matplotlib.
PACKAGES = {"docker", "requests", "rich", "msgspec", "aiohttp", "yaml", "matplotlib", "psutil"}


def test_it_has_what_the_command_imports_and_no_engine_gateway_or_planner() -> None:
    found = {path.as_posix().removeprefix("appliance/") for path in wheel.modules(PROJECT)}
    assert {name for name in found if "/" not in name} == LEAVES
    rooms = {name.partition("/")[0] for name in found if "/" in name}
    assert rooms == set(ROOMS)
    for room, allowed in ROOMS.items():
        here = {name.partition("/")[2] for name in found if name.startswith(f"{room}/")}
        assert allowed is None or here == allowed, room
    for left_out in ("provision", "verbs/up.py"):  # of one-api, and of make
        assert not [name for name in found if name.startswith(f"host/{left_out}")]
    for row in VERBS.values():
        place = row.module.removeprefix("appliance.").replace(".", "/")
        assert {f"{place}.py", f"{place}/__init__.py"} & found, row.module


def test_it_needs_no_package_but_those_that_it_names() -> None:
    needed = set()
    for path in wheel.modules(PROJECT):
        for node in ast.walk(ast.parse((PROJECT / path).read_text())):
            if isinstance(node, ast.Import):
                needed |= {alias.name.partition(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                needed.add(str(node.module).partition(".")[0])
    assert needed - set(sys.stdlib_module_names) - {"appliance"} == PACKAGES


def test_two_builds_have_the_same_bytes_and_the_same_tree(tmp_path: Path) -> None:
    made = [wheel.build(PROJECT, tmp_path / word, DATA, name="owner-appliance") for word in ("one", "two")]
    assert made[0].wheel.read_bytes() == made[1].wheel.read_bytes()
    assert made[0].sdist.read_bytes() == made[1].sdist.read_bytes()
    assert made[0].wheel.name.startswith("owner_appliance-")
    files = [path.as_posix() for path in (*wheel.modules(PROJECT), wheel.INVENTORY)]
    in_wheel = [name for name in zipfile.ZipFile(made[0].wheel).namelist() if not name.endswith("/")]
    assert sorted(name for name in in_wheel if ".dist-info/" not in name) == sorted(files)
    with tarfile.open(made[0].sdist) as tar:
        in_sdist = {member.name.partition("/")[2] for member in tar if member.isfile()}
    assert set(files) <= in_sdist
    assert in_sdist - set(files) == {
        "LICENSE", "PKG-INFO", "README.md", "pyproject.toml", "pyproject.toml.orig",
    }  # fmt: skip
    assert made[0].wheel.stat().st_size < 250_000


def test_the_help_takes_no_package_and_little_time(tmp_path: Path) -> None:
    """`python -S` has no site-packages: what --help imports is the standard library and the tree alone."""
    wheel.stage(PROJECT, tmp_path, DATA, name="owner-appliance")
    program = "import sys; from appliance.host.__main__ main; main(['--help'])".replace("__ main", "__ import main")
    heavy = "assert not {'docker', 'rich', 'msgspec', 'asyncio', 'importlib.metadata'} & set(sys.modules)"
    argv = [sys.executable, "-S", "-c", f"{program}; {heavy}"]
    done = subprocess.run(argv, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "start a model in a container on this machine" in done.stdout


@pytest.mark.parametrize("name", ["", "Appliance", "a b", "-a", "a/b"])
def test_a_name_that_no_distribution_can_have_is_refused(name: str) -> None:
    with pytest.raises(UsageError, match="not the name of a distribution"):
        wheel.check_name(name)


def test_the_verb_lists_the_files_and_refuses_what_it_cannot_use(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert command.main(["wheel", "--dry-run"]) == 0
    files = capsys.readouterr().out.splitlines()
    assert files == [path.as_posix() for path in (*wheel.modules(PROJECT), wheel.INVENTORY)]
    assert command.main(["wheel", "--dry-run", "--name", "A b"]) == 2
    assert "error: not the name of a distribution: 'A b'" in capsys.readouterr().err
    assert command.main(["wheel", "--dry-run", "--published", str(tmp_path / "missing.yaml")]) == 10
    assert "missing.yaml cannot be read: No such file or directory" in capsys.readouterr().err


def test_a_build_that_uv_refuses_is_exit_60(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(wheel, "BACKEND", "uv_build<0.1")
    with pytest.raises(BuildError, match="the wheel of the host command was not built") as caught:
        wheel.build(PROJECT, tmp_path, DATA)
    assert caught.value.exit_code == 60
    assert list(tmp_path.iterdir()) == []
