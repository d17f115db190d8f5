"""Finds secrets by their form, in files of layers and in an image's configuration: images/facts/secrets.yaml. Pure."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from images import rows
from images.rows import Names, Row, Source, Text

FACTS_NAME = "images/facts/secrets.yaml"  # path for messages
_INSIDE = re.compile(rb"\w\w")
# Libraries and weights of more are not searched: nobody compiles a token into them, and they are gigabytes.
BINARY_BYTES_MAX = 4 * 2**20
_HEAD_BYTES = 1024


class FormRow(Row):
    name: Text
    begins: Names
    pattern: Text
    file: Text | None = None
    sources: Names


class _FactsFile(Row):
    sources: Mapping[str, Source]
    forms: tuple[FormRow, ...]


@dataclass(frozen=True, kw_only=True)
class Form:
    """A form of a secret. `file` limits it to paths; None means every file and the configuration."""

    name: str
    begins: tuple[bytes, ...]
    pattern: re.Pattern[bytes]
    file: re.Pattern[str] | None


@functools.cache
def forms() -> tuple[Form, ...]:
    """Returns the committed rows. Raises MatrixError if they cannot be read."""
    hint = "it says what no image may hold"
    file = rows.check(rows.load(FACTS_NAME, hint=hint), _FactsFile, name=FACTS_NAME, hint="see its other rows")
    rows.refuse_uncited((name for row in file.forms for name in row.sources), file.sources, name=FACTS_NAME)
    rows.refuse_twice("form", (row.name for row in file.forms), name=FACTS_NAME)
    return tuple(
        Form(
            name=row.name,
            begins=tuple(begin.encode() for begin in row.begins),
            pattern=re.compile(row.pattern.encode()),
            file=re.compile(row.file) if row.file else None,
        )
        for row in file.forms
    )


def leaks(data: bytes, path: str | None = None) -> Iterator[str]:
    """Yields the name of each form in the data, never a piece of the secret. Without `path` the data is no file's."""
    if len(data) > BINARY_BYTES_MAX and b"\0" in data[:_HEAD_BYTES]:
        return
    for form in forms():
        if form.file is not None and (path is None or not form.file.search(path)):
            continue
        if any(begin in data for begin in form.begins) and any(
            _counts(data, found) for found in form.pattern.finditer(data)
        ):
            yield form.name


def _counts(data: bytes, found: re.Match[bytes]) -> bool:
    """True unless the match is part of a longer word, such as data in base64."""
    begins = data[max(found.start() - 1, 0) : found.start() + 1]
    ends = data[found.end() - 1 : found.end() + 1]
    return not _INSIDE.match(begins) and not _INSIDE.match(ends)
