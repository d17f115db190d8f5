"""Changes JSON with comments by small cuts in its text: comments, order and layout stay. Pure.

Comments (`//`, `/* */`) and commas before a closing bracket are accepted, since editors allow them in their settings,
but never added.
"""

from __future__ import annotations

import json
import re
from typing import Any, NoReturn

from appliance.host.inject.place import NotEditableError, Place
from appliance.values import dataclass

_SPACE = re.compile(r"(?:\s|//[^\n]*|/\*.*?\*/)*", re.DOTALL)
_LINE_REST = re.compile(r"(?:[ \t]|/\*.*?\*/)*(?://[^\n]*)?", re.DOTALL)
_STRING = re.compile(r'"(?:[^"\\\x00-\x1f]|\\.)*"')
_PLAIN = re.compile(r"-?\d[\d.eE+-]*|true|false|null")
_STEP = "  "
_DEEPEST = 100


@dataclass(frozen=True, kw_only=True)
class _Node:
    start: int
    end: int
    value: Any
    members: tuple[_Member, ...] = ()  # members of an object


@dataclass(frozen=True, kw_only=True)
class _Member:
    start: int  # start of its key
    key: str
    node: _Node


def load(text: str) -> dict[str, Any]:
    """Return the object; empty for an empty text. Raises ValueError with the line number if the text is not a JSON
    object with comments."""
    return dict(_parse(text).value) if text.strip() else {}


def put(text: str, place: Place, value: object) -> str:
    """Return the text with the value at that place; missing groups are created."""
    text = text if text.strip() else "{\n}\n"
    parent, left = _deepest(_parse(text), place.keys)
    if not left:
        return _replaced(text, parent.start, parent.end, _dump(value, _indent_at(text, parent.start)))
    if not isinstance(parent.value, dict):
        message = f"{place.keys[-len(left) - 1]} is not a group of settings"
        raise NotEditableError(message)
    key, *inner = left
    for name in reversed(inner):
        value = {name: value}
    return _with_member(text, parent, key, value)


def drop(text: str, place: Place) -> str:
    """Return the text without that member, and without its line if nothing else is on it."""
    parent, left = _deepest(_parse(text), place.keys[:-1])
    index = next((i for i, member in enumerate(parent.members) if member.key == place.keys[-1]), None)
    if left or index is None:
        return text
    member = parent.members[index]
    end = member.node.end
    comma = _skip(text, end)
    if text.startswith(",", comma):
        return _cut(_replaced(text, comma, comma + 1, ""), member.start, end)
    if not index:
        return _cut(text, member.start, end)
    before = _skip(text, parent.members[index - 1].node.end)  # for the last member the comma before it is removed too
    if "\n" not in text[before:end]:
        return _replaced(text, before, end, "")
    return _cut(_replaced(text, before, before + 1, ""), member.start - 1, end - 1)


def _cut(text: str, start: int, end: int) -> str:
    line = text.rfind("\n", 0, start) + 1
    newline = text.find("\n", end)
    after = len(text) if newline < 0 else newline
    if not text[line:start].strip() and not text[end:after].strip():
        return text[:line] + text[after + 1 :]
    return text[:start] + text[end:].lstrip(" ")


def _deepest(node: _Node, keys: tuple[str, ...]) -> tuple[_Node, tuple[str, ...]]:
    """Return the innermost existing node and the keys that are missing below it."""
    for index, key in enumerate(keys):
        found = next((member.node for member in node.members if member.key == key), None)
        if found is None:
            return node, keys[index:]
        node = found
    return node, ()


