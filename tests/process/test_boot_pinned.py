"""A pinned profile through the whole start: another image, and measuring once more."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.process.stages.boot import Home


@pytest.fixture
def home(tuned: Home, tmp_path: Path) -> Home:
    return tuned.copy(tmp_path / "home")


def only_profile(home: Home) -> str:
    (path,) = home.profiles.glob("*.json")
    return path.stem


def set_build(home: Home, build_id: str) -> None:
    path = home.folder / "facts/image_facts.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "build_id": build_id}))


def test_a_new_image_serves_from_a_pinned_profile_and_says_so(home: Home) -> None:
    name = only_profile(home)
    assert home.command("profiles", "pin", name).returncode == 0
    set_build(home, "b2")
    with home.serving(tune="first") as serving:
        serving.wait_ready()
        assert "tune_start" not in serving.names()
        said = serving.event("profile_pinned")
        assert said["message"] == f"profile {name} is pinned: used although build: b1 -> b2"
        serving.terminate()
    assert only_profile(home) == name


def test_a_new_image_measures_where_nothing_is_pinned_and_diff_says_why(home: Home) -> None:
    name = only_profile(home)
    set_build(home, "b2")
    done = home.command("profiles", "diff", name)
    assert (done.returncode, done.stdout) == (0, "build: b1 -> b2\n"), done.stderr
    with home.serving(tune="off") as serving:
        serving.wait_ready()
        assert "since the last one changed: build: b1 -> b2" in serving.event("profile_unused")["message"]
        assert "profile_pinned" not in serving.names()
        serving.terminate()


def test_a_new_image_first_serves_what_was_measured_with_the_one_before(home: Home) -> None:
    home.calm()
    name = only_profile(home)
    measured = json.loads((home.profiles / f"{name}.json").read_text())
    set_build(home, "b2")
    planned = json.loads(home.command("plan", "--json").stdout)
    with home.serving(tune="off") as serving:
        serving.wait_ready()
        assert serving.event("plan_foreign")["profile"] == name
        plan, status = serving.document("plan"), serving.document("status")
        assert (serving.document("profile"), status["from_profile"]) == ({}, False)
        serving.terminate()
    served, shown, kept = (
        (each["context"], each["kv_type"], each["launch"]["threads"])
        for each in (plan, planned["plan"], measured["plan"])
    )
    assert served == shown == kept
    assert status["foreign_plan"] == planned["foreign_plan"]
    assert status["foreign_plan"].endswith("build b1; on this volume")
    set_build(home, "b1")  # whose own profile is here
    with home.serving(tune="off") as serving:
        serving.wait_ready()
        assert "plan_foreign" not in serving.names()
        assert serving.document("status")["foreign_plan"] is None
        serving.terminate()


def test_measuring_again_is_refused_before_it_begins_where_the_profile_is_pinned(home: Home) -> None:
    name = only_profile(home)
    before = (home.profiles / f"{name}.json").read_bytes()
    assert home.command("profiles", "pin", name).returncode == 0
    done = home.command("tune")
    assert done.returncode == 10, done.stdout
    assert f"profile is pinned, and what is measured would not be kept: {name}" in done.stderr
    assert f"`appliance profiles unpin {name}` allows a new measurement" in done.stderr
    assert home.started == [], "no time was spent"
    assert (home.profiles / f"{name}.json").read_bytes() == before


def test_with_a_new_image_measuring_keeps_what_it_finds_beside_the_pinned_one_and_says_so_first(home: Home) -> None:
    name = only_profile(home)
    assert home.command("profiles", "pin", name).returncode == 0
    set_build(home, "b2")
    done = home.command("tune")
    assert done.returncode == 0, done.stderr
    events = [json.loads(line) for line in (done.stdout + done.stderr).splitlines() if line.startswith("{")]
    names = [event["event"] for event in events]
    assert names.index("profile_pinned") < names.index("tune_start")
    first = events[names.index("profile_pinned")]["message"]
    assert first.startswith(f"profile {name} of build b1 is pinned: what is measured is kept beside it")
    assert f"profile {name} is pinned and stays the one used" in done.stdout + done.stderr
    assert len(list(home.profiles.glob("*.json"))) == 2
