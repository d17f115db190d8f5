"""Causes of slow answers, from made-up facts; and what is remembered of prompts."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from appliance.probe.load.conditions import Conditions
from appliance.probe.load.load import GpuMoment
from appliance.serve.receipts.causes import Cause, Facts, capped_share, causes
from appliance.serve.receipts.prompts import FIRST, KEPT, MARKS, Engine, Prompts, hashes_of, prompt_of
from appliance.serve.receipts.reference import Reference, reference_of
from appliance.tune.figures.curve import Curve, Point
from tests.builders import PLANS, profile

SLOW = Facts(seconds=4.0, expected_s=1.0)
CROWDED = Conditions(interval_s=4.0, cpus=2, own_cpu=0.5, foreign_cpu=0.5)
ENGINE = Engine(restarts=0, number=1)
STREAMED = (b"", b'"stream":true,"stream_options":{"include_usage":true},')


def one_of(**facts: object) -> Facts:
    return replace(SLOW, **facts)  # type: ignore[arg-type]


PLANTED = [
    (Cause.OTHER_PROGRAMS, {"conditions": CROWDED}),
    (Cause.GPU_CLOCK, {"clock_share": 0.3}),
    (Cause.PARALLEL_REQUESTS, {"beside": 1.0}),
    (Cause.COLD_CACHE, {"lost_s": 2.5}),
    (Cause.RESTART, {"lost_s": 2.5, "lost_by": Cause.RESTART}),
    (Cause.RESTART, {"is_first_after_restart": True}),
    (Cause.MODEL_LOAD, {"load_s": 2.5}),
    (Cause.TUNING, {"held_s": 2.5}),
    (Cause.TUNING, {"is_beside_tuning": True}),
]


@pytest.mark.parametrize(("cause", "facts"), PLANTED)
def test_each_cause_is_named_by_its_own_facts(cause: Cause, facts: dict[str, object]) -> None:
    assert causes(one_of(**facts)) == (cause,)


@pytest.mark.parametrize(("cause", "facts"), PLANTED)
def test_an_answer_that_was_not_slow_names_none(cause: Cause, facts: dict[str, object]) -> None:
    assert causes(one_of(**facts, seconds=1.5)) == ()
    assert causes(one_of(**facts, seconds=0.15, expected_s=0.01)) == ()  # short answers vary for no reason


def test_a_slow_answer_without_a_reason_names_none() -> None:
    assert causes(SLOW) == ()
    calm = replace(CROWDED, foreign_cpu=0.01)
    assert causes(one_of(conditions=calm, beside=0.01, lost_s=0.1, held_s=0.1)) == ()
    assert causes(one_of(conditions=replace(CROWDED, foreign_cpu=None))) == ()


def test_the_largest_comes_first() -> None:
    assert causes(one_of(beside=1.0, lost_s=2.5)) == (Cause.COLD_CACHE, Cause.PARALLEL_REQUESTS)
    assert causes(one_of(beside=3.0, lost_s=1.0)) == (Cause.PARALLEL_REQUESTS, Cause.COLD_CACHE)


@given(
    seconds=st.floats(0, 100),
    expected_s=st.floats(0, 100),
    held_s=st.floats(0, 100),
    lost_s=st.floats(0, 100),
    beside=st.floats(0, 50),
    clock_share=st.none() | st.floats(0, 1),
)
def test_causes_are_distinct_and_only_of_slow_answers(**facts: float) -> None:
    found = Facts(**facts)  # type: ignore[arg-type]
    named = causes(found)
    assert len(set(named)) == len(named)
    assert found.is_slow or not named


def test_only_a_working_gpu_below_its_clock_is_capped() -> None:
    working = GpuMoment(index=0, utilization=90, sm_clock_mhz=500, sm_clock_max_mhz=2000, reasons=0x4)
    assert capped_share([(working,)]) == 0.25
    assert capped_share([(replace(working, utilization=5),)]) is None
    assert capped_share([(replace(working, utilization=None),)]) is None
    assert capped_share([(replace(working, sm_clock_mhz=1900),)]) is None
    assert capped_share([(replace(working, sm_clock_mhz=1900, reasons=0x40),)]) == 0.95  # heat
    assert capped_share([(replace(working, sm_clock_mhz=None),)]) is None
    assert capped_share([]) is None


def test_the_part_of_a_prompt_that_was_read_before_is_found() -> None:
    prompts = Prompts()
    first = b"a" * 5000
    assert prompts.find(hashes_of(first), len(first)) == (0.0, None)
    prompts.note(hashes_of(first), ENGINE)
    assert prompts.find(hashes_of(first), len(first)) == (1.0, ENGINE)
    longer = first + b"b" * 5000
    share, engine = prompts.find(hashes_of(longer), len(longer))
    assert (engine, 0.4 <= share <= 0.5) == (ENGINE, True)
    other = b"b" + first
    assert prompts.find(hashes_of(other), len(other)) == (0.0, None)


def test_short_bodies_are_not_remembered_and_all_of_them_have_room() -> None:
    assert hashes_of(b"x" * (FIRST - 1)) == []
    prompts = Prompts()
    for number in range(KEPT + 10):
        prompts.note(hashes_of(b"%010d" % number + b"x" * FIRST), ENGINE)
    last = b"%010d" % (KEPT + 9) + b"x" * FIRST
    assert prompts.find(hashes_of(last), len(last))[1] == ENGINE
    old = b"%010d" % 1 + b"x" * FIRST
    assert prompts.find(hashes_of(old), len(old)) == (0.0, None)


@given(st.binary(max_size=2000), st.integers(0, 4000))
def test_hashes_are_those_of_beginnings(text: bytes, more: int) -> None:
    whole = text + b"\0" * more
    assert hashes_of(whole) == hashes_of(whole)
    marks = [mark for mark in MARKS if mark <= len(text)]
    assert hashes_of(text)[: len(marks)] == hashes_of(whole)[: len(marks)]


def test_the_reference_is_the_measured_curve() -> None:
    points = (Point(depth=0, decode_ms=10, prefill_ms=1.0, prefill_tokens=0),
              Point(depth=1000, decode_ms=20, prefill_ms=1.0, prefill_tokens=1000))  # fmt: skip
    reference = Reference(Curve(points=points))
    assert reference.tokens_per_s(500) == pytest.approx(1000 / 15)
    assert reference.answer_s(1000, 1000, 50) == pytest.approx(50 * 0.020, rel=0.2)
    assert reference.answer_s(0, 1000, 50) - reference.answer_s(1000, 1000, 50) == pytest.approx(1.0)
    assert reference.prefill_s(7, 7) == 0.0


def test_a_plan_that_was_not_measured_has_no_reference() -> None:
    assert reference_of(None, profile()) is None
    assert reference_of(PLANS[0], None) is None
    assert reference_of(PLANS[0], profile()) is not None
    assert reference_of(PLANS[3], profile()) is None


@pytest.mark.parametrize("name", ["messages", "prompt", "input"])
def test_members_before_a_prompt_change_nothing_in_it(name: str) -> None:
    """SDKs write `stream` before the messages, and leave it out of a request that does not stream."""
    prompt = json.dumps("a tower east of the river " * 40)
    plain, streamed = (b'{"model":"any",%b"%b":%b}' % (more, name.encode(), prompt.encode()) for more in STREAMED)
    prompts = Prompts()
    prompts.note(hashes_of(prompt_of(plain)), ENGINE)
    assert prompts.find(hashes_of(prompt_of(streamed)), len(prompt_of(streamed))) == (1.0, ENGINE)


def test_other_tools_before_the_same_messages_are_another_prompt() -> None:
    """Templates put tools first, so none of the cache holds."""
    rest = b'"messages":[{"role":"user","content":"%b"}]}' % (b"x" * 2000)
    first, second = (b'{"tools":[{"name":"%b"}],' % name + rest for name in (b"f", b"g"))
    prompts = Prompts()
    prompts.note(hashes_of(prompt_of(first)), ENGINE)
    assert prompts.find(hashes_of(prompt_of(second)), len(prompt_of(second))) == (0.0, None)


def test_a_body_without_a_known_part_is_its_own_prompt() -> None:
    assert prompt_of(b"--boundary\r\n") == b"--boundary\r\n"
    assert prompt_of(b"") == b""
