"""Digests written into build_matrix.yaml: the lines of one base, and no other byte."""

from __future__ import annotations

import difflib
from datetime import date
from pathlib import Path

import pytest
import yaml

from images import __main__ as command
from images.errors import MatrixError
from images.matrix import matrix
from images.pins import bases

DIGEST = "sha256:" + "d" * 64
TODAY = date(2026, 11, 21)


@pytest.fixture
def text(project: Path) -> str:
    return (project / "build_matrix.yaml").read_text("utf-8")


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["bookworm", "trixie", "cuda-12.8", "cuda-12.9"])
def test_only_the_lines_of_one_base_change(text: str, name: str) -> None:
    made = bases.rewrite(text, name, DIGEST, TODAY)
    old, new = yaml.safe_load(text), yaml.safe_load(made)
    was = old["bases"].pop(name)
    assert new["bases"].pop(name) == {
        **{key: value for key, value in was.items() if key != "source"},
        "digest": DIGEST,
        "status": "verified",
        "asked": TODAY,
    }
    assert new == old
    comments = [line for line in text.splitlines() if "#" in line]
    assert [line for line in made.splitlines() if "#" in line] == comments
    gone = [line[2:] for line in difflib.ndiff(text.splitlines(), made.splitlines()) if line.startswith("- ")]
    assert len(gone) == 7  # digest, status, and a source of five lines


def test_what_was_written_is_read_and_written_again_alike(text: str, project: Path, lock_texts: dict[str, str]) -> None:
    made = bases.rewrite(text, "bookworm", DIGEST, TODAY)
    cell = matrix.select(matrix.parse_matrix(yaml.safe_load(made), lock_texts).cells, "llama-cpu")[0]
    assert (cell.base.digest, cell.base.status) == (DIGEST, "verified")
    assert bases.rewrite(made, "bookworm", DIGEST, TODAY) == made


def test_a_base_without_a_digest_gets_one() -> None:
    made = bases.rewrite("bases:\n  a:\n    image: x\n    status: unresolved\nrest: 1\n", "a", DIGEST, TODAY)
    assert (
        made
        == f"bases:\n  a:\n    image: x\n    digest: {DIGEST}\n    status: verified\n    asked: 2026-11-21\nrest: 1\n"
    )


@pytest.mark.parametrize(
    "broken", ["", "bases: {a: {image: x}}\n", "bases:\n  b:\n    image: x\nc:\n  a:\n    image: x\n"]
)
def test_a_file_of_another_form_is_left_alone(broken: str) -> None:
    with pytest.raises(MatrixError, match="base a is not written as a block"):
        bases.rewrite(broken, "a", DIGEST, TODAY)


def test_a_base_that_is_not_there_is_exit_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["lock", "--bases", "bokworm"]) == 2
    assert "hint: perhaps you meant bookworm" in capsys.readouterr().err


@pytest.mark.parametrize(("key", "value"), [("status", "verified"), ("asked", "2026-11-21")])
def test_verified_means_asked_on_a_day(
    matrix_data: dict[str, dict[str, dict[str, object]]], lock_texts: dict[str, str], key: str, value: str
) -> None:
    matrix_data["bases"]["bookworm"][key] = value
    with pytest.raises(MatrixError, match="does not fit the day on which a registry was asked"):
        matrix.parse_matrix(matrix_data, lock_texts)
