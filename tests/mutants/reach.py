"""Which tests reach which function: a probe at the head of each, in a copy of the tree, and one run of the tests.

A process that a test starts counts for that test: a probe finds it by the process's ancestors.
"""

from __future__ import annotations

import ast
import json
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

PACKAGES = ("appliance", "images")
# Dockerfiles that were rendered, and facts about machines, are data: no operator has a use for them.
NOT_CODE = ("images/rendered",)


PROBE = Path(__file__).with_name("probe.py")
# Where no module of ours can be imported, a program of an image for instance, nothing is told.
IMPORT = "try: from appliance._probe import reached as _reached\nexcept ImportError: _reached = lambda number: None"


@dataclass(frozen=True)
class Function:
    file: str
    first: int
    last: int


@dataclass(kw_only=True)
class Reach:
    functions: list[Function]
    importers: dict[str, list[str]]  # files, by the file that they import
    tests: dict[int, set[str]] = field(default_factory=lambda: defaultdict(set))  # by number of the function
    seconds: dict[str, float] = field(default_factory=dict)  # of the tests that passed

    def tests_of(self, file: str, line: int) -> set[str]:
        """Tests that reach the innermost function there; outside of functions, those that reach any of the file or of
        one that imports it."""
        inside = [at for at, f in enumerate(self.functions) if f.file == file and f.first <= line <= f.last]
        files = {file, *self.importers.get(file, ())}
        numbers = [at for at, f in enumerate(self.functions) if f.file in files]
        if inside:
            numbers = [max(inside, key=lambda at: self.functions[at].first)]
        return {test for at in numbers for test in self.tests[at]} & set(self.seconds)


def sources(root: Path) -> list[Path]:
    return sorted(
        path.relative_to(root)
        for package in PACKAGES
        for path in (root / package).rglob("*.py")
        if not path.relative_to(root).as_posix().startswith(NOT_CODE)
    )


def plant(root: Path, seen: Path) -> list[Function]:
    """Puts a probe into each function below `root`; what they see goes to the folder `seen`."""
    seen.mkdir(parents=True, exist_ok=True)
    functions: list[Function] = []
    importers = _importers(root)
    for path in sources(root):
        _plant_file(root, path, functions)
    text = PROBE.read_text(encoding="utf-8").replace('SEEN = ""', f"SEEN = {str(seen)!r}")
    (root / "appliance/_probe.py").write_text(text, encoding="utf-8")
    rows = [[f.file, f.first, f.last] for f in functions]
    (seen / "functions.json").write_text(json.dumps({"functions": rows, "importers": importers}), encoding="utf-8")
    return functions


def _importers(root: Path) -> dict[str, list[str]]:
    files = {
        path.as_posix().removesuffix(".py").removesuffix("/__init__").replace("/", "."): path for path in sources(root)
    }
    found: dict[str, list[str]] = defaultdict(list)
    for path in sources(root):
        for node in ast.walk(ast.parse((root / path).read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and node.module:
                for name in (node.module, *(f"{node.module}.{each.name}" for each in node.names)):
                    if name in files:
                        found[files[name].as_posix()].append(path.as_posix())
    return found


def _plant_file(root: Path, path: Path, functions: list[Function]) -> None:
    text = (root / path).read_text(encoding="utf-8")
    lines = text.splitlines()
    tree = ast.parse(text)
    inserted: list[tuple[int, str]] = []
    for node in ast.walk(tree):
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        body = node.body[1:] if ast.get_docstring(node, clean=False) is not None else node.body
        if not body or body[0].lineno == node.lineno or body[0].lineno in {line for line, _ in inserted}:
            continue
        first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
        inserted.append((_line_of(body[0]), f"{' ' * body[0].col_offset}_reached({len(functions)})"))
        functions.append(Function(path.as_posix(), first, node.end_lineno or node.lineno))
    inserted.append((_after_head(tree), IMPORT))
    for line, what in sorted(inserted, reverse=True):
        lines.insert(line - 1, what)
    (root / path).write_text("\n".join(lines) + "\n", encoding="utf-8")


def _line_of(statement: ast.stmt) -> int:
    decorators: list[ast.expr] = getattr(statement, "decorator_list", [])
    return min([statement.lineno, *(decorator.lineno for decorator in decorators)])


def _after_head(tree: ast.Module) -> int:
    """The line after the docstring and `from __future__`, before which nothing may stand."""
    last = 0
    for at, node in enumerate(tree.body):
        is_docstring = at == 0 and isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        if not is_docstring and not (isinstance(node, ast.ImportFrom) and node.module == "__future__"):
            break
        last = node.end_lineno or node.lineno
    return last + 1


def read(seen: Path) -> Reach:
    planted = json.loads((seen / "functions.json").read_text(encoding="utf-8"))
    functions = [Function(*row) for row in planted["functions"]]
    reach = Reach(functions=functions, importers=planted["importers"])
    for test, what in _lines(seen):
        if what.startswith("s "):
            reach.seconds[test] = float(what[2:])
        else:
            reach.tests[int(what)].add(test)
    return reach


def _lines(seen: Path) -> Iterator[tuple[str, str]]:
    """(test, number of a function or `s SECONDS`)"""
    for path in sorted(seen.glob("*.seen")):
        for line in path.read_text(encoding="utf-8").split("\n"):  # a name may hold other ends of lines
            test, _, told = line.partition("\t")
            for what in filter(None, told.split(",")):  # of a process that was killed, the last line may be cut
                yield test, what
