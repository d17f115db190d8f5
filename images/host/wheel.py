"""The host command as a wheel and an sdist of its own: the modules that it imports, the inventory, and nothing else.

The files of both have no date, so one tree makes the same bytes twice.
"""

from __future__ import annotations

import ast
import json
import re
import shutil
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from images import docker
from images.errors import BuildError, UsageError

NAME = "appliance-host"  # of the distribution; nobody has claimed it on PyPI, and `--name` replaces it
NAME_FORM = re.compile(r"[a-z0-9]+(?:[._-][a-z0-9]+)*")
PACKAGE = "appliance"
ENTRY = "appliance.host.__main__"
VERB_TABLE = Path("appliance/host/verb_table.py")
INVENTORY = Path("appliance/host/docker/inventory.json")  # the place in the wheel; a clone has it in images/
DEPENDENCIES = ("docker>=7", "msgspec", "psutil", "rich")
# Verbs that few people need bring packages that the others do without.
EXTRAS = {"bench": ("aiohttp",), "inject": ("pyyaml",)}
BACKEND = "uv_build>=0.13,<0.14"  # uv itself has it built in, so nothing is fetched here


@dataclass(frozen=True, kw_only=True)
class Made:
    wheel: Path
    sdist: Path


def check_name(name: str) -> str:
    """Raises UsageError for a name that PyPI would not take, or would take for another spelling of one."""
    if not NAME_FORM.fullmatch(name):
        message = f"not the name of a distribution: {name!r}"
        raise UsageError(message, hint="lower case letters, digits and hyphens, such as OWNER-appliance")
    return name


def modules(root: Path) -> tuple[Path, ...]:
    """Returns the files that the command and its verbs import, directly or not. Type checking imports do not count."""
    found: set[Path] = set()
    waiting = [ENTRY, *_verbs(root)]
    while waiting:
        for path in _files(root, waiting.pop()):
            if path not in found:
                found.add(path)
                waiting += _imported(root / path)
    return tuple(sorted(found))


def _verbs(root: Path) -> Iterator[str]:
    """Yields the modules of the verb table, which are imported by their names."""
    for node in ast.walk(ast.parse((root / VERB_TABLE).read_text("utf-8"))):
        if isinstance(node, ast.Constant) and str(node.value).startswith("appliance.host."):
            yield str(node.value)


def _files(root: Path, module: str) -> Iterator[Path]:
    """Yields the file of a module and those of the packages above it; nothing for a name inside a module."""
    parts = module.split(".")
    if parts[0] != PACKAGE:
        return
    for count in range(1, len(parts) + 1):
        place = Path(*parts[:count])
        for path in (place / "__init__.py", place.with_suffix(".py")):
            if (root / path).is_file():
                yield path


def _imported(path: Path) -> Iterator[str]:
    for node in _run_at_all(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def _run_at_all(node: ast.AST) -> Iterator[ast.AST]:
    """Yields all nodes below, without those under `if TYPE_CHECKING`."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.If) and isinstance(child.test, ast.Name) and child.test.id == "TYPE_CHECKING":
            continue
        yield child
        yield from _run_at_all(child)


def stage(root: Path, folder: Path, data: Mapping[str, object], *, name: str) -> None:
    """Writes the tree of the sdist: modules, inventory, license and pyproject.toml. `data` is the inventory's."""
    for path in modules(root):
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(root / path, folder / path)
    shipped = {"distribution": name, **data}
    (folder / INVENTORY).write_text(json.dumps(shipped, indent=1) + "\n", "utf-8")
    shutil.copyfile(root / "LICENSE", folder / "LICENSE")
    (folder / "README.md").write_text(_readme(name), "utf-8")
    (folder / "pyproject.toml").write_text(_pyproject(name, version(root)), "utf-8")


def version(root: Path) -> str:
    tree = ast.parse((root / PACKAGE / "__init__.py").read_text("utf-8"))
    values = [node.value for node in tree.body if isinstance(node, ast.Assign)]
    return str(next(value.value for value in values if isinstance(value, ast.Constant)))


def build(root: Path, out: Path, data: Mapping[str, object], *, name: str = NAME) -> Made:
    """Writes wheel and sdist into a folder. Raises BuildError."""
    with tempfile.TemporaryDirectory(prefix="host-wheel-") as folder:
        stage(root, Path(folder) / "tree", data, name=check_name(name))
        made = Path(folder) / "made"
        argv = (sys.executable, "-m", "uv", "build", "--offline", "--no-config", "--quiet", "--out-dir", str(made))
        done = docker.capture(argv, cwd=Path(folder) / "tree")
        if done.code != 0:
            message = f"the wheel of the host command was not built: {' '.join(done.lines[-3:])}"
            raise BuildError(message, hint="make venv brings uv; its release must be one of " + BACKEND)
        out.mkdir(parents=True, exist_ok=True)
        found = {path.suffix: Path(shutil.copy(path, out)) for path in made.iterdir() if path.name != ".gitignore"}
    return Made(wheel=found[".whl"], sdist=found[".gz"])


def _pyproject(name: str, release: str) -> str:
    """Returns the project as TOML; a JSON string or list of strings is one of TOML as well."""
    project = {
        "name": name,
        "version": release,
        "description": "Starts open-weights language models in containers of the appliance, on this machine's Docker",
        "readme": "README.md",
        "requires-python": ">=3.11",
        "license": "Apache-2.0",
        "license-files": ["LICENSE"],
        "dependencies": list(DEPENDENCIES),
    }
    lines = ["[build-system]", f"requires = [{json.dumps(BACKEND)}]", 'build-backend = "uv_build"', "", "[project]"]
    lines += [f"{key} = {json.dumps(value)}" for key, value in project.items()]
    lines += ["", "[project.optional-dependencies]"]
    lines += [f"{extra} = {json.dumps(list(packages))}" for extra, packages in EXTRAS.items()]
    # The second is for `uvx NAME`, which runs the program that has the distribution's name.
    lines += ["", "[project.scripts]", *(f'{each} = "{ENTRY}:main"' for each in dict.fromkeys((PACKAGE, name)))]
    lines += ["", "[tool.uv.build-backend]", f'module-name = "{PACKAGE}"', 'module-root = ""']
    return "\n".join(lines) + "\n"


def _readme(name: str) -> str:
    return (
        "Starts open-weights language models in containers of the appliance, hardened, on this machine's Docker.\n\n"
        f"    uvx {name} run qwen          # or: pipx install {name}, then appliance run qwen\n\n"
        "It chooses the image for this machine's GPUs, pulls it by digest, and prints endpoint and key.\n"
        f"`{name}[bench,inject]` adds what `appliance bench` and `appliance inject` need.\n"
    )
