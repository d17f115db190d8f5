"""License texts in an image: the engine's, CUDA libraries', and one for each wheel. Pure.

A wheel brings its text in its dist-info. Wheels without one are rows of images/facts/licenses.yaml, with the place of
their text. An unlisted one fails `verify`, and so does a listed one that has brought a text since.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Self

from pydantic import model_validator

from images import rows
from images.layers.tree import Entry
from images.proof import gate
from images.rows import Names, Row, Source, Text

FOLDER = "opt/appliance/licenses/"
OWN_NAME = "appliance"  # this project's own code
TEXT = re.compile(r"(?:licen[cs]e|copying|notice)", re.IGNORECASE)
DIST_INFO = re.compile(r"^(?P<wheel>(?P<name>[^/]+)-[^/-]+\.dist-info)/")
CUDA_TEXT = re.compile(
    rf"^(?:{FOLDER}[^/]*(?:nvidia|cuda)[^/]*/.+|usr/share/doc/libcu[^/]+/copyright|"
    r"opt/[^/]+/lib/nvidia_(?!ml_py)[^/]+\.dist-info/(?:licenses/)?[^/]*[Ll]icense[^/]*)$"
)
FACTS_NAME = "images/facts/licenses.yaml"  # path for messages


class Wheel(Row):
    """A wheel without a text in its dist-info, with one of three places.

    `in_package`: a file below its folder. `in_base`: a file of the base image. `says`: its METADATA, if there is no
    text.
    """

    name: Text
    in_package: Text | None = None
    in_base: Text | None = None
    says: Text | None = None
    sources: Names

    @model_validator(mode="after")
    def _has_one_place(self) -> Self:
        if sum(place is not None for place in (self.in_package, self.in_base, self.says)) != 1:
            message = f"wheel {self.name} needs one of in_package, in_base and says"
            raise ValueError(message)
        return self


class ComponentRow(Row):
    """A component that is neither wheel nor package. `texts` are below FOLDER/name; `in_base` is in the base."""

    name: Text
    texts: tuple[Text, ...] = ()
    in_base: Text | None = None
    sources: Names

    @property
    def paths(self) -> tuple[str, ...]:
        """Paths in the image."""
        own = tuple(f"{FOLDER}{self.name}/{text}" for text in self.texts)
        return (*own, self.in_base) if self.in_base else own


class _FactsFile(Row):
    sources: Mapping[str, Source]
    components: tuple[ComponentRow, ...] = ()
    wheels: tuple[Wheel, ...]


@dataclass(frozen=True, kw_only=True)
class Found:
    """Result of the search. `missing`: components that lack a text. `silent`: wheels known to have none."""

    wheels: int
    missing: tuple[str, ...]
    silent: tuple[str, ...]
    outdated: tuple[str, ...]  # listed as silent, and not silent


@functools.cache
def facts() -> Mapping[str, Wheel]:
    """Returns the committed rows by the wheel's folder name. Raises MatrixError if they cannot be read."""
    return parse_facts(rows.load(FACTS_NAME, hint="it says which wheels have their license text elsewhere"))


@functools.cache
def components() -> Mapping[str, ComponentRow]:
    """Returns the committed rows by name. Raises MatrixError if they cannot be read."""
    data = rows.load(FACTS_NAME, hint="it says which texts an engine brings")
    return {row.name: row for row in _checked(data).components}


def parse_facts(data: object) -> Mapping[str, Wheel]:
    return {wheel.name: wheel for wheel in _checked(data).wheels}


def _checked(data: object) -> _FactsFile:
    file = rows.check(data, _FactsFile, name=FACTS_NAME, hint="see its other rows")
    listed: tuple[ComponentRow | Wheel, ...] = (*file.components, *file.wheels)
    rows.refuse_uncited((name for row in listed for name in row.sources), file.sources, name=FACTS_NAME)
    rows.refuse_twice("wheel", (wheel.name for wheel in file.wheels), name=FACTS_NAME)
    rows.refuse_twice("component", (row.name for row in file.components), name=FACTS_NAME)
    return file


def look(files: Mapping[str, Entry], *, engine: str, folders: Iterable[str]) -> Found:
    """Looks for license texts. `engine` is its title, `folders` are those of wheels, each with its last slash."""
    missing = [path for name in (OWN_NAME, engine) for path in _paths_of(name) if path not in files]
    silent: list[str] = []
    outdated: list[str] = []
    count = 0
    for folder in folders:
        for wheel, name in sorted(_wheels(files, folder)):
            count += 1
            known = facts().get(name)
            has_text = _has_text(files, folder, wheel, known)
            if known is not None and known.says is not None:
                (outdated if has_text else silent).append(f"{name} ({known.says})")
            elif not has_text:
                missing.append(wheel)
    is_with_cuda = any(gate.TOOLKIT.match(path.rpartition("/")[2]) for path in files)
    if is_with_cuda and not any(CUDA_TEXT.match(path) for path in files):
        missing.append("CUDA's libraries")
    return Found(wheels=count, missing=tuple(missing), silent=tuple(silent), outdated=tuple(outdated))


def _paths_of(component: str) -> tuple[str, ...]:
    """Returns the paths of a component's license texts; for an unlisted engine the usual one."""
    row = components().get(component)
    return row.paths if row else (f"{FOLDER}{component}/LICENSE",)


def _wheels(files: Iterable[str], folder: str) -> set[tuple[str, str]]:
    inside = (DIST_INFO.match(path.removeprefix(folder)) for path in files if path.startswith(folder))
    return {(match["wheel"], match["name"]) for match in inside if match}


def _has_text(files: Mapping[str, Entry], folder: str, wheel: str, known: Wheel | None) -> bool:
    own = f"{folder}{wheel}/"
    if any(path.startswith(own) and TEXT.search(path.removeprefix(own)) for path in files):
        return True
    if known is None:
        return False
    elsewhere = (f"{folder}{known.in_package}" if known.in_package else None, known.in_base)
    return any(path in files for path in elsewhere)
