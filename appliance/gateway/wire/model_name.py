"""Replaces the model's name in a request, for engines that refuse every name but the one they were started with."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any, NamedTuple

from appliance import documents

# Bodies with more fields are not searched: no client may block the others.
FIELDS_MAX = 1000

_SPACE = re.compile(r"[ \t\n\r]*")
_DECODER = json.JSONDecoder()
# One part of a form: a header of a few lines, and a value up to the next boundary. Without backtracking (`+` after a
# repetition) and limited to few lines, since a file may repeat the first line of such a header at will.
_FORM_FIELD = re.compile(
    rb'(\r\ncontent-disposition: *form-data; *name="?model"?\r\n(?:[^\r\n]++\r\n){0,4}+\r\n)([^\r\n]*+)(?=\r\n--)',
    re.IGNORECASE,
)


def model_in_form(body: bytes) -> str | None:
    """Return the model that a form (multipart/form-data) names; None if it names none."""
    found = _FORM_FIELD.search(b"\r\n" + body if body[:2] != b"\r\n" else body)
    return found[2].decode("utf-8", "replace") if found else None


def without_fields(body: bytes, names: frozenset[str]) -> tuple[bytes, dict[str, Any]]:
    """Return the body without these fields of its JSON object, and their values; every other byte stays.

    A body that has none of them, or is no JSON object, is returned unchanged.
    """
    if not any(b'"%b"' % name.encode() in body for name in names) or documents.has_too_many_values(body):
        return body, {}
    try:
        text = body.decode("utf-8-sig")
        fields = list(_fields_of(text))
        found = {field.key: json.loads(text[field.begin : field.end]) for field in fields if field.key in names}
    except (ValueError, IndexError, RecursionError):
        return body, {}
    if not found:
        return body, {}
    # Cut out, not written anew: what is wrong elsewhere in the body is for the engine to report. A field goes with the
    # comma before it, the first ones with the comma after them.
    pieces = [text[: fields[0].key_begin]]
    for number, field in enumerate(fields):
        if field.key not in names:
            begin = fields[number - 1].end if len(pieces) > 1 else field.key_begin
            pieces.append(text[begin : field.end])
    return "".join((*pieces, text[fields[-1].end :])).encode(), found


def with_model(body: bytes, content_type: bytes, name: str) -> bytes:
    """Return the body with `name` in place of the model that it names; every other byte stays, except a byte order
    mark.

    A body that names no model, or is neither a JSON object nor a form, is returned unchanged: the engine reports what
    is wrong.
    """
    if content_type.strip().lower().startswith(b"multipart/form-data"):
        return _FORM_FIELD.sub(lambda found: found[1] + name.encode(), body, count=1)
    if documents.has_too_many_values(body):
        return body
    try:
        text = body.decode("utf-8-sig")
        spans = list(_values_of(text, "model"))
    except (ValueError, IndexError, RecursionError):
        return body
    pieces, at = [], 0
    for begin, end in spans:
        if text[begin] == '"':
            pieces += [text[at:begin], json.dumps(name)]
            at = end
    return "".join((*pieces, text[at:])).encode() if pieces else body


class _Field(NamedTuple):
    key: str
    key_begin: int
    begin: int  # of the value
    end: int


def _values_of(text: str, wanted: str) -> Iterator[tuple[int, int]]:
    """Yield begin and end of each value of that key in the object; JSON allows a key several times. Raises as
    `_fields_of`."""
    return ((field.begin, field.end) for field in _fields_of(text) if field.key == wanted)


def _fields_of(text: str) -> Iterator[_Field]:
    """Yield the fields of the object. Raises the decoder's error if the text is not a JSON object, and ValueError if it
    has too many fields."""
    at = _after_space(text, 0)
    if text[at] != "{":
        return
    at = _after_space(text, at + 1)
    for _ in range(FIELDS_MAX):
        if text[at] != '"':
            return
        key_begin = at
        key, at = _DECODER.raw_decode(text, at)
        at = _after_space(text, at)
        if text[at] != ":":
            return
        begin = _after_space(text, at + 1)
        _, end = _DECODER.raw_decode(text, begin)
        yield _Field(key, key_begin, begin, end)
        at = _after_space(text, end)
        if text[at] != ",":
            return
        at = _after_space(text, at + 1)
    message = f"more than {FIELDS_MAX} fields"
    raise ValueError(message)


def _after_space(text: str, at: int) -> int:
    found = _SPACE.match(text, at)
    return found.end() if found else at
