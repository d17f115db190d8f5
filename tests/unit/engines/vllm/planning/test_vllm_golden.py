from __future__ import annotations

import itertools
import json

import pytest

from appliance.errors import FatalError
from appliance.plan import Plan
from tests.golden.vllm_plans import CASES, HERE, Case, arguments, engine_facts, space, text


def plan(case: Case) -> Plan | None:
    try:
        return space(case).predicted
    except FatalError:
        return None


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_the_plan_is_the_one_that_was_read(case: Case) -> None:
    """`python -m tests.golden.vllm_plans` writes them anew; read the difference before keeping it."""
    assert text(case) == (HERE / f"{case.id}.txt").read_text()


def test_no_plan_is_left_over() -> None:
    assert sorted(path.stem for path in HERE.glob("*.txt")) == sorted(case.id for case in CASES)


def test_enough_machines_and_models_are_planned() -> None:
    planned = {(case.machine, case.model) for case in CASES if plan(case) is not None}
    assert len(planned) >= 12


@pytest.mark.parametrize("release", ["0.32", "0.33"])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_every_flag_is_one_of_the_engine(case: Case, release: str) -> None:
    if (found := plan(case)) is None:
        return
    _, _, *argv = arguments(found)
    flags = [word for word in argv if word.startswith("--")]
    facts = engine_facts(release)
    assert set(flags) <= set(facts.flags)
    for flag, word in itertools.pairwise(argv):
        there = facts.choices_of(flag)
        assert not there or word.startswith("--") or word in there, flag
    assert len(flags) == len(set(flags)), "a thing is said twice"


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_numbers_are_plain_and_json_is_sorted(case: Case) -> None:
    if (found := plan(case)) is None:
        return
    for word in arguments(found):
        if word.startswith("{"):
            assert word == json.dumps(json.loads(word), sort_keys=True, separators=(",", ":"))
        assert not (word[:1].isdigit() and word[-1:].isalpha()), "1k is 1000 and 1K is 1024"
