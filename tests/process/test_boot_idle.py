"""`--tune idle` through the whole appliance, with the fake engine."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from tests.process.stages.boot import Home, eventually, write_model

WAIT_S = 120.0  # a dozen starts of the fake, on a machine that may be busy
# What is measured is the number of threads alone: a search of all knobs may spend its time before it comes to that.
NARROW = {"ubatch": "512", "load_mode": "mmap", "kv_type": "f16", "speculation": "off"}


@pytest.fixture
def home(tmp_path: Path) -> Home:
    return Home.make(tmp_path / "home")


def test_it_serves_the_prediction_measures_beside_it_and_changes_over(home: Home) -> None:
    predicted = home.plan()["launch"]["ubatch"]
    home.set_engine("--prefill-ms", f"{predicted}:40,5")
    few = {"threads": "1", "load_mode": "mmap", "kv_type": "f16", "speculation": "off"}
    with home.serving(tune="idle", idle_s="1", budget_s="120", **few) as serving:
        serving.wait_ready()
        assert serving.document("plan")["launch"]["ubatch"] == predicted
        assert serving.document("profile") == {}
        serving.measure_now()
        serving.event("tuned", timeout_s=WAIT_S)
        serving.event("idle_changed", timeout_s=WAIT_S)
        ready = eventually(lambda: [e for e in serving.events if e["event"] == "ready"][1:], timeout_s=WAIT_S)
        assert ready[0]["allocated_mib"]["kv"] == 90.0, "of the engine that took over, which loaded beside the other"
        assert serving.document("plan")["launch"]["ubatch"] != predicted
        assert serving.document("profile")["allocated_now"]["model"] == 92.1
        assert serving.chat()[0] == 200
        assert len(serving.engine_pids()) <= 1
        serving.terminate()
    (path,) = home.profiles.glob("*.json")
    assert json.loads(path.read_text())["plan"]["launch"]["ubatch"] != predicted


def test_what_another_mode_wants_is_measured_while_nobody_asks_and_once(tmp_path: Path) -> None:
    """The fake takes 10 ms a token, and 10 more for every 2,048 in the context. At 16,384 it is too slow to read
    along."""
    home = Home.make(tmp_path / "home")
    write_model(home.data / "models/small.gguf", context=16384)
    done = home.command("tune", beside=None, budget_s="60", **NARROW)
    assert done.returncode == 0, done.stderr
    home.calm()
    (path,) = home.profiles.glob("*.json")
    before = json.loads(path.read_text())
    assert before["plan"]["context"] == 16384
    with home.serving(tune="off", mode="context", **NARROW) as serving:
        serving.wait_ready()
        said = serving.event("plan_picked")["message"]
        assert "no context decodes 15 tok/s when full" in said
        assert said.endswith("; chosen among what was measured for mode 'balanced', and tune 'off' measures no more")
        serving.terminate()
    with home.serving(tune="idle", idle_s="1", mode="context", **NARROW) as serving:
        serving.wait_ready()
        assert serving.document("plan")["context"] == 16384
        serving.measure_now()
        assert serving.event("tuned_more", timeout_s=WAIT_S)["message"] == "measured 1 more for mode 'context'"
        serving.event("idle_back", timeout_s=WAIT_S)
        assert serving.document("plan")["context"] == 10752
        assert serving.chat()[0] == 200
        serving.terminate()
    (path,) = home.profiles.glob("*.json")
    after = json.loads(path.read_text())
    assert (after["mode"], after["other_modes"], after["plan"]) == ("balanced", ["context"], before["plan"])
    assert after["measurements"][: len(before["measurements"])] == before["measurements"]
    with home.serving(tune="idle", idle_s="1", mode="context", **NARROW) as serving:
        serving.wait_ready()
        plan, status = serving.document("plan"), serving.document("status")
        assert (plan["context"], status["tuning"]) == (10752, "measured")
        # Not those of the profile's best plan, which is of another mode.
        assert status["speeds"]["measured"]["plan"] == plan["key"]
        assert serving.document("profile")["speed"] == status["speed"]
        shown = home.command("plan", beside=serving, tune="idle", mode="context", **NARROW).stdout
        assert status["speed"] in shown
        assert (status["from_profile"], status["measured_since_start"]) == (True, False)
        assert "tune_more" not in serving.names()
        serving.terminate()


def test_sigterm_while_it_measures_beside_leaves_nothing(home: Home) -> None:
    home.set_engine("--load-seconds", "600", where="m.sock")  # of what is measured
    with home.serving(tune="idle", idle_s="1", speculation="off") as serving:
        serving.wait_ready()
        serving.measure_now()
        serving.event("tune_step", timeout_s=WAIT_S)
        serving.terminate()
    assert list(home.profiles.glob("*.json")) == []


@pytest.fixture
def busy() -> Iterator[None]:
    """Others' work on every CPU: what is measured beside it is provisional."""
    count = len(os.sched_getaffinity(0))
    others = [subprocess.Popen((sys.executable, "-I", "-S", "-c", "while True: pass")) for _ in range(count)]
    yield
    for other in others:
        other.kill()
        other.wait()


