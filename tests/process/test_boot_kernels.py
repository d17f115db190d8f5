"""Starts whose CPU kernels fail: at the check, at load, while measured, while serving. The next variant serves."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.process.stages.boot import Home, Serving, eventually

WAIT_S = 120.0  # a dozen starts of the fake, on a machine that may be busy
# So few plans that all are measured, however long a start takes.
FEW = {"budget_s": "120", "kv_type": "f16", "load_mode": "mmap", "ubatch": "512", "speculation": "off"}
GONE = "llama_model_load_from_file_impl: no backends are loaded. hint: use ggml_backend_load()"


@pytest.fixture
def home(tmp_path: Path) -> Home:
    """Return a home whose image has three variants, which run on any CPU, and a kernel check that passes them all."""
    home = Home.make(tmp_path / "home")
    home.set_variants("x64", "haswell", "zen4")
    home.set_kernel_check()
    return home


def variants(home: Home) -> list[str]:
    """Return the CPU variant of each engine that was started, in order."""
    return [line.rpartition(" GGML_CPU_VARIANT=")[2] for line in home.started]


def kept(home: Home) -> dict[str, Any]:
    (path,) = (home.data / "cache/b1").glob("cpu-kernels-*.json")
    found: dict[str, Any] = json.loads(path.read_text())
    return found


def events(serving: Serving, name: str) -> list[dict[str, Any]]:
    return [event for event in serving.events if event["event"] == name]


def served(home: Home, **settings: str) -> list[dict[str, Any]]:
    """Return the events of one start that answered a chat."""
    with home.serving(tune="off", **settings) as serving:
        serving.wait_ready()
        assert serving.chat()[0] == 200
        said = serving.events
        serving.terminate()
    return said


def choice(home: Home) -> str:
    return next(str(c["reason"]) for c in home.plan()["choices"] if c["name"] == "cpu_variant")


def test_the_chosen_variant_is_checked_once_and_serves(home: Home) -> None:
    said = served(home)
    assert variants(home) == ["zen4"]
    assert home.checked == ["zen4 f32 f16"]
    assert [event["message"] for event in said if event["event"] == "kernels_checked"] == [
        "kernels of zen4 checked in 0.4 s: 24 cases, worst NMSE 9.5e-10"
    ]
    assert served(home) != said
    assert len(home.checked) == 1
    assert kept(home)["checked"]["zen4"]["problem"] is None
    assert "the fastest CPU variant of this image" in choice(home)


def test_a_variant_that_fails_the_check_is_ruled_out_for_this_and_later_starts(home: Home) -> None:
    home.set_kernel_check("--say", "zen4=died:SIGILL", "--say", "haswell=wrong")
    said = served(home)
    told = [event["message"] for event in said if event["event"] == "cpu_variant_ruled_out"]
    assert [words.split(" is ruled out on this CPU: ")[1].split(" (")[0] for words in told] == [
        "the kernel check died of SIGILL",
        "wrong results: NMSE 0.25 against x64, 0.0005 allowed",
    ]
    assert variants(home) == ["x64"]
    said = served(home)
    assert "cpu_variant_ruled_out" not in {event["event"] for event in said}
    assert len(home.checked) == 3
    assert variants(home) == ["x64", "x64"]
    assert "zen4 is ruled out: the kernel check died of SIGILL" in choice(home)


def test_all_ruled_out_ends_with_22_and_what_each_died_of(home: Home) -> None:
    home.set_kernel_check(*(f"--say={name}=died:SIGILL" for name in ("x64", "haswell", "zen4")))
    for _ in range(2):
        with home.serving(tune="off") as serving:
            assert serving.wait_exit() == 22
            assert "zen4: the kernel check died of SIGILL" in serving.text
            assert "x64: the kernel check died of SIGILL" in serving.text
            assert "cpu-kernels-" in serving.text.split("hint: ")[-1]
    assert home.started == []
    assert len(home.checked) == 3


@pytest.mark.parametrize("knobs", [("--sigill-before-ready",), ("--error-line", GONE, "--die-before-ready", "1")])
def test_a_variant_that_dies_as_it_loads_is_ruled_out(home: Home, knobs: tuple[str, ...]) -> None:
    home.set_engine(*knobs, where=" GGML_CPU_VARIANT=zen4 ")
    with home.serving(tune="off") as serving:
        serving.wait_ready()
        status, answer = serving.chat()
        assert status == 200, (answer, serving.text)
        (told,) = events(serving, "cpu_variant_ruled_out")
        assert ("SIGILL" in told["message"]) is ("--sigill-before-ready" in knobs)
        assert serving.document("plan")["cpu_variant"] == "haswell"
        assert serving.names().count("ready") == 1
        serving.terminate()
    assert variants(home) == ["zen4", "haswell"]
    served(home)
    assert variants(home)[2:] == ["haswell"]


def test_one_that_dies_while_it_is_measured_is_ruled_out_and_the_next_is_measured(home: Home) -> None:
    home.set_engine("--sigill-before-ready", where=" GGML_CPU_VARIANT=zen4 ")
    with home.serving(tune="first", **FEW) as serving:
        serving.event("tuned", timeout_s=WAIT_S)
        serving.wait_ready()
        assert len(events(serving, "cpu_variant_ruled_out")) == 1
        assert serving.document("profile")["key"]["parts"]["cpu_variant"] == "haswell"
        serving.terminate()
    assert variants(home)[0] == "zen4"
    # x64 is the next fastest then, and measured beside it.
    assert set(variants(home)[1:]) == {"haswell", "x64"}, (variants(home), serving.text)


def test_the_verb_that_measures_goes_on_with_the_next_variant(home: Home) -> None:
    home.set_engine("--sigill-before-ready", where=" GGML_CPU_VARIANT=zen4 ")
    done = home.command("tune", beside=None, **FEW)
    assert done.returncode == 0, done.stderr
    assert set(variants(home)[1:]) == {"haswell", "x64"}


def test_the_next_fastest_is_measured_beside_the_usual_and_serves_where_it_is_faster(home: Home) -> None:
    """Newer instructions can be slower: a CPU may lower its clock for them, or have half of the units."""
    home.set_variants("haswell", "zen4")
    home.set_engine("--decode-ms", "20", "--prefill-ms", "8", where=" GGML_CPU_VARIANT=zen4 ")
    done = home.command("tune", beside=None, **FEW)
    assert done.returncode == 0, done.stderr
    assert set(variants(home)) == {"zen4", "haswell"}
    assert [line.split()[0] for line in home.checked] == ["zen4", "haswell"]
    home.starts.unlink()
    said = served(home, **FEW)
    assert variants(home) == ["haswell"]
    assert len(home.checked) == 2
    (said_of,) = (c for c in home.plan(**FEW)["choices"] if c["name"] == "cpu_variant")
    assert (said_of["value"], said_of["source"]) == ("haswell", "measured")
    assert not [event for event in said if event["event"] == "cpu_variant_ruled_out"]


def test_the_next_fastest_that_computes_wrongly_is_not_measured(home: Home) -> None:
    home.set_variants("haswell", "zen4")
    home.set_kernel_check("--say", "haswell=wrong")
    done = home.command("tune", beside=None, **FEW)
    assert done.returncode == 0, done.stderr
    assert set(variants(home)) == {"zen4"}
    assert list(kept(home)["ruled_out"]) == ["haswell"]
    assert variants(home)[0] == "zen4"
    assert served(home, **FEW)
    assert set(variants(home)) == {"zen4"}


def test_the_next_fastest_that_dies_while_it_is_measured_is_ruled_out_alone(home: Home) -> None:
    home.set_variants("haswell", "zen4")
    home.set_engine("--sigill-before-ready", where=" GGML_CPU_VARIANT=haswell ")
    done = home.command("tune", beside=None, **FEW)
    assert done.returncode == 0, done.stderr
    assert list(kept(home)["ruled_out"]) == ["haswell"]
    home.starts.unlink()
    assert served(home, **FEW)
    assert variants(home) == ["zen4"]


def test_what_was_measured_as_the_next_fastest_and_is_ruled_out_serves_with_the_usual(home: Home) -> None:
    home.set_variants("haswell", "zen4")
    home.set_engine("--decode-ms", "20", "--prefill-ms", "8", where=" GGML_CPU_VARIANT=zen4 ")
    assert home.command("tune", beside=None, **FEW).returncode == 0
    home.starts.unlink()
    home.set_engine("--sigill-before-ready", where=" GGML_CPU_VARIANT=haswell ")
    assert served(home, **FEW)
    assert variants(home) == ["haswell", "zen4"]


def test_one_that_dies_while_serving_is_replaced_without_an_end(home: Home) -> None:
    home.set_engine("--sigill-on-request", where=" GGML_CPU_VARIANT=zen4 ")
    with home.serving(tune="off") as serving:
        serving.wait_ready()
        assert serving.chat()[0] != 200
        serving.event("cpu_variant_ruled_out")
        is_back = lambda: serving.names().count("ready") == 2 and serving.chat()[0] == 200  # noqa: E731
        eventually(is_back, what=lambda: serving.text)
        assert serving.document("plan")["cpu_variant"] == "haswell"
        assert "SIGILL" in events(serving, "engine_died")[0]["message"]
        assert variants(home) == ["zen4", "haswell"]  # and not six times the same
        assert serving.document("status")["phase"] == "ready"
        serving.terminate()


def test_one_that_dies_while_it_is_measured_in_idle_time_gives_way_to_the_next(home: Home) -> None:
    """The engine serves, and dies only in a trial. The next variant takes over, and is measured."""
    home.set_engine("--sigill-before-ready", where="WHERE")
    script = home.folder / "engine/llama-server"
    script.write_text(script.read_text().replace("*WHERE*", "*m.sock*=zen4*"))
    with home.serving(tune="idle", idle_s="1", speculation="off") as serving:
        serving.wait_ready()
        serving.measure_now()
        serving.event("cpu_variant_ruled_out", timeout_s=WAIT_S)
        # The others that this machine works for may have it wait again, with the next variant.
        serving.measure_now()
        serving.event("tuned", timeout_s=WAIT_S)
        eventually(lambda: serving.chat()[0] == 200, what=lambda: serving.text)
        assert serving.document("plan")["cpu_variant"] == "haswell"
        assert serving.document("profile")["key"]["parts"]["cpu_variant"] == "haswell"
        serving.terminate()


def test_what_is_told_of_speeds_is_current_where_the_plan_that_served_was_the_best(home: Home) -> None:
    """The second kernel variant is looked at only when measuring begins. Plans name their variant from then on."""
    home.set_variants("haswell", "zen4")
    home.set_engine("--decode-ms", "20", "--prefill-ms", "8", where=" GGML_CPU_VARIANT=haswell ")
    with home.serving(tune="idle", idle_s="3600", threads="1", **FEW) as serving:
        serving.wait_ready()
        told = {"speed": None, "from_profile": False, "measured_since_start": False}
        before = serving.document("status")
        assert {name: before[name] for name in told} == told
        assert before["predicted_speed"]
        begin = partial(serving.ask, "POST", "/appliance/v1/tuning", key=home.key)
        eventually(lambda: begin()[0] == 200, timeout_s=WAIT_S, what=lambda: serving.text)
        assert "idle_changed" not in serving.names()
        status, profile, plan = (serving.document(name) for name in ("status", "profile", "plan"))
        assert (status["tuning"], status["from_profile"], status["measured_since_start"]) == ("measured", True, True)
        assert plan["key"].endswith(", cpu_variant zen4")
        assert status["speeds"]["measured"]["plan"] == plan["key"]
        assert profile["speed"] == status["speed"]
        assert profile["speeds"] == status["speeds"]
        assert status["speed"].startswith("decodes ")
        serving.terminate()


def test_what_is_told_of_speeds_where_the_best_plan_does_not_load(home: Home) -> None:
    """The plan that keeps serving was measured under another name, and is not the best."""
    home.set_variants("haswell", "zen4")
    home.set_engine("--decode-ms", "20", "--prefill-ms", "8", where=" GGML_CPU_VARIANT=zen4 ")
    script = home.folder / "engine/llama-server"  # on every socket but that of trials
    dies = 'case "$said" in *m.sock*) ;; *=haswell*) exit 1 ;; esac\ncase "$said " in'
    script.write_text(script.read_text().replace('case "$said " in', dies))
    with home.serving(tune="idle", idle_s="3600", threads="1", **FEW) as serving:
        serving.wait_ready()
        begin = partial(serving.ask, "POST", "/appliance/v1/tuning", key=home.key)
        eventually(lambda: begin()[0] == 200, timeout_s=WAIT_S, what=lambda: serving.text)
        status, tuning = serving.document("status"), serving.document("tuning")
        assert "another plan serves: the best plan did not load" in tuning["message"]
        assert status["from_profile"] is True
        (first, *_) = status["speeds"]["measured"]["at"]
        assert 30 < first["decode_tokens_per_s"] < 50, "zen4's, which takes 20 ms a token here"
        assert serving.document("profile")["speed"] == status["speed"]
        serving.terminate()


def test_the_last_variant_that_dies_while_serving_ends_it(home: Home) -> None:
    home.set_variants("x64")
    home.set_engine("--sigill-on-request")
    with home.serving(tune="off") as serving:
        serving.wait_ready()
        assert serving.chat()[0] != 200
        assert serving.wait_exit() == 22
        assert "x64: the engine was killed by SIGILL" in serving.text


def test_one_that_was_asked_for_and_dies_is_10(home: Home) -> None:
    home.set_engine("--sigill-before-ready", where=" GGML_CPU_VARIANT=haswell ")
    with home.serving(tune="off", cpu_variant="haswell") as serving:
        assert serving.wait_exit() == 10
        assert "this CPU runs x64, zen4" in serving.text.split("hint: ")[-1]
    assert variants(home) == ["haswell"]


@pytest.mark.parametrize(
    ("knobs", "words"),
    [
        (
            ("--exit", "2"),
            "kernel-check ended with 2 without a report of this variant: fake_kernel_check: asked to fail",
        ),
        (("--garbage",), "kernel-check ended with 0 without a report of this variant: it printed nothing"),
        (("--say", "zen4=died:SIGKILL"), "the kernel check was ended by SIGKILL"),
    ],
)
def test_a_check_that_fails_itself_is_said_at_every_start_and_run_at_one(
    home: Home, knobs: tuple[str, ...], words: str
) -> None:
    home.set_kernel_check(*knobs)
    for _ in range(2):
        said = [event for event in served(home) if event["event"] == "kernels_not_checked"]
        assert [event["level"] for event in said] == ["warning"]
        assert f"the kernels of zen4 are not checked: {words}" in said[0]["message"]
    assert len(home.checked) == 1
    assert variants(home) == ["zen4", "zen4"]


def test_an_image_without_a_check_is_said(home: Home) -> None:
    (home.folder / "engine/kernel-check").unlink()
    said = [event["message"] for event in served(home) if event["event"] == "kernels_not_checked"]
    assert said == ["the kernels of zen4 are not checked: this image has no kernel-check"]


def test_what_is_remembered_of_another_build_or_cpu_is_ignored_and_garbage_set_aside(home: Home) -> None:
    served(home)
    folder = home.data / "cache/b1"
    (path,) = folder.glob("cpu-kernels-*.json")
    document = json.loads(path.read_text())
    ruled_out = {"ruled_out": {"zen4": "it died elsewhere"}}
    for other in ({"build": "b0"}, {"cpu": {**document["cpu"], "stepping": "0"}}):
        path.write_text(json.dumps({**document, **ruled_out, **other}))
        assert "zen4 is ruled out" not in choice(home)
    path.write_text("garbage")
    said = served(home)
    assert [event["level"] for event in said if event["event"] == "kernels_unknown"] == ["warning"]
    assert [each.name for each in folder.glob("*.corrupt")] == [path.with_suffix(".corrupt").name]
    assert set(variants(home)) == {"zen4"}


def test_a_stop_during_the_check_is_obeyed(home: Home) -> None:
    home.set_kernel_check("--hang")
    with home.serving(tune="off") as serving:
        eventually(lambda: home.checked, what=lambda: serving.text)
        serving.event("listening")
        serving.terminate()
    assert home.started == []


def test_doctor_runs_every_variant_and_ends_with_what_is_wrong(home: Home) -> None:
    home.set_kernel_check("--say", "haswell=wrong")
    done = home.command("doctor", "--kernels", "--json")
    checks = {check["name"]: check for check in json.loads(done.stdout)["checks"]}
    assert {name: checks[f"kernels {name}"]["status"] for name in ("x64", "haswell", "zen4")} == {
        "x64": "pass",
        "haswell": "fail",
        "zen4": "pass",
    }
    assert "NMSE 0.25 against x64" in checks["kernels haswell"]["value"]
    assert "the next variant serves" in checks["kernels haswell"]["remedy"]
    assert checks["kernels haswell"]["exit_code"] == 22
    assert home.checked == ["x64,haswell,zen4 f32 f16"]
    assert kept(home)["ruled_out"].keys() == {"haswell"}
    assert "kernels: zen4; ruled out: haswell" in json.dumps(json.loads(home.command("doctor", "--json").stdout))
    assert len(home.checked) == 1  # only when it is asked for