def _with_member(text: str, parent: _Node, key: str, value: object) -> str:
    is_open = "\n" in text[parent.start : parent.end]
    if not parent.members:
        outer = _indent_at(text, parent.start)
        inner = outer + _STEP
        comments = text[parent.start + 1 : parent.end - 1].rstrip(" \t\n")
        row = f"{comments}\n{inner}{json.dumps(key)}: {_dump(value, inner)}\n{outer}"
        return _replaced(text, parent.start + 1, parent.end - 1, row)
    last = parent.members[-1]
    if not is_open:
        return _replaced(text, last.node.end, last.node.end, f", {json.dumps(key)}: {json.dumps(value)}")
    indent = _indent_at(text, last.start)
    row = f"\n{indent}{json.dumps(key)}: {_dump(value, indent)}"
    comma = _skip(text, last.node.end)
    if text.startswith(",", comma):
        behind = _line_rest(text, comma + 1)
        return _replaced(text, behind, behind, row + ",")
    behind = _line_rest(text, last.node.end)
    behind = behind if text.startswith("\n", behind) else last.node.end
    return _replaced(_replaced(text, behind, behind, row), last.node.end, last.node.end, ",")


def _replaced(text: str, start: int, end: int, new: str) -> str:
    return text[:start] + new + text[end:]


def _dump(value: object, indent: str) -> str:
    return json.dumps(value, indent=len(_STEP), ensure_ascii=False).replace("\n", f"\n{indent}")


def _indent_at(text: str, index: int) -> str:
    line = text[text.rfind("\n", 0, index) + 1 : index]
    return line[: len(line) - len(line.lstrip())]


def _parse(text: str) -> _Node:
    node = _value(text, _skip(text, 0), 0)
    if not isinstance(node.value, dict):
        _fail(text, node.start, "it is not an object")
    end = _skip(text, node.end)
    if end < len(text):
        _fail(text, end, "something follows the end")
    return node


def _value(text: str, at: int, depth: int) -> _Node:
    if depth > _DEEPEST:
        _fail(text, at, "it is nested too deep")
    if text.startswith("{", at):
        return _object(text, at, depth)
    if text.startswith("[", at):
        return _array(text, at, depth)
    found = _STRING.match(text, at) or _PLAIN.match(text, at)
    if found is None:
        _fail(text, at, "a value is missing" if at < len(text) else "it ends too early")
    try:
        return _Node(start=at, end=found.end(), value=json.loads(found[0]))
    except ValueError:
        _fail(text, at, f"this is not a value: {found[0][:40]}")


def _object(text: str, start: int, depth: int) -> _Node:
    members: list[_Member] = []
    at = _skip(text, start + 1)
    while not text.startswith("}", at):
        found = _STRING.match(text, at)
        if found is None:
            _fail(text, at, "a key in double quotes is missing" if at < len(text) else "a } is missing")
        key = json.loads(found[0])
        if any(member.key == key for member in members):
            _fail(text, at, f"this key occurs twice: {key}")
        colon = _skip(text, found.end())
        if not text.startswith(":", colon):
            _fail(text, colon, "a colon is missing")
        node = _value(text, _skip(text, colon + 1), depth + 1)
        members.append(_Member(start=at, key=key, node=node))
        at = _after_comma(text, node.end, "}")
    value = {member.key: member.node.value for member in members}
    return _Node(start=start, end=at + 1, value=value, members=tuple(members))


def _array(text: str, start: int, depth: int) -> _Node:
    values = []
    at = _skip(text, start + 1)
    while not text.startswith("]", at):
        node = _value(text, at, depth + 1)
        values.append(node.value)
        at = _after_comma(text, node.end, "]")
    return _Node(start=start, end=at + 1, value=values)


def _after_comma(text: str, at: int, closing: str) -> int:
    at = _skip(text, at)
    if text.startswith(",", at):
        return _skip(text, at + 1)
    if not text.startswith(closing, at):
        _fail(text, at, f"a comma or a {closing} is missing")
    return at


def _line_rest(text: str, at: int) -> int:
    """Return the offset after the comments that follow on the same line."""
    found = _LINE_REST.match(text, at)
    return found.end() if found else at


def _skip(text: str, at: int) -> int:
    found = _SPACE.match(text, at)
    return found.end() if found else at


def _fail(text: str, at: int, what: str) -> NoReturn:
    line = text.count("\n", 0, at) + 1
    message = f"line {line}: {what}"
    raise ValueError(message)
