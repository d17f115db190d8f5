"""Checks that each package of a lock is asked for: by the `.in` file, or "via" another package. Offline.

uv writes behind each package who wants it. A package added by hand lacks that, or names one that is not there.
`lock --check` compares the names with an index.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

from images.errors import MatrixError
from images.matrix.matrix import LOCKS

_FILE = re.compile(r"(?:-r|--override|-c) (\S+)")


@dataclass(frozen=True, kw_only=True)
class Locked:
    """A package of a lock. `wanted_by` are packages that ask for it, `files` requirements files that do."""

    version: Version
    wanted_by: frozenset[str]
    files: frozenset[str]


def closure_faults(root: Path, name: str) -> Iterator[str]:
    """Yields a line for each package that nothing asks for, and each requirement that is not met."""
    locked = parse_lock((root / LOCKS / f"{name}.txt").read_text("utf-8"))
    asked = _asked_for(root, LOCKS / f"{name}.in")
    overrides = LOCKS / f"{name}.overrides"
    may_ask = {**asked, **(_asked_for(root, overrides) if (root / overrides).is_file() else {})}
    for package, requirement in asked.items():
        if package not in locked:
            yield f"{name}: {package} is asked for, and not locked"
        elif not requirement.specifier.contains(locked[package].version, prereleases=True):
            yield f"{name}: {package} {locked[package].version} is not what is asked for: {requirement}"
    reached = _reached(locked, {package for package in locked if package in may_ask and locked[package].files})
    for package in locked:
        if package not in reached:
            wanted = ", ".join(sorted(locked[package].wanted_by | locked[package].files)) or "nobody"
            yield f"{name}: nothing that the .in file asks for wants {package} (via {wanted})"


def parse_lock(text: str) -> dict[str, Locked]:
    """Returns the packages by canonical name. Raises MatrixError for a line that `uv pip compile` does not write."""
    found: dict[str, Locked] = {}
    for block in re.split(r"\n(?=[^\s#])", re.sub(r" *\\\n\s+--hash=\S+", "", f"\n{text}")):
        head, *via = block.strip("\n").splitlines() or [""]
        if not head or head.startswith("#"):
            continue
        pin = re.match(r"([\w.-]+)==([^\s;]+)", head)
        if pin is None:
            message = f"a lock holds a line that is no pinned package: {head[:80]!r}"
            raise MatrixError(message, hint="`python -m images lock` writes it anew")
        words = [re.sub(r"^\s*#\s*(?:via\b)?\s*", "", line).strip() for line in via]
        files = frozenset(file[1] for word in words if (file := _FILE.match(word)))
        others = frozenset(canonicalize_name(word) for word in words if word and not _FILE.match(word))
        found[canonicalize_name(pin[1])] = Locked(version=Version(pin[2]), wanted_by=others, files=files)
    return found


def _asked_for(root: Path, path: Path) -> dict[str, Requirement]:
    """Returns the names in a requirements file and in those that it includes."""
    found: dict[str, Requirement] = {}
    for line in (root / path).read_text("utf-8").splitlines():
        words = line.partition("#")[0].strip()
        if words.startswith("-r "):
            found |= _asked_for(root, path.parent / words.removeprefix("-r ").strip())
        elif words:
            requirement = Requirement(words)
            found[canonicalize_name(requirement.name)] = requirement
    return found


def _reached(locked: Mapping[str, Locked], asked: set[str]) -> set[str]:
    reached, added = set(asked), True
    while added:
        more = {package for package, row in locked.items() if package not in reached and row.wanted_by & reached}
        added = bool(more)
        reached |= more
    return reached
