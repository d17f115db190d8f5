"""Changes YAML by whole lines: comments, order, quotes and anchors stay. Pure.

Supports only what the tools here need: keys of the outermost mapping with plain values, and entries of a list below
such a key.
"""

from __future__ import annotations

import json
import re
from typing import Any

import yaml

from appliance.host.inject.place import MISSING, NotEditableError, Place, look

_PLAIN = re.compile(r"[A-Za-z_/][A-Za-z0-9_./-]*")
_WORDS_OF_YAML = frozenset({"true", "false", "yes", "no", "on", "off", "null", "y", "n"})


def load(text: str) -> dict[str, Any]:
    """Return the mapping; empty for an empty text. Raises ValueError with the line number if the text is not a YAML
    mapping."""
    try:
        document = yaml.safe_load(text)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = f"line {mark.line + 1}: " if mark else ""
        message = f"{line}{getattr(error, 'problem', None) or str(error).splitlines()[0]}"
        raise ValueError(message) from error
    if document is None:
        return {}
    if not isinstance(document, dict):
        message = f"it is not a mapping: {str(document)[:40]}"
        raise ValueError(message)
    return document


def put(text: str, place: Place, value: Any) -> str:  # noqa: ANN401
    (key,) = place.keys
    if place.item is None:
        return _put_key(text, key, value)
    return _put_item(drop(text, place), key, value)


def drop(text: str, place: Place) -> str:
    found = _find(text, place.keys[0])
    if found is None or look(load(text), place) is MISSING:
        return text
    key, node = found
    if place.item is None:
        return _without_lines(text, key.start_mark.line, _last_line(text, node) + 1)
    rows = _block_rows(node)
    if rows is None:
        message = f"{key.value} is not a list with one entry per line"
        raise NotEditableError(message)
    index = _rows_of(text, key.value).index(look(load(text), place))
    if len(rows) == 1:
        return _replaced_lines(text, key.start_mark.line, _last_line(text, node) + 1, f"{key.value}: []\n")
    return _without_lines(text, rows[index].start_mark.line, _last_line(text, rows[index]) + 1)


def _rows_of(text: str, key: str) -> list[Any]:
    return list(load(text)[key])


def _put_key(text: str, key: str, value: object) -> str:
    found = _find(text, key)
    row = f"{key}: {_scalar(value)}\n"
    if found is None:
        return _ended(text) + row
    node = found[1]
    if not isinstance(node, yaml.ScalarNode) or node.start_mark.line != node.end_mark.line:
        message = f"{key} is not written on one line"
        raise NotEditableError(message)
    return text[: node.start_mark.index] + _scalar(value) + text[node.end_mark.index :]


def _put_item(text: str, key: str, value: dict[str, Any]) -> str:
    found = _find(text, key)
    if found is None:
        return _ended(text) + f"{key}:\n" + _item(value, 2)
    name, node = found
    if node.tag == "tag:yaml.org,2002:null" or _is_empty_list(node):
        line = name.start_mark.line
        return _replaced_lines(text, line, line + 1, f"{key}:\n" + _item(value, 2))
    rows = _block_rows(node)
    if rows is None:
        message = f"{key} is not a list with one entry per line"
        raise NotEditableError(message)
    at = _last_line(text, node) + 1
    return _replaced_lines(_ended(text), at, at, _item(value, node.start_mark.column))


def _find(text: str, key: str) -> tuple[yaml.Node, yaml.Node] | None:
    """Return key and value nodes of a key in the outermost mapping; None if it is missing."""
    root = yaml.compose(text, Loader=yaml.SafeLoader)
    if root is None:
        return None
    if not isinstance(root, yaml.MappingNode) or root.flow_style:
        message = "it is written on one line"
        raise NotEditableError(message)
    return next(((name, node) for name, node in root.value if name.value == key), None)


def _block_rows(node: yaml.Node) -> list[yaml.Node] | None:
    if not isinstance(node, yaml.SequenceNode) or node.flow_style or not node.value:
        return None
    return list(node.value)


def _is_empty_list(node: yaml.Node) -> bool:
    return isinstance(node, yaml.SequenceNode) and not node.value and node.start_mark.line == node.end_mark.line


def _last_line(text: str, node: yaml.Node) -> int:
    """Return the last line of the node's own content. PyYAML's end mark of a block also covers the comments and empty
    lines after it."""
    end = node.end_mark
    line: int = end.line
    if not _is_block(node):
        return line
    lines = text.splitlines()
    line -= 0 if end.index >= len(text) and not text.endswith("\n") else 1
    while line > node.start_mark.line and (not lines[line].strip() or lines[line].lstrip().startswith("#")):
        line -= 1
    return line


def _is_block(node: yaml.Node) -> bool:
    return isinstance(node, yaml.CollectionNode) and not node.flow_style


def _ended(text: str) -> str:
    return text if not text or text.endswith("\n") else text + "\n"


def _without_lines(text: str, start: int, end: int) -> str:
    return _replaced_lines(text, start, end, "")


def _replaced_lines(text: str, start: int, end: int, new: str) -> str:
    lines = text.splitlines(keepends=True)
    return "".join([*lines[:start], new, *lines[end:]])


def _item(value: dict[str, Any], column: int) -> str:
    rows = []
    for key, each in value.items():
        rows.append(
            f"{key}: {_scalar(each)}" if not isinstance(each, list) else f"{key}: [{', '.join(map(_scalar, each))}]"
        )
    indent = " " * column
    return "".join(f"{indent}{'- ' if not index else '  '}{row}\n" for index, row in enumerate(rows))


def _scalar(value: object) -> str:
    """Return the value as YAML text: plain if no parser can take it for another type, else as a JSON string, which is
    valid YAML."""
    if isinstance(value, str) and _PLAIN.fullmatch(value) and value.lower() not in _WORDS_OF_YAML:
        return value
    return json.dumps(value, ensure_ascii=False)
