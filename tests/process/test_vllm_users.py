"""Several users of vLLM: as many requests in a step as there are users, and fewer measured by the verb `tune`."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from appliance.profile import parse_profile
from tests.process.stages.vllm_home import VllmHome

# Nothing else is left to measure.
ONE_PLAN: dict[str, Any] = {
    "speculation": "off",
    "kv_type": "bf16",
    "ubatch": "2048",
    "engine_arg": "--enforce-eager --block-size 128",
}


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
    done = home.command("tune", **ONE_PLAN, users="5", budget_s="120")
    assert done.returncode == 0, done.stderr
    events = [json.loads(line) for line in (done.stdout + done.stderr).splitlines() if line.startswith("{")]
    counts = [sequences(line) for line in home.started]
    assert set(counts[:-3]) == {6}  # one beside the users
    assert counts[-3:] == [6, 3, 2]
    (chosen,) = [event["message"] for event in events if event["event"] == "slots"]
    best = int(chosen.partition(" slots for 5 users: ")[0])  # on a busy machine fewer are as fast
    (path,) = home.profiles.glob("*.json")
    assert parse_profile(path.read_text()).plan.parallel == best
    with home.serving(**ONE_PLAN, users="5") as serving:
        serving.wait_ready()
        assert sequences(home.started[-1]) == best
