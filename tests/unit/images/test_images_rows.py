"""The one reader of YAML files: each fault names file, place, value and what to do."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import pytest
from pydantic import Field

from images import rows
from images.errors import MatrixError
from images.rows import Names, Row


class Chip(Row):
    sm: str
    memory_gib: Annotated[int, Field(gt=0)] | None = None
    sources: Names
    tools: Annotated[str, Field(alias="with")] = ""


class Board(Row):
    chip: Chip | None = None


class Chips(Row):
    chips: tuple[Chip, ...] = ()
    boards: Mapping[str, Board] = {}


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"a: [b", "x.yaml cannot be read: while parsing a flow sequence"),
        (b"a: \xff", "x.yaml cannot be read: unacceptable character #x00ff: invalid"),
        (b"a: " + b"[" * 800 + b"]" * 800, "x.yaml cannot be read: its values are nested too deeply"),
        (b"a: {b: 1, c: 2, b: 3}", "x.yaml cannot be read: key is there twice: b"),
        (b"a: 2026-13-01", "x.yaml cannot be read: month must be in 1..12"),
    ],
)
def test_a_file_that_is_no_yaml_is_refused_in_one_line(tmp_path: Path, content: bytes, said: str) -> None:
    (tmp_path / "x.yaml").write_bytes(content)
    with pytest.raises(MatrixError) as caught:
        rows.load("x.yaml", root=tmp_path, hint="see y.yaml")
    assert caught.value.message.startswith(said)
    assert "\n" not in caught.value.message
    assert caught.value.hint == "see y.yaml"


def test_a_file_that_is_not_there_is_named_as_a_person_sees_it(tmp_path: Path) -> None:
    with pytest.raises(MatrixError, match=r"^facts/x\.yaml cannot be read: No such file or directory$"):
        rows.load("facts/x.yaml", root=tmp_path)


@pytest.mark.parametrize(
    ("data", "said", "hint"),
    [
        ({"chpis": []}, "x.yaml: unknown key: chpis", "perhaps you meant chips"),
        (
            {"chips": [{"sm": "90", "surces": ["a"]}]},
            "x.yaml: unknown key: chips.0.surces",
            "perhaps you meant sources",
        ),
        (
            {"boards": {"a": {"chip": {"wiht": ""}}}},
            "x.yaml: unknown key: boards.a.chip.wiht",
            "perhaps you meant with",
        ),
        ({"chips": [{"price": 1}]}, "x.yaml: unknown key: chips.0.price", "known are sm, memory_gib, sources, with"),
        (
            {"chips": [{"sm": "90", "memory_gib": 0, "sources": ["a"]}]},
            "x.yaml: chips.0.memory_gib: Input should be greater than 0: 0",
            "see y.yaml",
        ),
        (
            {"chips": [{"sm": "90", "memory_gib": True, "sources": ["a"]}]},
            "x.yaml: chips.0.memory_gib: Input should be a valid integer: True",
            "see y.yaml",
        ),
        ({"chips": [{"sm": "90"}]}, "x.yaml: chips.0.sources: Field required: {'sm': '90'}", "see y.yaml"),
        ([], "x.yaml: Input should be a valid dictionary or instance of Chips: []", "see y.yaml"),
    ],
)
def test_a_fault_is_named_by_file_place_and_value(data: Any, said: str, hint: str) -> None:
    with pytest.raises(MatrixError) as caught:
        rows.check(data, Chips, name="x.yaml", hint="see y.yaml")
    assert (caught.value.message, caught.value.hint) == (said, hint)


def test_a_long_value_is_cut_short() -> None:
    with pytest.raises(MatrixError) as caught:
        rows.check({"chips": "x" * 10_000}, Chips, name="x.yaml")
    assert len(caught.value.message) < 250


@pytest.mark.parametrize(
    ("cited", "said", "hint"),
    [
        (["notes", "gpu"], "x.yaml: a row cites a source that is not there: gpu", "perhaps you meant gpus"),
        (
            ["notes", "?"],
            "x.yaml: a row cites a source that is not there: ?",
            "add it, with what was read, where and when",
        ),
        (["notes"], "x.yaml: no row cites the source: gpus", "take it out, or cite it where it belongs"),
    ],
)
def test_sources_and_citations_are_the_same(cited: list[str], said: str, hint: str) -> None:
    rows.refuse_uncited(["gpus", "notes", "gpus"], {"notes", "gpus"}, name="x.yaml")
    with pytest.raises(MatrixError) as caught:
        rows.refuse_uncited(cited, {"notes", "gpus"}, name="x.yaml")
    assert (caught.value.message, caught.value.hint) == (said, hint)


def test_what_is_there_twice_is_named() -> None:
    rows.refuse_twice("SM", ["90", "100"], name="x.yaml")
    with pytest.raises(MatrixError, match=r"^x\.yaml: SM is there twice: 90$"):
        rows.refuse_twice("SM", iter(["90", "100", "90"]), name="x.yaml")
