"""The beginning and the end of an answer's body, and what an engine wrote there at the top of its JSON.

Clients choose parts of an answer: their tools and texts are repeated in it, and a forced call has the arguments that
its schema demands. So a name counts only at the depth at which an engine itself writes it. A long answer's middle is
never kept; its two ends are read from the outside in, which needs nothing of the middle.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any, NamedTuple

from appliance import documents
from appliance.values import dataclass

# Up to the next string, or bracket outside strings. Possessive, so that bytes that are not JSON cost one pass only.
_FORWARD = re.compile(rb'[^"{}\[\]]*+("[^"\\]*+(?:\\.[^"\\]*+)*+"|[{}\[\]])', re.DOTALL)
# The same in reversed bytes, in which an escaped quote is a quote before an odd number of backslashes.
_BACKWARD = re.compile(rb'[^"{}\[\]]*+("[^"]*+(?:"\\(?:\\\\)*+(?!\\)[^"]*+)*+"|[{}\[\]])')
_COLON = re.compile(rb"\s*:\s*")
VALUE_BYTES = 4096  # a longer value is not read from an end
_DECODER = json.JSONDecoder()


@dataclass(frozen=True, kw_only=True)
class Edges:
    """The two ends of a body so far. `begin` is empty if `end` has all of it."""

    begin: bytes = b""
    end: bytes = b""
    is_stream: bool = False  # a stream of events; else one document
    is_whole: bool = True  # nothing more comes


class Member(NamedTuple):
    """A member of an object in a document, whose own members have depth 1. Arrays count as a level, too."""

    depth: int
    name: str
    value: Any  # None also if it is cut off or longer than VALUE_BYTES


def parse_object(text: bytes) -> dict[str, Any] | None:
    """Return the JSON object; None if `text` is anything else."""
    try:
        return documents.load(text)
    except ValueError:
        return None


def first_members(text: bytes, names: frozenset[str]) -> Iterator[Member]:
    """Yield the members with one of these names in the beginning of a document, up to where it is cut off."""
    depth = at = 0
    while match := _FORWARD.match(text, at):
        at, token = match.end(), match[1]
        if token in b"{[":
            depth += 1
        elif token in b"}]":
            depth -= 1
        elif member := _member(text, at, depth, token, names):
            yield member


def last_members(text: bytes, names: frozenset[str]) -> Iterator[Member]:
    """Yield the members with one of these names in the end of a complete document, the last one first, back to where it
    is cut off."""
    back, length = text[::-1], len(text)
    depth = at = 0
    while match := _BACKWARD.match(back, at):
        at, token = match.end(), match[1]
        if token in b"}]":
            depth += 1
        elif token in b"{[":
            depth -= 1
        elif member := _member(text, length - match.start(1), depth, token[::-1], names):
            yield member


def _member(text: bytes, end: int, depth: int, string: bytes, names: frozenset[str]) -> Member | None:
    """Return the member whose name is the string that ends at `end`; None if it is none of `names`."""
    name = string[1:-1].decode(errors="replace")
    if name not in names or (colon := _COLON.match(text, end)) is None:
        return None
    value = text[colon.end() : colon.end() + VALUE_BYTES].decode(errors="replace")
    try:
        found, length = _DECODER.raw_decode(value)
    except (ValueError, RecursionError):
        found = None
    else:
        if length == len(value) and isinstance(found, int | float):
            found = None  # a number that ends where the text does may be cut off
    return Member(depth, name, found)
