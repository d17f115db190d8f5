"""`models:` of the settings file, in every shape that YAML has."""

from __future__ import annotations

import pytest

from appliance.errors import ConfigError
from appliance.settings import resolve_settings


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("models:", []),
        ("models: []", []),
        ("models: {}", []),
        ("models: [x, y.gguf]", ["x", "y.gguf"]),
        ("models: {a: , b: {model: x}}", ["a", "b"]),
        ("models: {2: {}, 2026-01-01: {}, on: {}}", ["2", "2026-01-01", "on"]),
        ("models: {null: {model: x}}", ["x"]),
        ("models: {' a ': {model: x}}", ["a"]),
        ("models: {a: &one {model: y}, b: *one}", ["a", "b"]),
        ("models: {org/repo:Q4: {}, <b>: {}}", ["org/repo:Q4", "<b>"]),
    ],
)
def test_an_entry_is_called_by_its_key(text: str, names: list[str]) -> None:
    assert [entry.name for entry in resolve_settings({}, {}, text).models] == names


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("models: 5", "neither names with settings nor a list"),
        ("models: ''", "neither names with settings nor a list"),
        ("models: {a: 5}", "has no settings"),
        ("models: {a: [1]}", "has no settings"),
        ("models: [[x]]", "has no settings"),
        ("models: [null]", "neither a name nor a `model`"),
        ("models: {'': {}}", "neither a name nor a `model`"),
        ("models: [x, X]", "the same name"),
        ("models: {a: {model: [x]}}", "takes one value"),
        ("models: {a: {model: ''}}", "is empty"),
        ("models: {a: {pin: maybe}}", "neither on nor off"),
        ("models: {a: {pin: [1]}}", "neither on nor off"),
        ("models: {a: {models: {b: {}}}}", "unknown setting"),
        ("models: {a: {port: 5}}", "cannot differ"),
        ("models: {a: {keep_alive: .nan}}", "is no duration"),
        ('models: {"a\\nb": {}}', r"control characters: 'a\\nb'"),
        ('models: {"a\\0": {}}', "control characters"),
        ('models: {"\\ud800": {}}', "control characters"),
        ('models: {a: {alias: "x\\e[2J"}}', "control characters"),
    ],
)
def test_everything_else_is_refused_with_the_reason(text: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        resolve_settings({}, {}, text)


def test_thousands_of_entries_are_read() -> None:
    text = "models:\n" + "".join(f"  m{number}: {{model: x{number}.gguf}}\n" for number in range(3000))
    assert len(resolve_settings({}, {}, text).models) == 3000
