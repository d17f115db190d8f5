"""Whether everything that an image's files are linked with is there: `ldd` over the whole of it, in a container."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from pathlib import Path

import yaml

from images import docker

_DATA = Path(__file__).with_name("libraries.yaml")
# Files without a suffix are asked if they may be executed. Stubs are for linking alone, never loaded. What is no ELF
# file gets an answer without an arrow.
_SCRIPT = r"""
cd /
find opt usr/local -type f \( -name '*.so' -o -name '*.so.*' -o -perm -111 \) ! -path '*/stubs/*' -exec sh -c '
  for file; do
    ldd "$file" 2> /dev/null | sed -n "s|^[[:space:]]*\(.*\) => not found.*|\1 /$file|p"
  done' sh {} +
echo done
"""


@dataclass(frozen=True, kw_only=True)
class Unresolved:
    library: str  # as the file names it
    file: str  # path in the image


@dataclass(frozen=True, kw_only=True)
class Absence:
    """Known and harmless."""

    library: re.Pattern[str]
    file: re.Pattern[str]
    why: str


def query(engine: docker.Engine, image: str) -> tuple[Unresolved, ...] | None:
    """What the image's own loader does not find, by its path and the run paths of each file. None where it could not be
    asked."""
    finished = engine.run(image, ("-c", _SCRIPT), entrypoint=("sh",))
    if finished.code != 0 or not finished.lines or finished.lines[-1] != "done":
        return None
    return parse(finished.lines[:-1])


def parse(lines: Iterable[str]) -> tuple[Unresolved, ...]:
    """Of lines with a name and a path. ValueError for any other."""
    found = []
    for line in lines:
        library, _, file = line.partition(" ")
        if not file.startswith("/"):
            message = f"no name and path: {line!r}"
            raise ValueError(message)
        found.append(Unresolved(library=library, file=file))
    return tuple(found)


def load_known() -> tuple[Absence, ...]:
    rows = yaml.safe_load(_DATA.read_text("utf-8"))
    return tuple(
        Absence(library=re.compile(row["library"]), file=re.compile(row["file"]), why=row["why"]) for row in rows
    )


def faults(unresolved: Iterable[Unresolved], names: Collection[str], known: Iterable[Absence]) -> list[str]:
    """Those that are nowhere and not known. `names` are the file names in the image: what is there under another path
    is loaded by the process first, as `import torch` does for all that is linked with torch."""
    rows = tuple(known)
    return sorted(
        f"{each.file} needs {each.library}"
        for each in unresolved
        if each.library not in names and not any(_is_of(row, each) for row in rows)
    )


def describe(unresolved: Collection[Unresolved], names: Collection[str]) -> str:
    absent = sorted({each.library.partition(".so")[0] for each in unresolved if each.library not in names})
    loaded = {each.library for each in unresolved if each.library in names}
    words = [f"loaded by others first: {len(loaded)}"] if loaded else []
    words += [f"known to be absent: {', '.join(absent)}"] if absent else []
    return "; ".join(words) or "all are found"


def _is_of(row: Absence, found: Unresolved) -> bool:
    return bool(row.library.fullmatch(found.library) and row.file.fullmatch(found.file))
