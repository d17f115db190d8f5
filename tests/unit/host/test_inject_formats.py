"""Small cuts into users' files: the value is there, and all that the user wrote is as it was."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from appliance.host.inject import dotenv, jsonc, yaml_text
from appliance.host.inject.place import MISSING, Item, NotEditableError, Place, at, drop, look, put

ZED = """\
// Zed settings, by hand
{
  "theme": "One Dark", // dark
  /* two
     lines */
  "vim_mode": true,
  "agent": {
    "model": {"provider": "x", "name": "y"}, // inner
  },
}
"""
CONTINUE = """\
name: Mine   # not yours
version: 0.0.1

# my models
models:
  - name: One  # first
    provider: openai
    model: gpt-4o
    roles:
      - chat
  # about two
  - &two
    name: "Two"
    provider: ollama
    model: llama3

# after the models
context:
- provider: code
"""
ENTRY = {"name": "Appliance", "provider": "openai", "model": "qwen", "roles": ["chat", "edit"]}
MODELS = Place(keys=("models",), item=Item(key="name", value="Appliance"))


def is_kept(before: str, after: str) -> bool:
    """True if `after` has all lines of `before` in order. Commas do not count."""
    lines = iter(line.replace(",", "").rstrip() for line in after.splitlines())
    return all(line.replace(",", "").rstrip() in lines for line in before.splitlines())


def test_comments_of_an_editor_are_read() -> None:
    assert jsonc.load(ZED)["agent"] == {"model": {"provider": "x", "name": "y"}}
    assert jsonc.load("") == {}
    assert jsonc.load('{"a": "// no comment", "b": [1, 2.5e3, null, "\\u00e4\\""],}')["b"] == [1, 2500.0, None, 'ä"']


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("[1]", "line 1: it is not an object"),
        ("{", "line 1: a } is missing"),
        ('{\n"a" 1}', "line 2: a colon is missing"),
        ('{\n"a": }', "line 2: a value is missing"),
        ('{"a":', "line 1: it ends too early"),
        ('{"a": 1 "b": 2}', "line 1: a comma or a } is missing"),
        ("{'a': 1}", "line 1: a key in double quotes is missing"),
        ('{"a": 1}\n\nx', "line 3: something follows the end"),
        ('{"a": 1,\n"a": 2}', "line 2: this key occurs twice: a"),
        ('{"a": 01}', "line 1: this is not a value: 01"),
        ("/* {}", "line 1: a value is missing"),
        ("{" + '"a": {' * 200, "line 1: it is nested too deep"),
    ],
)
def test_what_is_no_json_is_told_with_its_line(text: str, what: str) -> None:
    with pytest.raises(ValueError, match=re.escape(what)):
        jsonc.load(text)


def test_a_member_goes_behind_the_last_one_and_its_comment() -> None:
    text = '{\n  "a": 1 // one\n}\n'
    assert jsonc.put(text, at("b"), 2) == '{\n  "a": 1, // one\n  "b": 2\n}\n'


def test_an_object_of_one_line_stays_so() -> None:
    assert jsonc.put('{"a": {"b": 1}}', at("a", "c"), "d") == '{"a": {"b": 1, "c": "d"}}'


def test_groups_are_made_where_they_are_missing() -> None:
    text = jsonc.put(ZED, at("language_models", "openai_compatible", "appliance"), {"api_url": "u"})
    assert jsonc.load(text)["language_models"] == {"openai_compatible": {"appliance": {"api_url": "u"}}}
    assert is_kept(ZED, text)
    assert text.endswith("    }\n  },\n}\n")


def test_an_empty_object_keeps_its_comments() -> None:
    text = jsonc.put("{\n  // nothing yet\n}\n", at("a"), 1)
    assert text == '{\n  // nothing yet\n  "a": 1\n}\n'


def test_a_value_is_replaced_alone() -> None:
    assert jsonc.put(ZED, at("theme"), "Light") == ZED.replace("One Dark", "Light")


def test_what_is_no_group_is_not_made_one() -> None:
    with pytest.raises(NotEditableError, match="theme is not a group"):
        jsonc.put(ZED, at("theme", "x"), 1)


@pytest.mark.parametrize("key", ["theme", "vim_mode", "agent"])
def test_what_was_put_in_between_can_be_taken_out(key: str) -> None:
    text = jsonc.drop(ZED, at(key))
    assert key not in jsonc.load(text)
    assert "// Zed settings, by hand" in text


def test_the_last_member_goes_with_the_comma_before_it() -> None:
    assert jsonc.drop('{\n  "a": 1,\n  "b": 2\n}\n', at("b")) == '{\n  "a": 1\n}\n'
    assert jsonc.drop('{"a": 1, "b": 2}', at("b")) == '{"a": 1}'
    assert jsonc.drop('{"a": 1, "b": 2}', at("a")) == '{"b": 2}'
    text = '{\n  "a": 1, // x, y\n  "b": 2 // z\n}\n'
    assert jsonc.drop(text, at("b")) == '{\n  "a": 1 // x, y\n  // z\n}\n'
    assert jsonc.drop('{"a": 1}', at("x", "y")) == '{"a": 1}'


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=6),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)
documents = st.dictionaries(st.text(max_size=4), values, max_size=4)
LAYOUTS: tuple[Callable[[Any], str], ...] = (
    json.dumps,
    lambda value: json.dumps(value, indent=2) + "\n",
    lambda value: json.dumps(value, indent="\t", ensure_ascii=False),
    lambda value: "// top\n" + json.dumps(value, indent=4).replace(",\n", ", // a, b\n").replace("[\n", "[ // c\n"),
    lambda value: json.dumps(value, indent=1).replace("\n", " /* c */ \n"),
)  # fmt: skip


@given(documents, st.lists(st.sampled_from(["a", "b", "c"]), min_size=1, max_size=3), values, st.sampled_from(LAYOUTS))
def test_in_any_layout_it_is_the_same_document_and_that_value(
    document: dict[str, Any], keys: list[str], value: Any, layout: Callable[[Any], str]
) -> None:
    place, text = at(*keys), layout(document)
    try:
        meant = put(document, place, value)
    except NotEditableError:
        with pytest.raises(NotEditableError):
            jsonc.put(text, place, value)
        return
    made = jsonc.put(text, place, value)
    assert jsonc.load(made) == meant
    assert jsonc.load(jsonc.drop(made, place)) == drop(meant, place)


def test_an_entry_goes_behind_the_last_one_and_before_its_comments() -> None:
    text = yaml_text.put(CONTINUE, MODELS, ENTRY)
    assert yaml.safe_load(text)["models"][2] == ENTRY
    assert is_kept(CONTINUE, text)
    assert text.index("Appliance") < text.index("# after the models")
    assert yaml_text.drop(text, MODELS) == CONTINUE


def test_an_entry_is_replaced_as_a_whole() -> None:
    once = yaml_text.put(CONTINUE, MODELS, ENTRY)
    text = yaml_text.put(once, MODELS, {**ENTRY, "model": "gemma"})
    assert [row["model"] for row in yaml.safe_load(text)["models"]] == ["gpt-4o", "llama3", "gemma"]


@pytest.mark.parametrize(
    "head", ["", "# only a comment\n", "name: x\nversion: 1.0.0", "name: x\nmodels: []\n", "models:\n"]
)
def test_a_list_is_begun_where_there_is_none(head: str) -> None:
    text = yaml_text.put(head, MODELS, ENTRY)
    assert yaml.safe_load(text)["models"] == [ENTRY]
    assert head.rstrip("\n").removesuffix("[]").rstrip() in text


@pytest.mark.parametrize("text", ["models: [{name: One}]\n", "{name: x, models: []}\n"])
def test_lists_on_one_line_are_left_alone(text: str) -> None:
    with pytest.raises(NotEditableError):
        yaml_text.put(text, MODELS, ENTRY)


def test_only_the_entry_that_is_meant_goes() -> None:
    for name, others in (("One", ["Two"]), ("Two", ["One"])):
        text = yaml_text.drop(CONTINUE, Place(keys=("models",), item=Item(key="name", value=name)))
        assert [row["name"] for row in yaml.safe_load(text)["models"]] == others
        assert "# after the models" in text
    alone = "models:\n  - name: Appliance\n    model: x # mine\n# end\n"
    assert yaml_text.drop(alone, MODELS) == "models: []\n# end\n"


@pytest.mark.parametrize(
    ("text", "made"),
    [
        ("", "model: openai/qwen\n"),
        ("dark-mode: true", "dark-mode: true\nmodel: openai/qwen\n"),
        ("# mine\nmodel: gpt-4o # best\nx: 1\n", "# mine\nmodel: openai/qwen # best\nx: 1\n"),
        ("model: 'it''s'\n", "model: openai/qwen\n"),
    ],
)
def test_a_key_is_replaced_or_added(text: str, made: str) -> None:
    assert yaml_text.put(text, at("model"), "openai/qwen") == made
    assert "model" not in yaml_text.load(yaml_text.drop(made, at("model")))


def test_text_of_several_lines_is_not_overwritten() -> None:
    with pytest.raises(NotEditableError, match="model is not written on one line"):
        yaml_text.put("model: |\n  a\n  b\n", at("model"), "x")


@pytest.mark.parametrize(
    "word", ["true", "no", "1", "1.5", "a: b", "a #b", "", "- a", "&x", "null", "2026-01-01", "ä'\""]
)
def test_text_stays_text(word: str) -> None:
    assert yaml.safe_load(yaml_text.put("", at("key"), word)) == {"key": word}
    assert yaml.safe_load(yaml_text.put("", MODELS, {"name": "Appliance", "x": word}))["models"][0]["x"] == word


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("a: [", "line 1: "),
        ("- a\n", "it is not a mapping"),
        ("a: 1\n b: 2\n", "line 2: "),
        ("a: 1\n---\nb: 2\n", "line 2: "),
    ],
)
def test_what_is_no_yaml_is_told_with_its_line(text: str, what: str) -> None:
    with pytest.raises(ValueError, match=what):
        yaml_text.load(text)


names = st.sampled_from(["One", "Two", "Three"])
rows = st.lists(names, unique=True, max_size=3)


@given(rows, st.integers(0, 4), st.booleans(), st.booleans(), st.booleans())
def test_entries_of_any_indent_between_comments(
    found: list[str], indent: int, has_notes: bool, is_last: bool, ends: bool
) -> None:
    pad, note = " " * indent, "# note\n\n" if has_notes else ""
    text = "".join(f"{pad}- name: {name}\n{pad}  nested:\n{pad}    - 1\n{note}" for name in found)
    text = f"top: 1\nmodels:\n{text}" if found else "top: 1\nmodels:\n"
    text += "" if is_last else "after: [1, 2]\n"
    text = text if ends else text.rstrip("\n")
    made = yaml_text.put(text, MODELS, ENTRY)
    meant = put(yaml.safe_load(text), MODELS, ENTRY)
    assert yaml.safe_load(made) == meant
    assert is_kept(text, made)
    for name in (*found, "Appliance"):
        place = Place(keys=("models",), item=Item(key="name", value=name))
        assert yaml.safe_load(yaml_text.drop(made, place)) == drop(meant, place)


def test_lines_of_an_environment_are_replaced_or_added() -> None:
    text = "# mine\nexport A='x y'\nB = 2\n"
    assert dotenv.load(text) == {"A": "x y", "B": "2"}
    assert dotenv.put(text, at("A"), "sk-1") == "# mine\nA=sk-1\nB = 2\n"
    assert dotenv.put("B=2", at("A"), "a b") == "B=2\nA='a b'\n"
    assert dotenv.drop(text, at("B")) == "# mine\nexport A='x y'\n"
    assert dotenv.drop(text, at("C")) == text


def test_an_environment_that_is_none_is_told_with_its_line() -> None:
    with pytest.raises(ValueError, match="line 2: not NAME=value"):
        dotenv.load("A=1\nwhat is this\n")
    with pytest.raises(NotEditableError, match="2 times"):
        dotenv.put("A=1\nA=2\n", at("A"), "3")
    with pytest.raises(NotEditableError, match="quote"):
        dotenv.put("", at("A"), "it's $x")


@pytest.mark.parametrize(("deep", "value"), list(product([("a",), ("a", "b"), ("a", "b", "c")], [1, {}, []])))
def test_a_place_is_looked_up_put_and_dropped(deep: tuple[str, ...], value: object) -> None:
    document = put({"other": 1}, at(*deep), value)
    assert look(document, at(*deep)) == value
    assert look(drop(document, at(*deep)), at(*deep)) is MISSING
    assert look({}, at(*deep)) is MISSING
    assert look({"a": 1}, Place(keys=("a",), item=Item(key="x", value="y"))) is MISSING
    assert document["other"] == 1
