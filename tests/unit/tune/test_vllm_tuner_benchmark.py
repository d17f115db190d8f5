"""The benchmark of vLLM's tuning: what it makes of command lines and of the sweep's files."""

from __future__ import annotations

import json
from typing import Any

from appliance.tune.figures.workload import CHAT
from benchmarks.vllm_tuner import compared, flags_of, jobs_by_name

ARGV = (
    "/opt/vllm/bin/vllm",
    "serve",
    "/model",
    "--uds",
    "/tmp/a.sock",
    "--served-model-name",
    "m",
    "small",
    "--enforce-eager",
)


def test_flags_keep_their_values_and_the_socket_is_left_out() -> None:
    assert flags_of((*ARGV, "--block-size", "64")) == {
        "--served-model-name": "m small",
        "--enforce-eager": True,
        "--block-size": "64",
    }


def test_a_job_is_the_first_token_and_all_others_of_each_run() -> None:
    run = {"mean_ttft_ms": 500.0, "mean_tpot_ms": 20.0, "serve": {"block_size": 64}}
    slow = {**run, "mean_tpot_ms": 40.0}
    listed = (
        f"/data/results/sweep/SERVE--p0-BENCH--default/run=0.json\n{json.dumps(run, indent=4)}\n\n"
        f"/data/results/sweep/SERVE--p0-BENCH--default/run=1.json\n{json.dumps(slow, indent=4)}\n\n"
        f"/data/results/sweep/SERVE--p12-BENCH--default/run=0.json\n{json.dumps(run)}\n\n"
    )
    fast_s, slow_s = (round(0.5 + (CHAT.tokens_out - 1) * ms / 1000, 3) for ms in (20, 40))
    assert jobs_by_name(listed) == {"p0": [fast_s, slow_s], "p12": [fast_s]}


def test_both_points_are_measured_in_turn_and_one_plan_is_not_measured() -> None:
    ours, theirs = {"key": "ours"}, {"key": "theirs"}
    asked: list[str] = []

    def job_s(plan: dict[str, Any]) -> float:
        asked.append(plan["key"])
        return 11.0 if plan is ours else 10.0

    assert compared(job_s, (ours, theirs), 2) == {"ours_s": [11.0, 11.0], "sweep_s": [10.0, 10.0], "ratio": 1.1}
    assert asked == ["theirs", "ours", "ours", "theirs"]
    assert compared(job_s, (ours, ours), 2)["ratio"] == 1.0
    assert len(asked) == 4
