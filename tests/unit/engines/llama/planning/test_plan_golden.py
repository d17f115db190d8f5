from __future__ import annotations

import pytest

from tests.golden.plans import CASES, HERE, Case, text


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_the_plan_is_the_one_that_was_read(case: Case) -> None:
    """`python -m tests.golden.plans` writes them anew; read the difference before keeping it."""
    assert text(case) == (HERE / f"{case.name}.txt").read_text()


def test_no_plan_is_left_over() -> None:
    assert sorted(path.stem for path in HERE.glob("*.txt")) == sorted(case.name for case in CASES)
