"""Checks of a profile in idle time on vLLM, through the same doors: speculative decoding, needles, and a soak."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.process.stages.vllm_home import VllmHome

# Few plans: a search of all would take minutes.
FEW = {"kv_type": "bf16", "engine_arg": "--enforce-eager", "ubatch": "2048"}
QUICK: dict[str, str] = {"tune": "first", "idle_s": "1", "check_abilities": "off", **FEW}
FASTER = ("--fake-decode-ms", "2")
SPECULATES = "--speculative-config"


@pytest.fixture(scope="module")
def tuned(tmp_path_factory: pytest.TempPathFactory) -> Iterator[VllmHome]:
    """A home whose profile has speculative decoding."""
    home = VllmHome.make(tmp_path_factory.mktemp("vllm-checks") / "home")
    home.program = "tests.fakes.never_busy"
    home.always = ("--fake-interval", "0")
    home.set_engine(*FASTER, where=SPECULATES)
    done = home.command("tune", beside=None, budget_s="20", **FEW)
    assert done.returncode == 0, done.stderr
    home.calm()
    yield home
    home.free_segments()


@pytest.fixture
def home(tuned: VllmHome, tmp_path: Path) -> Iterator[VllmHome]:
    home = tuned.copy(tmp_path / "home")
    home.program = tuned.program
    yield home
    home.free_segments()


def test_speculation_that_changes_answers_is_refused(home: VllmHome) -> None:
    home.set_engine(*FASTER, "--fake-changes", "0.02", where=SPECULATES)
    with home.serving(**QUICK) as serving:
        serving.wait_ready()
        assert SPECULATES in home.started[-1]
        told = serving.event("speculation_compared")
        assert (told["level"], told["verdict"]) == ("warning", "refused")
        serving.event("idle_changed")
        assert SPECULATES not in home.started[-1]
        check = serving.document("status")["checks"]["speculation"]
        assert check["differing"] > 6
        assert (check["windows"], check["differing_again"], check["documents"]) == (132, 0, 20)
        assert check["drafted"] > check["accepted"] > 0


def test_needles_and_soak(home: VllmHome) -> None:
    home.set_engine("--fake-recalls", "3000")
    with home.serving(**QUICK, speculation="off", soak_s="2") as serving:
        serving.wait_ready()
        told = serving.event("soak")
        assert (told["failed"], told["answers"] > 3) == (0, True)
        checks = serving.document("status")["checks"]
        assert [(row["context"], row["verdict"]) for row in checks["needles"]] == [(8192, "failed")] * 3
        assert checks["soak"]["answers"] == told["answers"]
