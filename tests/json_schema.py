"""Check a document against a JSON schema: the part of draft 2020-12 that our schemas use; anything else is an error."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

TYPES: Mapping[str, tuple[type, ...]] = {
    "object": (dict,), "array": (list,), "string": (str,), "boolean": (bool,), "null": (type(None),),
    "integer": (int,), "number": (int, float),
}  # fmt: skip
_SAID = frozenset({"$schema", "$id", "$defs", "title", "description", "default"})
_KNOWN = _SAID | {
    "$ref", "type", "enum", "const", "anyOf", "properties", "required", "additionalProperties", "items", "prefixItems",
    "minItems", "maxItems",
}  # fmt: skip


def problems(document: object, schema: Mapping[str, Any]) -> list[str]:
    """Return the errors of a document, each with its path; empty if the document is valid."""
    return list(_problems(document, schema, schema, "$"))


def _problems(value: object, schema: Mapping[str, Any], root: Mapping[str, Any], path: str) -> Iterator[str]:
    assert schema.keys() <= _KNOWN, schema.keys() - _KNOWN
    if "$ref" in schema:
        yield from _problems(value, root["$defs"][schema["$ref"].removeprefix("#/$defs/")], root, path)
    if "anyOf" in schema and all(any(_problems(value, each, root, path)) for each in schema["anyOf"]):
        yield f"{path}: none of {len(schema['anyOf'])} fits {value!r:.60}"
    if "enum" in schema and value not in schema["enum"]:
        yield f"{path}: {value!r} is none of {schema['enum']}"
    if "const" in schema and value != schema["const"]:
        yield f"{path}: {value!r} is not {schema['const']!r}"
    if "type" in schema and not _is_of(value, schema["type"]):
        yield f"{path}: {value!r:.60} is no {schema['type']}"
    elif isinstance(value, dict):
        yield from _of_object(value, schema, root, path)
    elif isinstance(value, list):
        yield from _of_array(value, schema, root, path)


def _is_of(value: object, names: str | list[str]) -> bool:
    kinds = [names] if isinstance(names, str) else names
    is_truth = isinstance(value, bool)
    return any(isinstance(value, TYPES[name]) and is_truth == (name == "boolean") for name in kinds)


def _of_object(value: dict[str, Any], schema: Mapping[str, Any], root: Mapping[str, Any], path: str) -> Iterator[str]:
    named = schema.get("properties", {})
    yield from (f"{path}: lacks {name}" for name in schema.get("required", ()) if name not in value)
    others = schema.get("additionalProperties", True)
    for name, each in value.items():
        if name in named:
            yield from _problems(each, named[name], root, f"{path}.{name}")
        elif others is False:
            yield f"{path}: has no {name}"
        elif isinstance(others, dict):
            yield from _problems(each, others, root, f"{path}.{name}")


def _of_array(value: list[Any], schema: Mapping[str, Any], root: Mapping[str, Any], path: str) -> Iterator[str]:
    first = schema.get("prefixItems", [])
    if not schema.get("minItems", 0) <= len(value) <= schema.get("maxItems", len(value)):
        yield f"{path}: {len(value)} items"
    for at, each in enumerate(value):
        of = first[at] if at < len(first) else schema.get("items", {})
        if of is not False:
            yield from _problems(each, of, root, f"{path}[{at}]")
