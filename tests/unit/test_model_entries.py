"""`models:` in the settings file: several models, each with settings of its own."""

from __future__ import annotations

import pytest

from appliance.errors import ConfigError
from appliance.keep_alive import FOREVER
from appliance.settings import Settings, resolve_settings

FILE = """
mode: speed
models:
  chat: {model: "qwen:8b", ctx-size: 32768, keep_alive: 10m, alias: gpt-4}
  embed: {model: nomic.gguf, pin: on, mode: balanced}
  bare:
"""


def settings(text: str, **flags: str) -> Settings:
    return resolve_settings(flags, {}, text)


def test_each_has_its_own_settings_and_those_of_all() -> None:
    found = settings(FILE)
    chat, embed, bare = found.models
    assert [(each.name, each.is_pinned, each.aliases) for each in found.models] == [
        ("chat", False, ("gpt-4",)),
        ("embed", True, ()),
        ("bare", False, ()),
    ]
    own = found.of_entry(chat)
    assert (own.model, own.alias, own.ctx_size, own.mode, own.keep_alive_s) == ("qwen:8b", "chat", 32768, "speed", 600)
    assert own.sources["ctx_size"] == "model chat in file appliance.yaml"
    assert found.of_entry(embed).mode == "balanced"
    assert found.of_entry(embed).keep_alive_s == FOREVER
    assert found.of_entry(bare).model == "bare"


def test_a_flag_about_one_model_is_that_of_the_first_one_only() -> None:
    found = settings(FILE, ctx_size="4096", users="3")
    first, entry = found.first_model()
    assert entry is found.models[0]
    assert (first.ctx_size, first.users) == (32768, 3)  # the file's own line for this model is closer
    other = found.of_entry(found.models[2])
    assert (other.ctx_size, other.users) == (None, 3)
    assert not other.is_set("ctx_size")


@pytest.mark.parametrize(
    ("asked", "name"), [("embed", "embed"), ("EMBED", "embed"), ("gpt-4", "chat"), ("nomic.gguf", "embed")]
)
def test_the_model_that_is_named_comes_first(asked: str, name: str) -> None:
    own, entry = settings(FILE, model=asked).first_model()
    assert entry is not None
    assert (entry.name, own.alias) == (name, name)


def test_a_model_that_the_file_does_not_name_comes_first_without_an_entry() -> None:
    own, entry = settings(FILE, model="other.gguf").first_model()
    assert (own.model, entry) == ("other.gguf", None)


def test_one_of_two_entries_of_a_file_may_be_called_as_the_file() -> None:
    found = settings("models: {short: {model: n.gguf, alias: n}, long: {model: n.gguf, ctx_size: 65536}}")
    assert [each.aliases for each in found.models] == [("n",), ()]


def test_a_list_is_taken_too() -> None:
    found = settings("models: [a.gguf, {model: b.gguf, alias: b, pin: true}]")
    assert [(each.name, each.values["model"], each.is_pinned) for each in found.models] == [
        ("a.gguf", "a.gguf", False),
        ("b", "b.gguf", True),
    ]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("models: 3", "neither names with settings nor a list: int"),
        ("models: {a: 3}", "model a in appliance.yaml has no settings: '3'"),
        ("models: {a: {port: 3}}", "setting port cannot differ from model to model"),
        ("models: {a: {ctx_siz: 3}}", "unknown setting in model a in file appliance.yaml: ctx_siz"),
        ("models: {a: {ctx_size: x}}", "setting ctx_size is not a whole number: 'x' (model a in file appliance.yaml)"),
        ("models: [{}]", "neither a name nor a `model`"),
        ("models: {a: {alias: B}, b: {}}", "'B' means two models in appliance.yaml: 'a' and 'b'"),
        ("models: {a: {alias: x}, b: {alias: X}}", "'x' means two models in appliance.yaml: 'a' and 'b'"),
        ("models: {a: {alias: n}, b: {model: dir/n.gguf}}", "'n' means two models in appliance.yaml: 'a' and 'b'"),
        ("models: [a, A]", "two models in appliance.yaml have the same name: 'A'"),
        ("models: {a: {pin: maybe}}", "pin is neither on nor off: 'maybe'"),
        ("models: {a: {keep_alive: soon}}", "setting keep_alive is no duration"),
        ("models: {a: {model: [x]}}", "takes one value, not a list"),
    ],
)
def test_what_is_wrong_is_told_with_its_place(text: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        settings(text)
    assert message in caught.value.message
    assert caught.value.hint
