"""The court's other decisions: jobs from recorded requests, memory, answers, abilities, foreign CPU time."""

from __future__ import annotations

import argparse
from dataclasses import replace
from typing import Any

import pytest

from appliance.host.court import answers, suite, watch
from appliance.host.court.answers import Token
from appliance.host.court.judge import Verdict
from appliance.host.court.memory import Memory, memory_of, why_in_turn
from appliance.host.court.mix import Job, Mix, mix_of
from appliance.host.court.session import seconds
from appliance.host.court.watch import Sample, disturbance
from appliance.probe.load import conditions


def row(time: float, tokens_in: int, tokens_out: int, *, lasts: float = 1.0, **more: Any) -> dict[str, Any]:
    return {"time": time, "seconds": lasts, "tokens_in": tokens_in, "tokens_out": tokens_out, "status": 200, **more}


def test_requests_that_ran_together_are_replayed_together() -> None:
    rows = [row(12.0, 100, 20), row(10.0, 900, 50, lasts=3.0, tokens_cached=600), row(20.0, 30, 9)]
    assert mix_of(rows, {}).bursts == (
        (Job(after_s=0.0, cached=0, fresh=30, out=9),),
        (Job(after_s=0.0, cached=600, fresh=300, out=50), Job(after_s=2.0, cached=0, fresh=100, out=20)),
    )


def test_of_many_bursts_a_small_a_middle_and_a_large_one_are_taken() -> None:
    mix = mix_of([row(10.0 * i, 100 * (i + 1), 10) for i in range(30)], {})
    assert [job.fresh for [job] in mix.bursts] == [600, 1600, 2600]
    assert mix.source == "3 of 30 recorded requests, up to 1 at once"


def test_without_recorded_requests_the_mean_one_stands_for_them() -> None:
    total = {"requests": 5, "uncounted": 1, "tokens_in": 4000, "tokens_cached": 2000, "tokens_out": 400}
    assert mix_of([], total).bursts == ((Job(after_s=0.0, cached=500, fresh=500, out=100),),)
    failed = [row(1.0, 50, 50) | {"status": 500}, row(1.0, 50, 0)]
    assert mix_of(failed, {}).bursts == ((Job(after_s=0.0, cached=0, fresh=512, out=64),),)


def test_a_cached_part_is_limited() -> None:
    [[job]] = mix_of([row(1.0, 30_000, 10, tokens_cached=29_000)], {}).bursts
    assert (job.cached, job.fresh) == (4096, 1000)


def test_a_long_mix_is_shortened_and_keeps_its_depth() -> None:
    mix = Mix(bursts=((Job(after_s=1.0, cached=5000, fresh=1000, out=100),),), source="one")
    assert mix.scaled(2.0) is mix
    assert mix.scaled(0.1).bursts == ((Job(after_s=0.1, cached=5000, fresh=100, out=10),),)
    assert mix.scaled(0.0).bursts == ((Job(after_s=0.0, cached=5000, fresh=8, out=8),),)


MEMORY = Memory(old_mib=1000.0, new_mib=1000.0, old_context=8192, new_context=8192)


@pytest.mark.parametrize(
    ("memory", "verdict"),
    [
        (MEMORY, Verdict.AS_GOOD),
        (replace(MEMORY, new_mib=1110.0), Verdict.AS_GOOD),
        (replace(MEMORY, new_mib=1120.0), Verdict.LOST),
        (replace(MEMORY, new_mib=1500.0, new_context=16384), Verdict.AS_GOOD),
        (replace(MEMORY, new_context=4096), Verdict.LOST),
        (replace(MEMORY, new_mib=None), Verdict.NOT_DECIDED),
        (replace(MEMORY, old_context=None), Verdict.NOT_DECIDED),
    ],
)
def test_memory(memory: Memory, verdict: Verdict) -> None:
    assert memory.verdict is verdict


def test_memory_is_read_from_status_documents() -> None:
    status = {"context": 8192, "allocated": {"model": 100.0, "kv": 20.5, "devices": [["GPU0", 60.0]]}}
    assert memory_of(status, {}) == Memory(old_mib=120.5, new_mib=None, old_context=8192, new_context=None)


