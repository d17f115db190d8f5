"""Bandwidths of a new machine, measured by the whole appliance while nobody asks, with the fake engine."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.process.stages.boot import Home, Serving, eventually

WAIT_S = 90.0  # on a machine that may be busy
PATIENCE_S = 300.0  # a disturbed measurement is repeated at growing intervals


@pytest.fixture
def home(tuned: Home, tmp_path: Path) -> Home:
    """Return a home with a profile that holds, so that only bandwidths are measured."""
    return tuned.copy(tmp_path / "home")


def speeds_of(home: Home) -> Any:
    return json.loads(home.command("probe", "--json").stdout)["speeds"]


@pytest.fixture
def busy() -> Iterator[Callable[[], None]]:
    """Keep at least half of the CPUs busy with others' work, ten times the threshold. Yields a function that ends
    it."""
    count = (len(os.sched_getaffinity(0)) + 1) // 2
    others = [subprocess.Popen((sys.executable, "-I", "-S", "-c", "while True: pass")) for _ in range(count)]

    def end() -> None:
        for other in others:
            other.kill()
            other.wait()

    yield end
    end()


def outcome(serving: Serving) -> str:
    """Return the name of the event that ended the measurement. Other tests may disturb it, and then nothing is kept."""
    ends = ("bandwidth_measured", "bandwidth_disturbed")
    eventually(lambda: any(name in ends for name in serving.names()), timeout_s=WAIT_S)
    return next(name for name in serving.names() if name in ends)


def test_the_memory_of_a_new_machine_is_measured_unasked_once_and_kept(home: Home) -> None:
    assert speeds_of(home) is None
    with home.serving(tune="idle", idle_s="1") as serving:
        serving.wait_ready()
        is_kept = outcome(serving) == "bandwidth_measured"
        assert serving.chat()[0] == 200
        serving.terminate()
    if not is_kept:
        pytest.skip("what is measured beside others is not kept: tests/process/test_bandwidths_quiet.py")
    kept = speeds_of(home)
    said = serving.event("bandwidth_measured")
    (path,) = home.profiles.glob("*.speeds")
    assert (said["path"], kept["gpus"]) == (str(path), [])
    assert 0.5 < kept["dram_gb_s"] < 2000
    assert f"host memory {kept['dram_gb_s']:.1f} GB/s" in said["message"]
    with home.serving(tune="idle", idle_s="1") as serving:
        serving.wait_ready()
        serving.event("profile_probed", timeout_s=WAIT_S)  # what comes after it
        assert "bandwidth_measure" not in serving.names()
        serving.terminate()


def test_beside_the_work_of_others_nothing_is_kept_and_it_is_measured_again(
    home: Home, busy: Callable[[], None]
) -> None:
    with home.serving(tune="idle", idle_s="1") as serving:
        serving.wait_ready()
        said = serving.event("bandwidth_disturbed", timeout_s=WAIT_S)
        assert "other programs took" in said["message"]
        assert said["message"].endswith("no bandwidth is kept; measured again in a later idle minute")
        assert list(home.profiles.glob("*.speeds")) == []
        busy()
        eventually(lambda: serving.names().count("bandwidth_measure") > 1, timeout_s=WAIT_S)
        assert serving.names().index("bandwidth_disturbed") < last(serving.names(), "bandwidth_measure")
        serving.terminate()


def last(names: list[str], name: str) -> int:
    return len(names) - 1 - names[::-1].index(name)


@pytest.fixture
def may_read(home: Home) -> Path:
    """Make the child that reads memory wait until this file is there."""
    release = home.folder / "may-read"
    wait = f"while 'appliance.probe.bandwidth.dram' in sys.orig_argv and not pathlib.Path({str(release)!r}).exists():"
    (home.folder / "site").mkdir()
    code = f"import pathlib, sys, time\n{wait}\n    time.sleep(0.02)\n"
    (home.folder / "site/sitecustomize.py").write_text(code)
    home.variables = {**home.variables, "PYTHONPATH": str(home.folder / "site")}
    return release


def test_a_request_stops_it_and_it_begins_again(home: Home, may_read: Path) -> None:
    with home.serving(tune="idle", idle_s="1") as serving:
        serving.wait_ready()
        asked = 0

        def is_stopped() -> bool:
            """True if a chat has stopped a measurement. Each begin gets a chat: other programs may end one before its
            chat comes."""
            nonlocal asked
            if (begun := serving.names().count("bandwidth_measure")) > asked:
                asked = begun
                assert serving.chat()[0] == 200
            return "bandwidth_stopped" in serving.names()

        eventually(is_stopped, timeout_s=PATIENCE_S, what=lambda: serving.text)
        assert list(home.profiles.glob("*.speeds")) == []
        may_read.touch()
        begins_again = lambda: last(serving.names(), "bandwidth_measure") > serving.names().index("bandwidth_stopped")  # noqa: E731
        eventually(begins_again, timeout_s=PATIENCE_S, what=lambda: serving.text)
        serving.terminate()


def test_it_is_not_begun_where_nothing_may_be_measured(home: Home) -> None:
    with home.serving(tune="off", idle_s="1") as serving:
        serving.wait_ready()
        serving.event("profile_probed", timeout_s=WAIT_S)  # what comes after it
        assert "bandwidth_measure" not in serving.names()
        serving.terminate()
    assert list(home.profiles.glob("*.speeds")) == []


@pytest.mark.usefixtures("may_read")
def test_sigterm_while_it_measures_leaves_nothing(home: Home) -> None:
    with home.serving(tune="idle", idle_s="1") as serving:
        serving.wait_ready()
        serving.event("bandwidth_measure", timeout_s=WAIT_S)
        serving.terminate()
    assert list(home.profiles.glob("*.speeds")) == []
