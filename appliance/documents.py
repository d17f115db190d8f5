"""Reads JSON documents into dataclasses. A document that does not match its dataclass is refused with the name of the
field."""

from __future__ import annotations

import codecs
import json
from collections.abc import Callable, Collection, KeysView, Mapping
from functools import cache
from typing import Any, TypeVar, get_type_hints

import msgspec

T = TypeVar("T")
# Dataclass -> check of its values, called after their types were checked. False refuses the document.
Rules = Mapping[type, Callable[[Any], bool]]
# parent path (None at the root) and own field name or list index; made into words only for an error
_Path = tuple[Any, str | int]
_PLAIN = frozenset({str, int, float, bool, type(None)})
VALUES_MAX = 2_000_000  # limit for a document from outside; reading so many values takes one second at most


def load(data: str | bytes) -> dict[str, Any]:
    """Return the JSON object in `data`. Raises ValueError if `data` is not JSON or not an object."""
    try:
        document = json.loads(data)
    except RecursionError as error:
        message = f"it is nested too deep: {error}"
        raise ValueError(message) from error
    if not isinstance(document, dict):
        message = f"it is no JSON object: {document!r:.80}"
        raise ValueError(message)
    return document


def model_in(data: bytes) -> str | None:
    """Return the text of the field `model` of a JSON object; None if there is none, or if it is no JSON object."""
    name = fields_in(data, "model").get("model")
    return name if isinstance(name, str) else None


@cache
def _some(names: tuple[str, ...]) -> msgspec.json.Decoder[Any]:
    fields: list[Any] = [(name, object, None) for name in names]
    return msgspec.json.Decoder(msgspec.defstruct("Some", fields))


def fields_in(data: bytes, *names: str) -> dict[str, Any]:
    """Return these fields of a JSON object; None for one that it does not have. Empty if it is no JSON object.

    Every other field is skipped without making an object of it: a request of 1 MiB takes about 0.5 ms.
    """
    try:
        found = _some(names).decode(data.removeprefix(codecs.BOM_UTF8))
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError):
        return {}
    return msgspec.structs.asdict(found)


def has_too_many_values(data: bytes) -> bool:
    """True if reading this JSON would block the process for long: 64 MiB of empty lists take 8 s. Counts commas and
    opening brackets, also the few inside of strings."""
    return sum(map(data.count, (b",", b"[", b"{"))) > VALUES_MAX


def foreign(data: bytes) -> object:
    """Return the value of a JSON text from outside, read strictly by RFC 8259.

    Refuses NaN, numbers beyond a float and half of a surrogate pair, which Python's own json accepts. Raises
    ValueError, whose message quotes nothing of the text.
    """
    try:
        document: object = msgspec.json.decode(data.removeprefix(codecs.BOM_UTF8))
    except msgspec.ValidationError:
        reason = "it has a number that is out of range"
    except UnicodeDecodeError:
        reason = "it is not UTF-8"
    except msgspec.DecodeError as error:
        # msgspec says "truncated" in both cases.
        is_short = "truncated" in str(error)
        reason = "it ends too early, or has half of a surrogate pair" if is_short else str(error)
    except RecursionError:
        reason = "it is nested too deep"
    else:
        return document
    raise ValueError(reason.removeprefix("JSON is malformed: "))


def read(kind: type[T], document: object, *, rules: Rules | None = None, **parts: Callable[[Any], Any]) -> T:
    """Return a `kind` made of what `json.loads` returned. `parts` maps a field to a function that reads it, if its type
    is not enough.

    Raises ValueError for a wrong type, for a missing or unknown field at any depth, and for values that break a rule.
    An integer is accepted for a float; a boolean is accepted for neither.
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
    """Return a struct type with the dataclass's fields except `parts`. Cached: msgspec keeps what it knows of a type
    with the type, and a profile holds many plans."""
    others = [(name, hint) for name, hint in get_type_hints(kind).items() if name not in parts]
    return msgspec.defstruct(kind.__name__, others)


def _check(document: Any, value: object, path: _Path, rules: Rules, *, skipped: Collection[str] = ()) -> None:  # noqa: ANN401
    """Check what msgspec does not: it ignores unknown fields of a dataclass and fills missing ones with their
    defaults."""
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
    """Return the field names of a dataclass; empty for every other type."""
    found: Mapping[str, object] = getattr(kind, "__dataclass_fields__", {})
    return found.keys()  # same result as `dataclasses.fields`, in less time


def _in_words(path: _Path) -> str:
    parent, name = path
    if parent is None:
        return str(name)
    return _in_words(parent) + (f".{name}" if isinstance(name, str) else f"[{name}]")