def test_both_are_loaded_only_if_three_engines_fit() -> None:
    status = {"allocated": {"model": 900.0, "kv": 100.0}}
    assert why_in_turn(status, has_gpus=False, available_mib=3301.0) == ""
    words = "3 engines of 1,000 MiB do not fit into the 3,299 MiB that are available"
    assert why_in_turn(status, has_gpus=False, available_mib=3299.0) == words
    assert "GPUs" in why_in_turn(status, has_gpus=True, available_mib=1e9)
    assert "does not tell" in why_in_turn({}, has_gpus=False, available_mib=1e9)


def token(text: str, logprob: float = -0.1, **others: float) -> Token:
    return Token(text=text, logprob=logprob, others={text: logprob, **others})


OLD = ((token("a"), token("b", c=-0.3, d=-4.0), token("e")),) * 6


def test_equal_answers_and_near_ties_are_as_good() -> None:
    assert answers.compare(OLD, OLD) == answers.Answers(prompts=6, same=6, clear=0, mean_nats=0.0)
    tied = answers.compare(OLD, ((token("a", -0.2), token("c"), token("x")),) * 6)
    assert (tied.same, tied.clear, tied.verdict) == (0, 0, Verdict.AS_GOOD)
    assert tied.mean_nats == pytest.approx(0.1)


@pytest.mark.parametrize(
    "new",
    [
        ((token("a"), token("d"), token("x")),) * 2 + OLD[2:],  # a token that was far less likely
        ((token("a"), token("zzz"), token("x")),) * 2 + OLD[2:],  # one that was not among the likeliest
        ((token("a"),),) * 2 + OLD[2:],  # an answer that ended before
        ((token("a", -0.9), token("b", -0.9), token("e", -0.9)),) * 6,  # the same tokens with other logprobs
        ((),) * 6,
    ],
)
def test_other_answers_are_lost(new: tuple[tuple[Token, ...], ...]) -> None:
    assert answers.compare(OLD, new).verdict is Verdict.LOST


def test_without_logprobs_answers_decide_nothing() -> None:
    assert answers.compare(((),) * 6, ((),) * 6).verdict is Verdict.NOT_DECIDED


def test_logprobs_are_read_in_both_forms() -> None:
    likely = [{"token": "a", "logprob": -0.1}, {"token": "b", "logprob": -2.0}]
    chat = {"content": [{"token": "a", "logprob": -0.1, "top_logprobs": likely}]}
    plain = {"tokens": ["a"], "token_logprobs": [-0.1], "top_logprobs": [{"a": -0.1, "b": -2.0}]}
    for form in (chat, plain):
        assert answers.tokens_of({"choices": [{"logprobs": form}]}) == (token("a", b=-2.0),)
    assert answers.tokens_of({"choices": [{"text": "a", "logprobs": None}]}) == ()


def test_an_ability_is_lost_if_only_the_old_build_has_it() -> None:
    old = {"chat": True, "tool": True, "schema": False, "late": True}
    found = suite.compare(old, {"chat": True, "tool": False, "schema": True})
    assert (found.passed, found.compared, found.lost, found.verdict) == (3, 2, ("tool",), Verdict.LOST)
    assert suite.compare(old, old).verdict is Verdict.AS_GOOD
    assert suite.compare(old, {}).verdict is Verdict.NOT_DECIDED


QUIET = Sample(time_s=0.0, busy_s=0.0, steal_s=0.0, own_s=0.0)


@pytest.mark.parametrize(
    ("after", "words"),
    [
        ({"busy_s": 4.0, "own_s": 3.7}, ""),
        ({"busy_s": 4.0, "own_s": 4.1}, ""),
        ({"busy_s": 4.0, "own_s": 3.5}, "other programs took more than 5% of 4 CPUs"),
        ({"busy_s": 4.0, "own_s": 4.0, "steal_s": 0.1}, "the hypervisor took more than 2% of the CPU time"),
        ({"busy_s": 4.0, "own_s": None}, "it is not known what other programs did"),
    ],
)
def test_foreign_cpu_time_disturbs(after: dict[str, Any], words: str) -> None:
    found = disturbance(QUIET, replace(QUIET, time_s=2.0, **after), cpus=4)
    assert found.startswith(words)
    assert bool(found) == bool(words)


def test_the_limits_are_those_of_the_tuner() -> None:
    assert (watch.FOREIGN_CPU, watch.STEAL) == (conditions.FOREIGN_CPU, conditions.STEAL)


def test_a_time_is_a_number_of_seconds() -> None:
    assert seconds("0") == 0
    with pytest.raises(argparse.ArgumentTypeError, match="not a number of seconds"):
        seconds("inf")
