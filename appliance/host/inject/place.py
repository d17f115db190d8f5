"""The place of a value in a document of any format, and the document with or without the value. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from appliance.values import dataclass


@dataclass(frozen=True, kw_only=True)
class Item:
    """The list entry whose `key` equals `value`."""

    key: str
    value: str


@dataclass(frozen=True, kw_only=True)
class Place:
    """Keys of nested mappings from the outside in; with `item`, that entry of the list below the last key."""

    keys: tuple[str, ...]
    item: Item | None = None

    def __str__(self) -> str:
        return ".".join(self.keys) + (f"[{self.item.key}: {self.item.value}]" if self.item else "")


def at(*keys: str) -> Place:
    return Place(keys=keys)


class _Missing:
    def __repr__(self) -> str:
        return "MISSING"


MISSING: Final = _Missing()


class NotEditableError(ValueError):
    """The document is valid, but cannot be changed at that place without rewriting the user's own text."""


def look(document: object, place: Place) -> object:
    """Return the value at that place, or MISSING."""
    for key in place.keys:
        document = document.get(key, MISSING) if isinstance(document, dict) else MISSING
    if place.item is None:
        return document
    return next((row for row in _rows(document) if is_item(row, place.item)), MISSING)


def is_item(row: object, item: Item) -> bool:
    return isinstance(row, dict) and row.get(item.key) == item.value


def put(document: Mapping[str, Any], place: Place, value: object) -> dict[str, Any]:
    """Return a copy with the value at that place. Raises NotEditableError if another kind of value is in the way."""
    if place.item is None:
        return _put(document, place.keys, value)
    rows = look(document, at(*place.keys))
    if rows is not MISSING and rows is not None and not isinstance(rows, list):
        message = f"{place.keys[-1]} is not a list"
        raise NotEditableError(message)
    others = [row for row in _rows(rows) if not is_item(row, place.item)]
    return _put(document, place.keys, [*others, value])


def drop(document: Mapping[str, Any], place: Place) -> dict[str, Any]:
    """Return a copy without the value; groups and lists that become empty stay."""
    if look(document, place) is MISSING:
        return dict(document)
    if place.item is None:
        return _drop(document, place.keys)
    item = place.item
    rows = [row for row in _rows(look(document, at(*place.keys))) if not is_item(row, item)]
    return _put(document, place.keys, rows)


def _rows(value: object) -> list[object]:
    return value if isinstance(value, list) else []


def _put(document: Mapping[str, Any], keys: tuple[str, ...], value: object) -> dict[str, Any]:
    key, *rest = keys
    if not rest:
        return {**document, key: value}
    inner = document.get(key, {})
    if not isinstance(inner, dict):
        message = f"{key} is not a group of settings"
        raise NotEditableError(message)
    return {**document, key: _put(inner, tuple(rest), value)}


def _drop(document: Mapping[str, Any], keys: tuple[str, ...]) -> dict[str, Any]:
    key, *rest = keys
    if rest:
        return {**document, key: _drop(document[key], tuple(rest))}
    return {name: value for name, value in document.items() if name != key}
