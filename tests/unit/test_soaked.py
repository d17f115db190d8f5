"""What is said of the rounds that a soak kept."""

from __future__ import annotations

from benchmarks.soaked import summary

KILL = {"what": "kill", "member": "api", "gone_s": 1.0, "ready_s": 30.0, "left": []}


def test_each_kind_has_its_medians_and_the_longest() -> None:
    rows = [KILL, {**KILL, "gone_s": 1.5, "ready_s": 32.0}, {**KILL, "gone_s": 1.2, "ready_s": 45.0}]
    rows += [{"what": "stop", "stopped_s": 3.2}, {"what": "start", "kind": "eager", "ready_s": 29.0}]
    assert summary(rows) == [
        "kill api: 3 rounds, gone 1.2 s (at most 1.5), ready 32.0 s (at most 45.0)",
        "start eager: 1 rounds, ready 29.0 s (at most 29.0)",
        "stop: 1 rounds, stopped 3.2 s (at most 3.2)",
    ]


def test_what_was_left_is_counted() -> None:
    assert summary([{**KILL, "left": ["psm_1", "sem.mp-2"]}])[0].endswith(", 2 left in /dev/shm")
