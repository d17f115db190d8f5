"""Golden files: written anew, one for each case, in lines that a reader can follow."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping
from pathlib import Path

WIDTH = 118


def wrapped(line: str, indent: str = "") -> str:
    return textwrap.fill(line, WIDTH, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)


def write_anew(folder: Path, texts: Mapping[str, str]) -> None:
    """Write each text to `<name>.txt`. All other .txt files of the folder are deleted."""
    folder.mkdir(exist_ok=True)
    for old in folder.glob("*.txt"):
        old.unlink()
    for name, text in texts.items():
        (folder / f"{name}.txt").write_text(text)
