"""Checks of a profile in idle time, with a fake engine: speculative decoding, needles, and a soak."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from appliance.image_facts import dump_facts, parse_engine_facts
from tests.process.stages.boot import Home, Serving, eventually, write_model
from tests.process.stages.made_once import made_once

QUICK = {"tune": "first", "idle_s": "1", "check_abilities": "off"}
FEW_PLANS = {"threads": "1", "kv_type": "f16", "ubatch": "512"}
FASTER = ("--guess", "ngram-mod:0.1,0.9")  # n-grams gain much
FLAGS = ("--spec-type", "--spec-ngram-mod-n-max", "--spec-ngram-mod-n-min")


def copied(home: Home, folder: Path) -> Home:
    """Return a copy that waits for no quiet moment: other tests work beside this one."""
    found = home.copy(folder)
    found.program = "tests.fakes.never_busy"
    return found


@pytest.fixture(scope="module")
def speculating(tmp_path_factory: pytest.TempPathFactory) -> Home:
    """A home whose profile has speculative decoding."""
    return Home(made_once(tmp_path_factory, "speculating", speculating_home))


def speculating_home(folder: Path) -> Path:
    home = Home.make(folder / "home")
    path = home.folder / "facts/engine_facts.json"
    facts = parse_engine_facts(path.read_text())
    path.write_text(dump_facts(replace(facts, flags=(*facts.flags, *FLAGS))))
    home.set_engine(*FASTER)
    assert home.command("tune", beside=None, budget_s="60", **FEW_PLANS).returncode == 0
    home.calm()
    assert stored(home)["plan"]["speculation"]["kind"] == "ngram"
    return home.folder


def stored(home: Home) -> dict[str, Any]:
    (path,) = home.profiles.glob("*.json")
    found: dict[str, Any] = json.loads(path.read_text())
    return found


def speculates(serving: Serving) -> bool:
    """True if the engine that was started last speculates."""
    return "--spec-type" in serving.home.started[-1]


def test_speculation_that_changes_answers_is_refused_for_good(speculating: Home, tmp_path: Path) -> None:
    home = copied(speculating, tmp_path / "home")
    home.set_engine(*FASTER, "--changes", "0.02")
    with home.serving(**QUICK, **FEW_PLANS) as serving:
        serving.wait_ready()
        assert speculates(serving)
        told = serving.event("speculation_compared")
        assert (told["level"], told["verdict"]) == ("warning", "refused")
        eventually(lambda: not speculates(serving), what=lambda: serving.text)
        serving.event("idle_changed")
        check = serving.document("status")["checks"]["speculation"]
        assert check["differing"] > 6
        assert (check["windows"], check["differing_again"]) == (132, 0)
        choices = {each["name"]: each for each in serving.document("plan")["choices"]}
        assert choices["speculation"]["value"] == "off"
        assert "is refused, since it changes greedy answers" in choices["speculation"]["reason"]
        assert serving.chat()[0] == 200
    with home.serving(**QUICK, **FEW_PLANS) as serving:  # from the profile: without it at once, and not compared again
        serving.wait_ready()
        serving.event("profile_probed")
        assert not speculates(serving)
        assert "speculation_compared" not in serving.names()
    assert "is refused" in home.command("plan", beside=None, **QUICK, **FEW_PLANS).stdout


def test_a_plan_in_its_place_that_does_not_load_is_loaded_once(speculating: Home, tmp_path: Path) -> None:
    """The other comparison does not load it again."""
    home = copied(speculating, tmp_path / "home")
    home.set_engine(*FASTER, "--changes", "0.02")
    engine = home.folder / "engine/llama-server"
    dies = 'case "$said" in *--spec-type*|*m.sock*|--*list*) ;; *) exit 1 ;; esac\n'
    engine.write_text(engine.read_text().replace("case ", f"{dies}case ", 1))
    with home.serving(**QUICK, **FEW_PLANS) as serving:
        serving.wait_ready()
        assert "did not load" in serving.event("idle_failed")["message"]
        serving.event("profile_probed")
        assert sum("m.sock" not in line and "--spec-type" not in line for line in home.started) == 1
        assert serving.chat()[0] == 200


def test_a_comparison_counts_its_loads_and_ends_with_those_of_the_day(speculating: Home, tmp_path: Path) -> None:
    home = copied(speculating, tmp_path / "home")
    home.set_engine(*FASTER)
    few = {**QUICK, **FEW_PLANS, "loads_a_day": "2"}
    for _ in range(2):  # the second start finds the day's loads used up
        with home.serving(**few) as serving:
            serving.wait_ready()
            assert "all 2 engine loads of this day" in serving.event("speculation_open")["message"]
            serving.event("profile_probed")
            assert "speculation_compared" not in serving.names()
            serving.terminate()
        assert sum("m.sock" in line for line in home.started) == 2
    (path,) = home.profiles.glob("*.partial")
    kept = json.loads(path.read_text())
    assert kept["loads"]["count"] == 2
    path.write_text(json.dumps({**kept, "loads": {"day": "2000-01-01", "count": 2}}))
    with home.serving(**few) as serving:
        serving.wait_ready()
        assert serving.event("speculation_compared")["verdict"] == "harmless"
    assert sum("m.sock" in line for line in home.started) == 3


def test_harmless_speculation_stays_on_and_a_request_interrupts_the_check(speculating: Home, tmp_path: Path) -> None:
    home = copied(speculating, tmp_path / "home")
    home.set_engine(*FASTER, "--works-s", "0.01", "--sleeps")
    with home.serving(**QUICK, **FEW_PLANS) as serving:
        serving.wait_ready()
        serving.event("idle_measure")
        eventually(lambda: stored(home)["checks"]["speculation"], what=lambda: serving.text)
        assert serving.chat()[0] == 200
        serving.event("idle_stopped")
        told = serving.event("speculation_compared")
        assert (told["level"], told["verdict"]) == ("info", "harmless")
        answered = [row["name"] for row in stored(home)["checks"]["speculation"]["prompts"]]
        assert len(answered) == len(set(answered)) == 12
        serving.event("profile_probed")
        assert "idle_changed" not in serving.names()


def test_a_context_whose_needles_are_lost_is_told_and_kept(tuned: Home, tmp_path: Path) -> None:
    home = copied(tuned, tmp_path / "home")
    home.set_engine("--recalls", "3000")
    with home.serving(**QUICK) as serving:
        serving.wait_ready()
        serving.event("profile_probed")
        rows = serving.document("status")["checks"]["needles"]
        assert [(row["share"], row["verdict"]) for row in rows] == [(s, "failed") for s in (0.1, 0.5, 0.95)]
        assert serving.names().count("needle") == 3
    with home.serving(**QUICK) as serving:
        serving.wait_ready()
        serving.event("profile_probed")
        assert "needle" not in serving.names()
    assert "this context does not hold" in home.command("plan", beside=None, **QUICK).stdout
    assert json.loads(home.command("plan", "--json", beside=None, **QUICK).stdout)["checks"]["needles"] == rows


def wide(folder: Path, **settings: str) -> Home:
    """Return a home with a profile of a model of 16,384 tokens, whose engine forgets after 9,000 of them."""
    found = Home.make(folder)
    found.program = "tests.fakes.never_busy"
    write_model(found.data / "models/small.gguf", context=16384)
    assert found.command("tune", beside=None, budget_s="60", **FEW_PLANS, **settings).returncode == 0
    found.calm()
    found.set_engine("--recalls", "9000")
    return found


def test_a_smaller_context_that_holds_is_measured_and_serves(tmp_path: Path) -> None:
    home = wide(tmp_path / "home")
    idle = {**QUICK, "tune": "idle", **FEW_PLANS}
    with home.serving(**idle) as serving:
        serving.wait_ready()
        assert serving.document("plan")["context"] == 16384
        assert "8,192 tokens hold" in serving.event("tune_more")["message"]
        serving.event("idle_changed")
        assert serving.document("plan")["context"] == 8192
        choice = next(each for each in serving.document("plan")["choices"] if each["name"] == "context")
        assert choice["reason"] == "chosen since needles were lost in a context of 16,384"
        serving.event("profile_probed")
        rows = serving.document("status")["checks"]["needles"]
        assert [(row["context"], row["verdict"]) for row in rows] == [(8192, "passed")] * 3 + [(16384, "failed")] * 3
        assert serving.names().count("tune_more") == 1
    with home.serving(**idle) as serving:  # at once, and nothing is measured again
        serving.wait_ready()
        assert serving.document("plan")["context"] == 8192
        serving.event("profile_probed")
        assert "tune_more" not in serving.names()
    told = home.command("plan", beside=None, **idle).stdout
    assert "failed at 95%; this context does not hold: 8,192 tokens do" in told


def test_a_context_that_the_user_gave_stays(tmp_path: Path) -> None:
    given = {"ctx_size": "16384"}
    home = wide(tmp_path / "home", **given)
    with home.serving(**{**QUICK, "tune": "idle", **FEW_PLANS, **given}) as serving:
        serving.wait_ready()
        serving.event("profile_probed")
        assert {row["context"] for row in serving.document("status")["checks"]["needles"]} == {16384}
        assert "tune_more" not in serving.names()
        assert serving.document("plan")["context"] == 16384
    assert "use a smaller --ctx-size" in home.command("plan", beside=None, **FEW_PLANS, **given).stdout


def test_a_soak_counts_its_answers_and_ends(tuned: Home, tmp_path: Path) -> None:
    home = copied(tuned, tmp_path / "home")
    with home.serving(**{**QUICK, "soak_s": "2"}) as serving:
        serving.wait_ready()
        told = serving.event("soak")
        assert told["answers"] > 3
        assert told["failed"] == 0
        assert serving.document("status")["checks"]["soak"]["seconds"] == pytest.approx(2, abs=1.5)


def test_a_soak_that_the_engine_does_not_survive_is_told(tuned: Home, tmp_path: Path) -> None:
    home = copied(tuned, tmp_path / "home")
    home.set_engine("--die-on-request", "3")
    with home.serving(**{**QUICK, "soak_s": "600"}) as serving:
        serving.wait_ready()
        told = serving.event("soak")
        assert (told["level"], told["failed"]) == ("warning", 2)
        assert "engine: it ended while it answered" in told["message"]


@pytest.mark.parametrize("setting", [{"check_profile": "off"}, {"tune": "off"}])
def test_a_setting_turns_it_off(tuned: Home, tmp_path: Path, setting: dict[str, str]) -> None:
    home = copied(tuned, tmp_path / "home")
    with home.serving(**{**QUICK, "soak_s": "2", **setting}) as serving:
        serving.wait_ready()
        serving.event("profile_probed")
        assert serving.document("status")["checks"] is None
