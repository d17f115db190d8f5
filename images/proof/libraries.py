"""Checks that all libraries an image's files are linked with are there: `ldd`, in a container of the image."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from pathlib import Path

import yaml

from images import docker

_DATA = Path(__file__).with_name("libraries.yaml")
FOLDERS = ("opt", "usr/local")
STUBS = "/stubs/"  # for linking alone, never loaded
LIBRARY = re.compile(r"\.so(?:\.|$)")
# Each ELF file is asked, and counted where it was. A program that is linked statically has no loader to ask.
_SCRIPT = r"""
cd / && ldd /bin/sh | grep -q '=> /' || exit 3
find opt usr/local -type f \( -name '*.so' -o -name '*.so.*' -o -perm -111 \) ! -path '*/stubs/*' -exec sh -c '
  asked=0
  for file; do
    case "$(head -c 4 "$file" | tr -d "\177\0")" in ELF*) ;; *) [ -r "$file" ] && continue ;; esac
    said=$(ldd "$file" 2>&1) && asked=$((asked + 1)) || case "$said" in
      *"not a dynamic executable"*) printf "static\t%s\n" "/$file"; continue ;;
      *) printf "unread\t%s\t%s\n" "/$file" "$said" | head -n 1; continue ;;
    esac
    printf "%s\n" "$said" | while read -r library rest; do
      case "$rest" in
        "=> not found"*) printf "needs\t%s\t%s\n" "/$file" "$library" ;;
        *"version "*" not found"*) printf "version\t%s\t%s\n" "/$file" "$library $rest" ;;
      esac
    done
  done
  printf "asked\t%s\n" "$asked"' sh {} +
"""


@dataclass(frozen=True, kw_only=True)
class Unresolved:
    file: str  # path in the image
    library: str  # as the file names it


@dataclass(frozen=True, kw_only=True)
class Answers:
    """Answers of the loader. `faults`: unreadable files, and versions of symbols that a library lacks."""

    asked: int
    unresolved: tuple[Unresolved, ...] = ()
    faults: tuple[str, ...] = ()
    static: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Known:
    """Libraries that the loader does not find and that do no harm. `is_here`: loaded before from another path."""

    library: re.Pattern[str]
    file: re.Pattern[str]
    why: str
    is_here: bool = False
    is_of_cuda: bool = False  # in images for GPUs alone


def query(engine: docker.Engine, image: str) -> Answers | str:
    """Returns the output of the image's own loader, or the reason why it could not be asked."""
    finished = engine.run(image, ("-c", _SCRIPT), entrypoint=("sh",))
    if finished.code != 0:
        return f"the image's loader cannot be asked: exit code {finished.code}: {' '.join(finished.lines[-2:])}"
    return parse(finished.lines)


def parse(lines: Iterable[str]) -> Answers:
    """Parses the script's lines. Lines that programs wrote on standard error are skipped."""
    rows = [line.split("\t") for line in lines]
    return Answers(
        asked=sum(int(row[1]) for row in rows if row[0] == "asked"),
        unresolved=tuple(Unresolved(file=row[1], library=row[2]) for row in rows if row[0] == "needs"),
        faults=tuple(f"{row[1]}: {' '.join(row[2:])}" for row in rows if row[0] in ("unread", "version")),
        static=tuple(row[1] for row in rows if row[0] == "static"),
    )


def load_known() -> tuple[Known, ...]:
    rows = yaml.safe_load(_DATA.read_text("utf-8"))
    return tuple(
        Known(
            library=re.compile(row["library"]),
            file=re.compile(row["file"]),
            why=row["why"],
            is_here=row.get("is_here", False),
            is_of_cuda=row.get("is_of_cuda", False),
        )
        for row in rows
    )


def faults(answers: Answers, names: Collection[str], known: Iterable[Known], *, has_cuda: bool) -> list[str]:
    """Returns a line for each library that is not found. `names`: the image's ELF files."""
    rows = tuple(row for row in known if has_cuda or not row.is_of_cuda)
    needs = [each for each in answers.unresolved if not any(_is_of(row, each, names) for row in rows)]
    libraries = [path for path in answers.static if LIBRARY.search(path)]
    return [
        *answers.faults,
        *(f"{path}: the loader takes it for no library" for path in libraries),
        *(_lost(library, [each.file for each in needs if each.library == library]) for library in _named(needs)),
    ]


def _named(found: Iterable[Unresolved]) -> list[str]:
    return sorted({each.library for each in found})


def _lost(library: str, files: list[str]) -> str:
    more = f" and {len(files) - 1} more" if len(files) > 1 else ""
    return f"{library}, needed by {min(files)}{more}"


def describe(answers: Answers, names: Collection[str]) -> str:
    absent = {each.library.partition(".so")[0] for each in answers.unresolved if each.library not in names}
    here = {each.library for each in answers.unresolved if each.library in names}
    words = [f"of {answers.asked} files"]
    words += [f"loaded by others first: {len(here)}"] if here else []
    words += [f"known to be absent: {', '.join(sorted(absent))}"] if absent else []
    return "; ".join(words)


def _is_of(row: Known, found: Unresolved, names: Collection[str]) -> bool:
    is_named = bool(row.library.fullmatch(found.library) and row.file.fullmatch(found.file))
    return is_named and (found.library in names or not row.is_here)
