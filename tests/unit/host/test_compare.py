"""What an upgrade made slower."""

from __future__ import annotations

from typing import Any

import pytest

from appliance.host.verbs.compare import SpeedChange, labels_changed, plan_changed, speeds_changed


def status(
    decode: float, *, depth: int = 32, job_s: float = 3.0, tokens_out: int = 256, off: float = 0.0
) -> dict[str, Any]:
    at = {"depth": depth, "decode_tokens_per_s": decode, "decode_uncertainty": off, "prefill_tokens": 32,
          "prefill_tokens_per_s": 300.0}  # fmt: skip
    job = {"workload": "chat", "tokens_in": 512, "tokens_out": tokens_out, "ttft_s": 1.0, "job_s": job_s}
    return {
        "chosen": "2 threads",
        "context": 4096,
        "mode": "speed",
        "speeds": {"measured": {"at": [at], "jobs": [job]}},
    }


def slower(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    return [each.what for each in speeds_changed(before, after) if each.is_slower]


def test_five_percent_is_the_limit_of_speeds_and_of_times() -> None:
    assert slower(status(100.0), status(95.1)) == []
    assert slower(status(100.0), status(94.9)) == ["decode at 32 tokens"]
    assert slower(status(100.0, job_s=2.0), status(100.0, job_s=2.09)) == []
    assert slower(status(100.0, job_s=2.0), status(100.0, job_s=2.11)) == ["a chat job"]


def test_what_both_may_be_off_by_is_no_change() -> None:
    assert slower(status(100.0, off=0.05), status(90.0, off=0.06)) == []
    assert slower(status(100.0, off=0.05), status(80.0, off=0.06)) == ["decode at 32 tokens"]


def test_other_depths_and_other_jobs_are_not_compared() -> None:
    assert speeds_changed(status(100.0), status(50.0, depth=64, tokens_out=128)) == ()


@pytest.mark.parametrize("empty", [{}, {"speeds": None}, {"speeds": {"measured": None}}])
def test_without_a_measurement_there_is_nothing_to_compare(empty: dict[str, Any]) -> None:
    assert speeds_changed(empty, status(1.0)) == ()
    assert speeds_changed(status(1.0), empty) == ()


def test_a_change_in_words() -> None:
    change = SpeedChange(what="decode at 2,048 tokens", unit="tok/s", before=42.1, after=38.0)
    assert change.describe() == "decode at 2,048 tokens: 42.1 -> 38.0 tok/s, 10% slower"
    assert SpeedChange(what="a job", unit="s", before=3.0, after=3.0).describe() == "a job: 3.0 -> 3.0 s"
    assert SpeedChange(what="a job", unit="s", before=3.0, after=2.0).describe() == "a job: 3.0 -> 2.0 s, 33% faster"


def test_labels_and_plans_that_differ() -> None:
    before = {"io.appliance.build-id": "a", "io.appliance.cell": "c"}
    assert labels_changed(before, {**before, "io.appliance.build-id": "b"}) == {"build": ("a", "b")}
    assert plan_changed(status(1.0), {**status(1.0), "context": 8192}) == {"context": ("4096", "8192")}
