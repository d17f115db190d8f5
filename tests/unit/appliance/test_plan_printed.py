from __future__ import annotations

import pytest

from tests.golden.printed import CASES, HERE, Case, text


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_what_is_printed_is_what_was_read(case: Case) -> None:
    """`python -m tests.golden.printed` writes them anew; read the difference before keeping it."""
    assert text(case) == (HERE / f"{case.name}.txt").read_text()


def test_nothing_printed_is_left_over() -> None:
    assert sorted(path.stem for path in HERE.glob("*.txt")) == sorted(case.name for case in CASES)
