"""Several users of vLLM: as many requests in a step as there are users, and fewer measured by the verb `tune`."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from appliance.profile import parse_profile
from tests.process.stages.vllm_home import VllmHome


@pytest.fixture
def home(tmp_path: Path) -> Iterator[VllmHome]:
    home = VllmHome.make(tmp_path / "home")
    yield home
    home.free_segments()


def sequences(line: str) -> int:
    words = line.split()
    return int(words[words.index("--max-num-seqs") + 1])


def test_each_count_is_a_start_of_its_own_and_the_best_one_serves(home: VllmHome) -> None:
    home.set_engine("--fake-decode-ms", "2", "--fake-interval", "0.003")  # a socket adds to what its clock says
    done = home.command("tune", users="5", speculation="off", kv_type="bf16", ubatch="2048", budget_s="120")
    assert done.returncode == 0, done.stderr
    events = [json.loads(line) for line in (done.stdout + done.stderr).splitlines() if line.startswith("{")]
    counts = [sequences(line) for line in home.started]
    assert set(counts[:-3]) == {6}  # one beside the users
    assert counts[-3:] == [6, 3, 2]
    (chosen,) = [event["message"] for event in events if event["event"] == "slots"]
    assert chosen.startswith("6 slots for 5 users: "), chosen
    (path,) = home.profiles.glob("*.json")
    profile = parse_profile(path.read_text())
    assert profile.plan.parallel == 6
    with home.serving(users="5", speculation="off", kv_type="bf16", ubatch="2048") as serving:
        serving.wait_ready()
        assert sequences(home.started[-1]) == 6
