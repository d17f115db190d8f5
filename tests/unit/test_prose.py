"""Rule 1 of the prose: a docstring is a sentence that stands without the name of what it describes."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
# Words that continue a name: "def settings: Of ENGINE_SETTINGS, those that …".
FRAGMENTS = {"As", "Also", "Beside", "By", "Of", "Or", "That", "Those", "Unless"}


def described(path: Path) -> Iterator[tuple[int, str]]:
    """Yield line and docstring of a module and of each class and function in it."""
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if not isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        if text := ast.get_docstring(node):
            yield getattr(node, "lineno", 1), text


@pytest.mark.parametrize("folder", ["appliance", "images", "benchmarks", "tests"])
def test_no_docstring_begins_with_a_fragment(folder: str) -> None:
    found = [
        f"{path.relative_to(ROOT)}:{line}: {text.splitlines()[0]}"
        for path in sorted((ROOT / folder).rglob("*.py"))
        for line, text in described(path)
        if text.split(maxsplit=1)[0].rstrip(",:") in FRAGMENTS
    ]
    assert found == []
