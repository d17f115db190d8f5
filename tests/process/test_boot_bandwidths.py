"""Bandwidths of a new machine, measured by the whole appliance while nobody asks, with the fake engine."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.process.stages.boot import Home

WAIT_S = 90.0  # on a machine that may be busy


@pytest.fixture
def home(tuned: Home, tmp_path: Path) -> Home:
    """Its profile holds: nothing else is measured."""
    return tuned.copy(tmp_path / "home")


def speeds_of(home: Home) -> Any:
    return json.loads(home.command("probe", "--json").stdout)["speeds"]


def test_the_memory_of_a_new_machine_is_measured_unasked_once_and_kept(home: Home) -> None:
    assert speeds_of(home) is None
    with home.serving(tune="idle", idle_s="1") as serving:
        serving.wait_ready()
        said = serving.event("bandwidth_measured", timeout_s=WAIT_S)
        assert serving.chat()[0] == 200
        serving.terminate()
    (path,) = home.profiles.glob("*.speeds")
    kept = speeds_of(home)
    assert (said["path"], kept["gpus"]) == (str(path), [])
    assert 0.5 < kept["dram_gb_s"] < 2000
    assert f"host memory {kept['dram_gb_s']:.1f} GB/s" in said["message"]
    with home.serving(tune="idle", idle_s="1") as serving:
        serving.wait_ready()
        serving.event("profile_probed", timeout_s=WAIT_S)  # what comes after it
        assert "bandwidth_measure" not in serving.names()
        serving.terminate()


def test_a_request_stops_it_and_it_begins_again(home: Home) -> None:
    with home.serving(tune="idle", idle_s="1") as serving:
        serving.wait_ready()
        serving.event("bandwidth_measure", timeout_s=WAIT_S)
        assert serving.chat()[0] == 200
        serving.event("bandwidth_stopped", timeout_s=WAIT_S)
        assert list(home.profiles.glob("*.speeds")) == []
        serving.event("bandwidth_measured", timeout_s=WAIT_S)
        assert serving.names().count("bandwidth_measure") == 2
        serving.terminate()


def test_it_is_not_begun_where_nothing_may_be_measured(home: Home) -> None:
    with home.serving(tune="off", idle_s="1") as serving:
        serving.wait_ready()
        serving.event("profile_probed", timeout_s=WAIT_S)  # what comes after it
        assert "bandwidth_measure" not in serving.names()
        serving.terminate()
    assert list(home.profiles.glob("*.speeds")) == []


def test_sigterm_while_it_measures_leaves_nothing(home: Home) -> None:
    with home.serving(tune="idle", idle_s="1") as serving:
        serving.wait_ready()
        serving.event("bandwidth_measure", timeout_s=WAIT_S)
        assert serving.terminate() < 9
    assert list(home.profiles.glob("*.speeds")) == []