@pytest.mark.usefixtures("busy")
def test_a_provisional_profile_is_measured_once_more_and_whoever_waits_does_not_wait_for_ever(
    tuned: Home, tmp_path: Path
) -> None:
    home = tuned.copy(tmp_path / "home")
    (path,) = home.profiles.glob("*.json")
    spoilt = {"disturbance": "the hypervisor took the CPU away", "disturbed_times": 1}
    path.write_text(json.dumps({**json.loads(path.read_text()), **spoilt}))
    with home.serving(tune="idle", idle_s="3600") as serving:
        serving.wait_ready()
        assert "profile_used" in serving.names()
        begin = partial(serving.ask, "POST", "/appliance/v1/tuning", key=home.key)
        assert begin()[0] == 202
        eventually(lambda: begin()[0] == 200, timeout_s=WAIT_S, what=lambda: serving.text)
        assert serving.names().count("tune_start") == 1
        serving.terminate()


def test_measuring_begins_at_once_when_it_is_asked_for(home: Home) -> None:
    """`make up WAIT=tuned` sends this request. Without it, measuring beside the engine that serves begins 3 s after the
    last request."""
    with home.serving(tune="idle", idle_s="3600", speculation="off") as serving:
        serving.wait_ready()
        assert serving.document("status")["tuning"] in ("waiting", "measuring")
        before = serving.document("status")
        assert (before["speed"], before["speeds"]["measured"]) == (None, None)
        (at,) = before["speeds"]["predicted"]["at"]
        within = r" \(\d+ to \d+\)"
        decode, prefill = f"{at['decode_tokens_per_s']:.0f}", f"{at['prefill_tokens_per_s']:.0f}"
        said = f"{decode} tok/s of decode{within}, {prefill} of prefill{within}"
        assert re.fullmatch(said, before["predicted_speed"])
        assert serving.ask("POST", "/appliance/v1/tuning")[0] == 401
        status, answer = serving.ask("POST", "/appliance/v1/tuning", key=home.key)
        assert (status, answer["state"] in ("waiting", "measuring")) == (202, True)
        begin = partial(serving.ask, "POST", "/appliance/v1/tuning", key=home.key)
        eventually(lambda: begin()[0] == 200, timeout_s=WAIT_S, what=lambda: serving.text)
        tuning = serving.document("tuning")
        assert (tuning["state"], bool(tuning["measurements"])) == ("measured", True)
        after, profile = serving.document("status"), serving.document("profile")
        assert profile["speed"] == after["speed"]
        assert profile["speeds"] == after["speeds"]
        assert after["speeds"]["predicted"]["at"][0]["decode_tokens_per_s"] > 0
        measured = after["speeds"]["measured"]
        (job,) = measured["jobs"]
        assert after["speed"].startswith(f"decodes {measured['at'][0]['decode_tokens_per_s']:.1f} tok/s at 32 tokens")
        assert f"; a chat job takes {job['job_s']:.1f} s" in after["speed"]
        assert after["speed"].endswith("(extrapolated)") is job["is_extrapolated"]
        assert 0 < job["ttft_s"] < job["job_s"]
        shown = json.loads(home.command("profiles", "show", profile["key"]["id"], "--json").stdout)
        assert shown["speeds"] == after["speeds"]
        serving.terminate()


def test_with_measuring_off_it_cannot_be_asked_for(home: Home) -> None:
    with home.serving(tune="off") as serving:
        serving.wait_ready()
        status, answer = serving.ask("POST", "/appliance/v1/tuning", key=home.key)
        assert (status, answer["error"]["code"]) == (409, "tuning_off")
        assert answer["error"]["message"] == "measuring is off: tune 'off' (variable APPLIANCE_TUNE)"
        assert serving.document("tuning")["state"] == "off"


def test_measuring_while_nobody_asks_is_the_default(home: Home) -> None:
    with home.serving(tune="") as serving:  # an empty variable is as good as none
        serving.wait_ready()
        assert "tune_later" in serving.names()
        assert serving.document("status")["tuning"] in ("waiting", "measuring")
