"""What is said of the rounds that a soak kept."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.soaked import main, summary

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


@pytest.mark.parametrize(
    ("rows", "code", "said"),
    [
        ([KILL, {**KILL, "gone_s": 3.0}, {"what": "stop", "stopped_s": 9.0}], 0, ""),
        ([{**KILL, "gone_s": 3.01, "when": "2026-11-23T12:00:00+00:00"}], 1,
         "error: kill api, round of 2026-11-23T12:00:00+00:00: gone after 3.0 s, 3 are promised\n"),
        ([{"what": "stop", "stopped_s": 9.4}], 1, "stopped after 9.4 s, 9 are promised\n"),
        ([{"what": "start", "kind": "eager", "ready_s": 290.0}], 0, ""),
    ],
)  # fmt: skip
def test_what_takes_longer_than_is_promised_fails(
    rows: list[dict[str, Any]], code: int, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(kept(tmp_path, rows))]) == code
    assert capsys.readouterr().err.endswith(said)


def test_rounds_of_several_days_add_up_and_those_of_another_image_do_not(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    slow = {**KILL, "image": "sha256:old", "gone_s": 30.0}
    days = [{**KILL, "image": "sha256:new", "when": f"2026-11-2{day}T12:00:00+00:00"} for day in range(3)]
    assert main([str(kept(tmp_path, [days[0], slow, *days[1:]]))]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "kill api: 3 rounds, gone 1.0 s (at most 1.0), ready 30.0 s (at most 30.0)",
        "1 rounds of other images are not counted",
    ]


def test_nothing_kept_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(kept(tmp_path, []))]) == 0
    assert capsys.readouterr().out == "no round is kept\n"
    assert main([str(tmp_path / "none")]) == 2


def kept(folder: Path, rows: list[dict[str, Any]]) -> Path:
    path = folder / "soak.jsonl"
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return path
