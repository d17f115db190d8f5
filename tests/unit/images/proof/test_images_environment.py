"""What base and Dockerfile give an image's environment."""

from __future__ import annotations

from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from images.matrix import matrix
from images.proof import environment

STAGES = """FROM a AS base
ENV DEBIAN_FRONTEND=noninteractive
FROM b AS runtime
ENV ONE=1 \\
    TWO="a b" \\
    HOME=/data/${ID}/home
RUN x
ENV TWO=c
"""
NAMES = st.from_regex(r"[A-Z][A-Z_0-9]{0,8}", fullmatch=True)
VALUES = st.text(st.characters(codec="ascii", categories=("L", "N", "P", "S")), max_size=12)


def test_the_last_stage_counts_and_of_a_variable_its_last_value() -> None:
    found = environment.given(STAGES, ("PATH=/bin", "LANG=C"), {"ID": "7"})
    assert found == {"PATH": "/bin", "LANG": "C", "ONE": "1", "TWO": "c", "HOME": "/data/7/home"}


def test_a_base_without_a_path_gets_that_of_the_builder() -> None:
    assert environment.given("FROM a AS b\n", (), {}) == {"PATH": environment.PATH}


def test_every_rendered_cell_has_a_path_and_no_open_value(project: Path) -> None:
    for cell in matrix.load(project).cells:
        text = (project / cell.folder / "Dockerfile").read_text("utf-8")
        found = environment.given(text, (), {"APPLIANCE_BUILD_ID": "b" * 32})
        assert {"PATH", "HOME", "PYTHONPATH"} <= found.keys()
        assert not any("$" in value for value in found.values())
        assert ("NVIDIA_REQUIRE_CUDA" in found) is (cell.target.cuda is not None)


@given(st.dictionaries(NAMES, VALUES, min_size=1), st.data())
def test_one_change_is_one_line(expected: dict[str, str], data: st.DataObject) -> None:
    lines = [f"{name}={value}" for name, value in expected.items()]
    assert environment.differing(lines, expected) == []
    at = data.draw(st.integers(0, len(lines) - 1))
    name = list(expected)[at]
    assert environment.differing(lines[:at] + lines[at + 1 :], expected) == [f"gone: {name}"]
    assert environment.differing([*lines, lines[at]], expected) == [f"{name} is there twice"]
    changed = [*lines[:at], f"{lines[at]}x", *lines[at + 1 :]]
    assert environment.differing(changed, expected) == [f"{lines[at]}x, expected {expected[name]}"]
