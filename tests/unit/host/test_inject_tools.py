"""What each tool's file gets, held against the tool's published schema (tests/data/inject, each with its source)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from appliance.host.docker.endpoint import Endpoint
from appliance.host.inject.change import edited
from appliance.host.inject.formats import FORMATS
from appliance.host.inject.record import hash_of
from appliance.host.inject.target import Target
from appliance.host.inject.tools import KEY_NAME, TOOLS, Tool

SCHEMAS = Path(__file__).parents[2] / "data/inject"
KEY = "sk-app-0123456789"
WITH_FILES = [tool for tool in TOOLS if tool.edits]
TARGETS = {
    "key": Target(
        endpoint=Endpoint(base="http://127.0.0.1:11435/v1", key=KEY),
        model="qwen3:8b-q4_k_m",
        context=32768,
        key_file=Path("/home/a b/.config/appliance/api_key"),
    ),
    "no key, context unknown": Target(
        endpoint=Endpoint(base="http://10.0.0.1:11435/v1"), model="true", context=None, key_file=None
    ),
}


def problems(schema: Any, value: Any, where: str = "$") -> list[str]:
    """Return the errors of `value` against `schema`. Only the words of JSON Schema that SCHEMAS uses are known; any
    other word raises KeyError."""
    if isinstance(schema, bool):
        return [] if schema else [f"{where}: nothing may stand here"]
    found = []
    for word, rule in schema.items():
        found += RULES[word](schema, rule, value, where)
    return found


def of_type(_: Any, rule: Any, value: Any, where: str) -> list[str]:
    kinds: dict[str, Any] = {
        "string": str,
        "boolean": bool,
        "object": dict,
        "array": list,
        "number": (int, float),
        "integer": int,
    }
    names = [rule] if isinstance(rule, str) else rule
    fits = any(
        isinstance(value, kinds[name]) and not (isinstance(value, bool) and name in ("number", "integer"))
        for name in names
    )
    return [] if fits else [f"{where}: not {rule}: {value!r}"]


def of_properties(_: Any, rule: Any, value: Any, where: str) -> list[str]:
    inner = value if isinstance(value, dict) else {}
    return [each for key in rule.keys() & inner.keys() for each in problems(rule[key], inner[key], f"{where}.{key}")]


def of_others(schema: Any, rule: Any, value: Any, where: str) -> list[str]:
    inner = value if isinstance(value, dict) else {}
    others = inner.keys() - schema.get("properties", {}).keys()
    return [each for key in others for each in problems(rule, inner[key], f"{where}.{key}")]


def of_required(_: Any, rule: Any, value: Any, where: str) -> list[str]:
    return [f"{where}: lacks {key}" for key in rule if isinstance(value, dict) and key not in value]


def of_items(_: Any, rule: Any, value: Any, where: str) -> list[str]:
    rows = value if isinstance(value, list) else []
    rules = rule if isinstance(rule, list) else [rule] * len(rows)
    pairs = enumerate(zip(rules, rows, strict=False))
    return [each for index, (one, row) in pairs for each in problems(one, row, f"{where}[{index}]")]


def of_any(_: Any, rule: Any, value: Any, where: str) -> list[str]:
    tried = [problems(each, value, where) for each in rule]
    return [] if [] in tried else min(tried, key=len)


RULES: dict[str, Any] = {
    "type": of_type,
    "properties": of_properties,
    "additionalProperties": of_others,
    "required": of_required,
    "items": of_items,
    "anyOf": of_any,
    "enum": lambda _, rule, value, where: [] if value in rule else [f"{where}: none of {rule}: {value!r}"],
    "const": lambda _, rule, value, where: [] if value == rule else [f"{where}: not {rule!r}: {value!r}"],
    "not": lambda _, rule, value, where: [f"{where}: must not fit"] if not problems(rule, value, where) else [],
    "minItems": lambda _, rule, value, where: [f"{where}: too short"] if len(value) < rule else [],
    "maxItems": lambda _, rule, value, where: [f"{where}: too long"] if len(value) > rule else [],
}


def test_the_check_itself_finds_what_is_wrong() -> None:
    schema = json.loads((SCHEMAS / "opencode.json").read_text())["schema"]
    good = {"provider": {"x": {"models": {"m": {"limit": {"context": 1, "output": 1}}}}}}
    assert problems(schema, good) == []
    assert problems(schema, {"provider": {"x": {"baseURL": "u"}}}) == ["$.provider.x.baseURL: nothing may stand here"]
    assert problems(schema, {"provider": {"x": {"npm": 1}}}) == ["$.provider.x.npm: not string: 1"]
    half = {"provider": {"x": {"models": {"m": {"limit": {"context": 1}}}}}}
    assert problems(schema, half) == ["$.provider.x.models.m.limit: lacks output"]
    config = json.loads((SCHEMAS / "continue.json").read_text())["schema"]
    assert problems(config, {"name": "x", "version": "1", "models": [{"name": "a", "model": "b", "provider": 1}]}) != []


def files_of(tool: Tool, target: Target, *, is_new: bool = True) -> list[tuple[Path, str, str]]:
    assert tool.edits
    files = tool.edits(Path("/home/me/settings"), target, is_new)
    return [(file.path, file.format, edited(file, "")) for file in files]


@pytest.mark.parametrize("target", TARGETS.values(), ids=TARGETS)
@pytest.mark.parametrize("tool", WITH_FILES, ids=lambda tool: tool.name)
def test_what_is_written_fits_the_published_schema(tool: Tool, target: Target) -> None:
    published = json.loads((SCHEMAS / f"{tool.name}.json").read_text())
    assert published["source"]
    _, format_name, text = files_of(tool, target)[-1]
    document = FORMATS[format_name].load(text)
    assert problems(published["schema"], document) == []
    assert target.endpoint.root in text


@pytest.mark.parametrize("tool", [tool for tool in WITH_FILES if tool.needs_key_file], ids=lambda tool: tool.name)
def test_a_tool_that_can_refer_to_a_key_does_not_hold_it(tool: Tool) -> None:
    target = TARGETS["key"]
    assert all(KEY not in text for _, _, text in files_of(tool, target))
    said = "".join(text for _, _, text in files_of(tool, target)) + "\n".join(tool.steps(target))
    assert "appliance/api_key" in said


def test_continue_gets_the_key_in_its_own_file_of_secrets() -> None:
    tool = next(tool for tool in TOOLS if tool.name == "continue")
    (secrets, _, lines), (_, _, config) = files_of(tool, TARGETS["key"])
    assert secrets == Path("/home/me/.env")
    assert lines == f"{KEY_NAME}={KEY}\n"
    assert KEY not in config
    assert "${{ secrets.%s }}" % KEY_NAME in config  # noqa: UP031 - braces of its own
    assert len(files_of(tool, TARGETS["no key, context unknown"])) == 1


def test_claude_code_reads_the_key_with_a_command_that_any_shell_understands() -> None:
    tool = next(tool for tool in TOOLS if tool.name == "claude-code")
    _, _, text = files_of(tool, TARGETS["key"])[0]
    assert json.loads(text)["apiKeyHelper"] == "cat '/home/a b/.config/appliance/api_key'"
    assert json.loads(text)["env"]["ANTHROPIC_BASE_URL"] == "http://127.0.0.1:11435"


def test_a_new_file_of_opencode_names_its_schema_and_one_that_is_there_is_not_told() -> None:
    tool = next(tool for tool in TOOLS if tool.name == "opencode")
    new, there = (json.loads(files_of(tool, TARGETS["key"], is_new=is_new)[0][2]) for is_new in (True, False))
    assert new["$schema"] == "https://opencode.ai/config.json"
    assert "$schema" not in there


def test_a_value_is_the_same_whatever_the_order_of_its_keys() -> None:
    assert hash_of({"a": 1, "b": [1, 2]}) == hash_of({"b": [1, 2], "a": 1}) != hash_of({"a": 1, "b": [2, 1]})


def test_the_context_is_told_where_it_is_known() -> None:
    by_name = {tool.name: tool for tool in TOOLS}
    known, unknown = TARGETS["key"], TARGETS["no key, context unknown"]
    opencode = [json.loads(files_of(by_name["opencode"], target)[0][2]) for target in (known, unknown)]
    models = [each["provider"]["appliance"]["models"] for each in opencode]
    assert models[0]["qwen3:8b-q4_k_m"]["limit"] == {"context": 32768, "output": 8192}
    assert "limit" not in models[1]["true"]
    zed = json.loads(files_of(by_name["zed"], known)[0][2])
    assert zed["language_models"]["openai_compatible"]["appliance"]["available_models"][0]["max_tokens"] == 32768


@pytest.mark.parametrize("tool", TOOLS, ids=lambda tool: tool.name)
def test_no_key_is_in_what_is_said(tool: Tool) -> None:
    for target in TARGETS.values():
        steps = tool.steps(target)
        assert steps
        assert KEY not in "\n".join(steps)
