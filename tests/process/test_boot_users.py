"""Slots for several users through the verb `tune`: measured only where there is something to find out, and the time."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from appliance.profile import parse_profile
from tests.process.stages.boot import Home


@pytest.fixture
def home(tmp_path: Path) -> Home:
    return Home.make(tmp_path / "home")


def events(done: subprocess.CompletedProcess[str]) -> list[dict[str, Any]]:
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in (done.stdout + done.stderr).splitlines() if line.startswith("{")]


def test_a_number_of_slots_that_was_asked_for_is_not_measured(home: Home) -> None:
    said = events(home.command("tune", users="2", parallel="3"))
    assert not [event for event in said if event["event"].startswith("slots")]
    assert not [event for event in said if "users at once" in event["message"]]
    (path,) = home.profiles.glob("*.json")
    profile = parse_profile(path.read_text())
    assert profile.plan.parallel == 3
    assert profile.notes == ()
    assert next(c.reason for c in profile.plan.choices if c.name == "parallel").startswith("asked for: ")


def test_where_the_time_does_not_do_for_slots_the_planned_number_stays_and_why_is_kept(home: Home) -> None:
    home.set_engine("--decode-ms", "600000")  # what the fake reports for a token; it does not wait
    said = events(home.command("tune", users="2"))
    (warning,) = [event["message"] for event in said if event["event"] == "slots_not_measured"]
    assert warning.startswith("4 slots for 2 users were not measured: ")
    (path,) = home.profiles.glob("*.json")
    profile = parse_profile(path.read_text())
    assert profile.plan.parallel == 4
    assert profile.notes == (warning,)
