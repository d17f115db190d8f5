"""Reads and changes files of NAME=value lines, line by line. Pure."""

from __future__ import annotations

import re
from typing import Any

from appliance.host.inject.place import NotEditableError, Place

_ROW = re.compile(r"^[ \t]*(?:export[ \t]+)?([A-Za-z_][A-Za-z0-9_]*)[ \t]*=[ \t]*(.*?)[ \t]*$")
_PLAIN = re.compile(r"[A-Za-z0-9_./:@%+=,-]*")


def load(text: str) -> dict[str, Any]:
    """Return the values by name. Raises ValueError with the line number for a line that is neither NAME=value nor a
    comment."""
    found: dict[str, Any] = {}
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        row = _ROW.match(line)
        if row is None:
            message = f"line {number}: not NAME=value: {line[:20]!r}"
            raise ValueError(message)
        found[row[1]] = _unquoted(row[2])
    return found


def put(text: str, place: Place, value: object) -> str:
    (name,) = place.keys
    row = f"{name}={_quoted(str(value))}\n"
    lines = text.splitlines(keepends=True)
    at = _lines_of(lines, name)
    if len(at) > 1:
        message = f"{name} occurs {len(at)} times"
        raise NotEditableError(message)
    if at:
        lines[at[0]] = row
        return "".join(lines)
    return text + ("" if not text or text.endswith("\n") else "\n") + row


def drop(text: str, place: Place) -> str:
    lines = text.splitlines(keepends=True)
    gone = set(_lines_of(lines, place.keys[0]))
    return "".join(line for index, line in enumerate(lines) if index not in gone)


def _lines_of(lines: list[str], name: str) -> list[int]:
    return [index for index, line in enumerate(lines) if (row := _ROW.match(line.rstrip("\r\n"))) and row[1] == name]


def _unquoted(value: str) -> str:
    if len(value) > 1 and value[0] == value[-1] and value[0] in "'\"":
        return value[1:-1]
    return value


def _quoted(value: str) -> str:
    if _PLAIN.fullmatch(value):
        return value
    if "'" in value or "\n" in value:
        message = "a value with a quote or a line break in it cannot be written to such a file"
        raise NotEditableError(message)
    return f"'{value}'"
