"""An engine that is unlike llama.cpp in all that it may choose goes through the real appliance by its doors."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import signal
import sys
from pathlib import Path

import pytest

from appliance.image_facts import EngineFacts, ImageFacts, dump_facts
from tests.process.stages.boot import ROOT, Home, eventually, write_model

TOYD = ROOT / "tests/fakes/toy/toyd.py"
MEASURING = {"tune_start", "measured"}


class ToyHome(Home):
    program = "tests.fakes.toy"

    @classmethod
    def make(cls, folder: Path) -> ToyHome:
        home = cls(folder)
        for name in ("data/models", "engine", "facts"):
            (folder / name).mkdir(parents=True)
        write_model(home.data / "models/small.gguf")
        image = ImageFacts(
            build_id="t1", cell="toy-cpu", engine="toy", engine_version="1", engine_build=1, engine_commit="abc"
        )
        facts = EngineFacts(version="1", build=1, commit="abc", flags=(), kv_types=("f16",))
        (folder / "facts/image_facts.json").write_text(dump_facts(image))
        (folder / "facts/engine_facts.json").write_text(dump_facts(facts))
        home.set_engine()
        return home

    def set_engine(self, *knobs: str, where: str = "") -> None:
        """`knobs` for starts whose command line holds `where`."""
        run = shlex.join([sys.executable, "-I", "-S", str(TOYD)])
        path = self.folder / "engine/toyd"
        path.write_text(
            f"""#!/bin/sh
printf '%s\\n' "$*" >>{shlex.quote(str(self.starts))}
case "$* " in
*{shlex.quote(where)}*) exec {run} {shlex.join(knobs)} "$@" ;;
*) exec {run} "$@" ;;
esac
"""
        )
        path.chmod(0o755)


@pytest.fixture
def home(tmp_path: Path) -> ToyHome:
    return ToyHome.make(tmp_path / "home")


@pytest.fixture(scope="module")
def tuned(tmp_path_factory: pytest.TempPathFactory) -> ToyHome:
    home = ToyHome.make(tmp_path_factory.mktemp("toy") / "home")
    done = home.command("tune", budget_s="120")
    assert done.returncode == 0, done.stderr
    home.calm()
    return home


def copied(tuned: ToyHome, folder: Path) -> ToyHome:
    shutil.copytree(tuned.folder, folder)
    home = ToyHome(folder)
    home.starts.unlink()
    home.set_engine()
    return home


def test_its_own_knob_is_planned(home: ToyHome) -> None:
    document = json.loads(home.command("plan", "--json").stdout)
    assert document["plan"]["launch"] == {"lanes": 1}
    assert document["plan"]["knobs"] == {"context": 4096, "kv_type": "f16", "lanes": 1, "placement": "CPU"}
    assert "the first to try" in home.command("plan", "--explain").stdout
    assert home.started == []


def test_its_knob_is_tuned_the_profile_kept_and_the_fastest_served(home: ToyHome) -> None:
    with home.serving(tune="first", budget_s="120") as serving:
        serving.wait_ready()
        status, reply = serving.chat()
        assert (status, reply["choices"][0]["message"]["content"]) == (200, "2 lanes")
        shown = serving.document("status")
        assert shown["engine"]["name"] == "toy"
        assert "lanes 2" in shown["chosen"]
        decode = shown["speeds"]["measured"]["at"][0]["decode_tokens_per_s"]
        assert decode == pytest.approx(250)  # 4 ms a token
        assert shown["memory_prediction_error"] == pytest.approx(0.0, abs=0.01)
        serving.terminate()
    (path,) = home.profiles.glob("*.json")
    profile = json.loads(path.read_text())
    assert profile["plan"]["launch"] == {"lanes": 2}
    assert {m["key"] for m in profile["measurements"]} >= {
        f"context 4,096, kv_type f16, lanes {lanes}, placement CPU" for lanes in (1, 2)
    }


def test_the_next_start_serves_from_the_profile_without_measuring(tuned: ToyHome, tmp_path: Path) -> None:
    home = copied(tuned, tmp_path / "home")
    with home.serving(tune="first") as serving:
        serving.wait_ready()
        assert not MEASURING & set(serving.names())
        assert serving.chat()[1]["choices"][0]["message"]["content"] == "2 lanes"
        assert len(home.started) == 1
        assert serving.ask("POST", "/v1/completions", {"prompt": "a"}, key=home.key)[0] == 404  # it has no such route
    assert "lanes 2" in home.command("profiles", "list").stdout


def test_it_is_killed_and_comes_back(tuned: ToyHome, tmp_path: Path) -> None:
    home = copied(tuned, tmp_path / "home")
    with home.serving() as serving:
        serving.wait_ready()
        (pid,) = serving.engine_pids()
        os.kill(pid, signal.SIGKILL)
        eventually(lambda: serving.engine_pids() not in ([], [pid]))
        serving.wait_ready()
        assert serving.chat()[0] == 200
        assert "engine_died" in serving.names()
        assert serving.document("status")["engine_restarts"] == 1
        serving.terminate()


def test_what_it_died_of_is_told_in_its_own_words(home: ToyHome) -> None:
    home.set_engine("ouch=no lanes today")
    with home.serving() as serving:
        assert serving.wait_exit() == 43
        assert "no lanes today" in serving.text


def test_a_plan_that_fails_is_passed_over(home: ToyHome) -> None:
    home.set_engine("ouch=two is one too many", where="lanes=2 ")
    with home.serving(tune="first", budget_s="120") as serving:
        serving.wait_ready()
        assert "two is one too many" in serving.event("tune_failed")["message"]
        assert serving.chat()[1]["choices"][0]["message"]["content"] == "4 lanes"


def test_a_setting_that_means_nothing_to_it_is_refused(home: ToyHome) -> None:
    done = home.command("serve", threads="4")
    assert done.returncode == 10
    assert "setting threads means nothing to the engine toy: '4' (variable APPLIANCE_THREADS)" in done.stderr
    assert home.started == []


def test_an_engine_that_is_not_on_the_path_is_a_sentence(home: ToyHome) -> None:
    home.program = "appliance"
    done = home.command("serve")
    assert done.returncode == 10
    assert "the engine of this image cannot be served yet: toy 1 (toy-cpu)" in done.stderr
