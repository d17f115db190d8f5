"""`--tune idle` through the whole appliance, with the fake engine."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from boot_stage import Home, eventually

WAIT_S = 120.0  # a dozen starts of the fake, on a machine that may be busy


@pytest.fixture
def home(tmp_path: Path) -> Home:
    return Home.make(tmp_path / "home")


def test_it_serves_the_prediction_measures_beside_it_and_changes_over(home: Home) -> None:
    predicted = home.plans()[0]["threads"]
    home.set_engine("--decode-ms", f"{predicted}:40,5", where="--threads")
    with home.serving(tune="idle", idle_s="1", budget_s="20", speculation="off") as serving:
        serving.wait_ready()
        assert serving.document("plan")["threads"] == predicted
        assert serving.document("profile") == {}
        serving.event("tuned", timeout_s=WAIT_S)
        serving.event("idle_changed", timeout_s=WAIT_S)
        ready = eventually(lambda: [e for e in serving.events if e["event"] == "ready"][1:], timeout_s=WAIT_S)
        assert ready[0]["allocated_mib"]["kv"] == 90.0, "of the engine that took over, which loaded beside the other"
        assert serving.document("plan")["threads"] != predicted
        assert serving.document("profile")["allocated_now"]["model"] == 92.1
        assert serving.chat()[0] == 200
        assert len(serving.engine_pids()) <= 1
        serving.terminate()
    (path,) = home.profiles.glob("*.json")
    assert json.loads(path.read_text())["plan"]["threads"] != predicted


def test_sigterm_while_it_measures_beside_leaves_nothing(home: Home) -> None:
    home.set_engine("--load-seconds", "0.5")
    with home.serving(tune="idle", idle_s="1", speculation="off") as serving:
        serving.wait_ready()
        serving.event("tune_step", timeout_s=WAIT_S)
        assert serving.terminate() < 9
    assert list(home.profiles.glob("*.json")) == []
