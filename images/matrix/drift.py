"""Rendered files on disk: `render` writes them, and `render --check` and a unit test compare them."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path

TAKE_AWAY = "git rm -r "
RENDERED = Path("images/rendered")  # a cell's folder there holds rendered files and nothing else


def orphans(root: Path, files: Mapping[Path, str]) -> list[str]:
    """Returns a line for each folder of a former cell; `files` are those of all cells."""
    folders = {path.parent for path in files if RENDERED in path.parents}
    found = {path.relative_to(root) for path in (root / RENDERED).glob("*")} if (root / RENDERED).is_dir() else set()
    return [f"{path}: no cell of the matrix is called that: {TAKE_AWAY}{path}" for path in sorted(found - folders)]


def unnamed(root: Path, named: Mapping[Path, Collection[str]], *, is_folder: bool = False) -> list[str]:
    """Returns a line for each file or folder that the matrix does not name. `named`: a folder -> its allowed names."""
    found = sorted(
        path.relative_to(root)
        for folder, names in named.items()
        for path in (root / folder).glob("*")
        if path.is_dir() is is_folder and path.name not in names
    )
    return [f"{path}: nothing of the matrix is called that: {TAKE_AWAY}{path}" for path in found]


def drift(root: Path, files: Mapping[Path, str]) -> list[str]:
    """Returns a line for each committed file that is missing, differs, or is no longer rendered."""
    lines = [f"{path}: {state}" for path, text in files.items() if (state := _state(root / path, text))]
    folders = {path.parent for path in files if RENDERED in path.parents}
    strays = {path.relative_to(root) for folder in folders for path in (root / folder).glob("*")} - set(files)
    return lines + [f"{path}: nothing renders it: {TAKE_AWAY}{path}" for path in sorted(strays)]


def write(root: Path, files: Mapping[Path, str]) -> None:
    for path, text in files.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(text, "utf-8", newline="\n")


def _state(path: Path, text: str) -> str | None:
    if not path.is_file():
        return "missing"
    return None if path.read_bytes() == text.encode() else "differs from what the matrix renders"
