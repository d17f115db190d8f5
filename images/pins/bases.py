"""Asks registries for digests of base images and writes them into build_matrix.yaml, keeping its comments."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import date
from pathlib import Path

from images import docker
from images.errors import BuildError, MatrixError
from images.matrix.matrix import MATRIX_FILE, Base

STATUS = "verified"
TIMEOUT_S = 30.0
# The lines of one base: up to the next line that stands no deeper than its name.
BLOCK = r"^  {name}:\n((?:    .*\n|\s*\n)*)"
SOURCE = re.compile(r"^    source:\n(?:      .*\n)*", re.MULTILINE)


@dataclass(frozen=True, kw_only=True)
class Found:
    """Answer of a registry about one base."""

    name: str
    image: str
    digest: str
    was: str | None

    def __str__(self) -> str:
        if self.digest == self.was:
            return f"{self.name}: {self.image} is {self.digest}, as it was"
        return f"{self.name}: {self.image} is {self.digest}, was {self.was or 'not known'}"


def lock(root: Path, bases: Iterable[Base], *, today: date) -> list[Found]:
    """Asks for all before a line is written. Raises BuildError if a registry does not answer or lacks a platform."""
    found = [_ask(base) for base in bases]
    path = root / MATRIX_FILE
    text = path.read_text("utf-8")
    for each in found:
        text = rewrite(text, each.name, each.digest, today)
    path.write_text(text, "utf-8")
    return found


def rewrite(text: str, name: str, digest: str, today: date) -> str:
    """Returns the file with one base's lines changed and no other byte. A copied source is dropped.

    Raises MatrixError if the base is not a block of its own there.
    """
    bases = re.search(r"^bases:\n(?:[ #].*\n|\n)*", text, re.MULTILINE)
    block = re.search(BLOCK.format(name=re.escape(name)), bases.group(), re.MULTILINE) if bases else None
    if bases is None or block is None or "    image: " not in block.group(1):
        message = f"{MATRIX_FILE}: base {name} is not written as a block of lines below `bases:`"
        raise MatrixError(message)
    start = bases.start() + block.start(1)
    lines = SOURCE.sub("", block.group(1))
    for key, value in {"digest": digest, "status": STATUS, "asked": today.isoformat()}.items():
        lines = _set(lines, key, value, after="image" if key == "digest" else "status")
    return text[:start] + lines + text[start + len(block.group(1)) :]


def _set(lines: str, key: str, value: str, *, after: str) -> str:
    line = f"    {key}: {value}"
    if re.search(rf"^    {key}:", lines, re.MULTILINE):
        return re.sub(rf"^    {key}:.*$", line, lines, flags=re.MULTILINE)
    return re.sub(rf"^    {after}:.*$", rf"\g<0>\n{line}", lines, flags=re.MULTILINE)


def _ask(base: Base) -> Found:
    answer = docker.query_registry(base.image, timeout_s=TIMEOUT_S)
    # A single manifest is of one platform, whichever that is.
    known = base.platforms[:1] if answer.platforms is None else answer.platforms
    missing = [platform for platform in base.platforms if platform not in known]
    if missing:
        message = f"base {base.name}: the registry's {base.image} is not for {', '.join(missing)}: {answer.digest}"
        raise BuildError(message, hint=f"change the platforms of the base in {MATRIX_FILE}, or the image")
    return Found(name=base.name, image=base.image, digest=answer.digest, was=base.digest)


def choose(known: Mapping[str, Base], names: Iterable[str]) -> list[Base]:
    """Returns the named bases, or all."""
    return [known[name] for name in names] or list(known.values())
