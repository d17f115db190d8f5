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
    tests: dict[int, set[str]] = field(default_factory=lambda: defaultdict(set))  # by number of the function
    seconds: dict[str, float] = field(default_factory=dict)  # of the tests that passed

    def tests_of(self, file: str, line: int) -> set[str]:
        """Tests that reach the innermost function there; outside of functions, those that reach any of the file."""
        here = {at: f for at, f in enumerate(self.functions) if f.file == file}
        inside = [at for at, f in here.items() if f.first <= line <= f.last]
        numbers = [max(inside, key=lambda at: here[at].first)] if inside else list(here)
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
    for path in sources(root):
        _plant_file(root, path, functions)
    text = PROBE.read_text(encoding="utf-8").replace('SEEN = ""', f"SEEN = {str(seen)!r}")
    (root / "appliance/_probe.py").write_text(text, encoding="utf-8")
    (seen / "functions.json").write_text(json.dumps([[f.file, f.first, f.last] for f in functions]), encoding="utf-8")
    return functions


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
    decorators = getattr(statement, "decorator_list", [])
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
    functions = [Function(*row) for row in json.loads((seen / "functions.json").read_text(encoding="utf-8"))]
    reach = Reach(functions=functions)
    for test, what in _lines(seen):
        if what.startswith("s "):
            reach.seconds[test] = float(what[2:])
        else:
            reach.tests[int(what)].add(test)
    return reach


def _lines(seen: Path) -> Iterator[tuple[str, str]]:
    """(test, number of a function or `s SECONDS`)"""
    for path in sorted(seen.glob("*.seen")):
        for line in path.read_text(encoding="utf-8").splitlines():
            test, _, told = line.partition("\t")
            for what in told.split(","):
                yield test, what
