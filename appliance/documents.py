"""JSON documents -> dataclasses: what was not written from the dataclass is refused, by the name of the field."""

from __future__ import annotations

import codecs
import json
from collections.abc import Callable, Collection, KeysView, Mapping
from functools import cache
from typing import Any, TypeVar, get_type_hints

import msgspec

T = TypeVar("T")
# By dataclass: whether these values can be. Their types are right then.
Rules = Mapping[type, Callable[[Any], bool]]
_Path = tuple[Any, str | int]  # what it is part of, or None, and its own name or place: words only when they are wanted
_PLAIN = frozenset({str, int, float, bool, type(None)})
VALUES_MAX = 2_000_000  # of a document of somebody else: a second of reading at most


def load(data: str | bytes) -> dict[str, Any]:
    """Raises ValueError for what is no JSON object."""
    try:
        document = json.loads(data)
    except RecursionError as error:
        message = f"it is nested too deep: {error}"
        raise ValueError(message) from error
    if not isinstance(document, dict):
        message = f"it is no JSON object: {document!r:.80}"
        raise ValueError(message)
    return document


def has_too_many_values(data: bytes) -> bool:
    """Whether reading this JSON would hold up all else: 64 MiB of empty lists take 8 s. What opens or follows a value
    is counted, also inside of texts, where it is rare."""
    return sum(map(data.count, (b",", b"[", b"{"))) > VALUES_MAX


def foreign(data: bytes) -> object:
    """Return the value of a JSON text that somebody else wrote, by the letter of RFC 8259.

    NaN, numbers beyond a float and half of a surrogate pair are refused: Python's own json takes them. Raises
    ValueError, whose message quotes nothing of the text.
    """
    try:
        document: object = msgspec.json.decode(data.removeprefix(codecs.BOM_UTF8))
    except msgspec.ValidationError:
        reason = "it has a number that is out of range"
    except UnicodeDecodeError:
        reason = "it is not UTF-8"
    except msgspec.DecodeError as error:
        # msgspec says the first of both.
        is_short = "truncated" in str(error)
        reason = "it ends too early, or has half of a surrogate pair" if is_short else str(error)
    except RecursionError:
        reason = "it is nested too deep"
    else:
        return document
    raise ValueError(reason.removeprefix("JSON is malformed: "))


def read(kind: type[T], document: object, *, rules: Rules | None = None, **parts: Callable[[Any], Any]) -> T:
    """A `kind` from what `json.loads` gave; `parts` read fields that their type alone does not describe.

    Raises ValueError for a wrong type, for a field that is missing or unknown at any depth, and for values against a
    rule. An integer may stand for a float, a boolean for neither.
    """
    try:
        value = _convert(kind, document, parts)
        _check(document, value, (None, kind.__name__), rules or {}, skipped=parts.keys())
    except (msgspec.ValidationError, RecursionError, OverflowError) as error:
        message = f"{kind.__name__}: {error}"
        raise ValueError(message) from error
    return value


def _convert(kind: type[T], document: object, parts: Mapping[str, Callable[[Any], Any]]) -> T:
    if not parts or not isinstance(document, dict):
        return msgspec.convert(document, kind, strict=True)
    _check_names(document, _names_of(kind), (None, kind.__name__))
    others = _without(kind, frozenset(parts))  # type: ignore[arg-type]  # a class is hashable, which mypy doubts of type[T]
    rest = msgspec.convert(document, others, strict=True)
    return kind(**msgspec.structs.asdict(rest), **{name: parse(document[name]) for name, parse in parts.items()})


@cache
def _without(kind: type, parts: frozenset[str]) -> type[msgspec.Struct]:
    """The other fields of a dataclass. Made once: a profile has one plan after the other, and what msgspec knows of a
    type is kept with the type."""
    others = [(name, hint) for name, hint in get_type_hints(kind).items() if name not in parts]
    return msgspec.defstruct(kind.__name__, others)


def _check(document: Any, value: object, path: _Path, rules: Rules, *, skipped: Collection[str] = ()) -> None:  # noqa: ANN401
    """What msgspec does not: it passes over unknown fields of a dataclass, and gives missing ones their defaults."""
    if isinstance(value, tuple):
        for place, each in enumerate(value):
            if type(each) not in _PLAIN:
                _check(document[place], each, (path, place), rules)
    elif names := _names_of(type(value)):
        _check_names(document, names, path)
        for name in names:
            each = getattr(value, name)
            if type(each) not in _PLAIN and name not in skipped:
                _check(document[name], each, (path, name), rules)
        is_possible = rules.get(type(value))
        if is_possible is not None and not is_possible(value):
            message = f"{_in_words(path)} cannot be: {value!r:.200}"
            raise ValueError(message)


def _check_names(document: Mapping[str, Any], names: KeysView[str], path: _Path) -> None:
    if document.keys() != names:
        missing, unknown = sorted(names - document.keys()), sorted(document.keys() - names)
        words = [f"lacks {', '.join(missing)}"] if missing else []
        words += [f"has no {', '.join(unknown)}"] if unknown else []
        message = f"{_in_words(path)} {' and '.join(words)}"
        raise ValueError(message)


def _names_of(kind: type) -> KeysView[str]:
    """Of a dataclass's fields; empty for every other type."""
    found: Mapping[str, object] = getattr(kind, "__dataclass_fields__", {})
    return found.keys()  # as `fields` has them, which takes longer


def _in_words(path: _Path) -> str:
    parent, name = path
    if parent is None:
        return str(name)
    return _in_words(parent) + (f".{name}" if isinstance(name, str) else f"[{name}]")
