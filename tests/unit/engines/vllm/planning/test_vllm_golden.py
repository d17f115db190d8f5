from __future__ import annotations

import itertools
import json
import re
from pathlib import Path

import pytest

from appliance.errors import FatalError
from appliance.plan import Plan
from tests.golden.vllm_plans import CASES, HERE, Case, arguments, engine_facts, space, text

README = Path(__file__).parents[5] / "appliance/engines/vllm/README.md"


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


def test_what_is_said_of_the_published_cards_is_of_the_plans() -> None:
    found = {case.name: plan(case) for case in CASES if case.name.startswith("2x2080ti-22g_")}
    contexts = {name: made.context if made else None for name, made in found.items()}
    assert contexts == {
        "2x2080ti-22g_as-published": 207_872,
        "2x2080ti-22g_as-published_262144": None,
        "2x2080ti-22g_fp8-cache": None,
        "2x2080ti-22g_int8-cache_262144": 262_144,
    }
    table = README.read_text("utf-8").partition("as published\n")[2].partition("\n## ")[0]
    assert {"207,872", "262,144", "209,152"} <= set(re.findall(r"\d{3},\d{3}", table))
