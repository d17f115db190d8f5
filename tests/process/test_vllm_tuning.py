"""vLLM measured in idle time: the engine that serves is the baseline, loads are counted, and a later day goes on."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.process.stages.boot import Serving
from tests.process.stages.vllm_home import VllmHome

WAIT_S = 120.0  # a dozen starts of the fake, on a machine that may be busy
LOADS = 4
# Six plans: a search of all would take minutes.
FEW: dict[str, Any] = {"kv_type": "bf16", "engine_arg": "--enforce-eager", "check_profile": "off"}


@pytest.fixture
def home(tmp_path: Path) -> Iterator[VllmHome]:
    home = VllmHome.make(tmp_path / "home")
    yield home
    home.free_segments()


def loaded(home: VllmHome) -> list[str]:
    """Command lines of the engines that were loaded to be measured."""
    return [line for line in home.started if "m.sock" in line]


def seen(serving: Serving, name: str) -> list[dict[str, Any]]:
    return [event for event in serving.events if event["event"] == name]


def kept(home: VllmHome, suffix: str) -> Path:
    (path,) = home.profiles.glob(f"*{suffix}")
    return path


def rewrite(path: Path, **fields: Any) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))


def test_idle_time_measures_the_serving_engine_first_and_ends_at_the_loads_of_a_day(home: VllmHome) -> None:
    home.set_engine("--fake-decode-ms", "6", where="--max-num-batched-tokens 1024")
    with home.serving(tune="idle", idle_s="1", loads_a_day=str(LOADS), **FEW) as serving:
        serving.wait_ready()
        first = serving.event("tune_measured", timeout_s=WAIT_S)
        assert first["message"].startswith("context 8,192, kv_type bf16, max_num_batched_tokens 2,048")
        assert loaded(home) == [], "the plan that serves is measured where it serves"
        tuned = serving.event("tuned", timeout_s=WAIT_S)
        assert tuned["goes_on_from"] is not None
        assert len(loaded(home)) <= LOADS
        assert any("--speculative-config" in line for line in loaded(home)), "speculation has loads of its own"
        serving.event("idle_changed", timeout_s=WAIT_S)
        assert "--max-num-batched-tokens 1024" in home.started[-1]
        told = serving.document("tuning")
        assert told["state"] == "measured"
        assert told["message"].endswith(
            f"plans so far; measuring goes on in idle time from {tuned['goes_on_from']} (UTC)"
        )
        serving.terminate()
    before = json.loads(kept(home, ".partial").read_text())
    assert before["loads"]["count"] == len(loaded(home))
    # The next day.
    rewrite(kept(home, ".partial"), loads={**before["loads"], "day": "2000-01-01"})
    rewrite(kept(home, ".json"), goes_on_from="2000-01-02")
    count = len(home.started)
    with home.serving(tune="idle", idle_s="1", loads_a_day="12", **FEW) as serving:
        serving.wait_ready()
        assert "--max-num-batched-tokens 1024" in home.started[count]
        tuned = serving.event("tuned", timeout_s=WAIT_S)
        resumed = seen(serving, "tune_start")[-1]["message"]
        assert f"; {len(before['measurements'])} measurements are kept" in resumed
        assert tuned["goes_on_from"] is None
        assert tuned["stopped_by"].startswith(("no measurement promises", "everything that may fit"))
        serving.terminate()
    assert list(home.profiles.glob("*.partial")) == []


def test_a_request_ends_measuring_on_its_engine_and_what_was_measured_stays(home: VllmHome) -> None:
    home.set_engine("--fake-interval", "0.1")  # a depth takes seconds
    with home.serving(tune="idle", idle_s="1", loads_a_day="1", speculation="off") as serving:
        serving.wait_ready()
        serving.event("idle_measure_serving", timeout_s=WAIT_S)
        serving.event("tune_step", timeout_s=WAIT_S)
        status, _ = serving.chat()
        assert status == 200
        serving.event("tune_measured", timeout_s=WAIT_S)
        before = serving.names()[: serving.names().index("tune_measured")]
        assert before.count("idle_measure_serving") >= 2, "it went on in a later pause"
        assert len(loaded(home)) <= 1, "the next plan is loaded, this one was measured where it serves"
        serving.terminate()
