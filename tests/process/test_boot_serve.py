from __future__ import annotations

import json
import signal
import socket
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

import pytest

from tests.ports import free_port
from tests.process.stages.boot import Home, eventually, is_alive

MEASURING = {"tune_start", "tune_step", "tune_measured", "tuned"}


@pytest.fixture
def home(tmp_path: Path) -> Home:
    return Home.make(tmp_path / "home")


@pytest.fixture
def known(tuned: Home, tmp_path: Path) -> Home:
    return tuned.copy(tmp_path / "home")


def profile_of(home: Home) -> dict[str, Any]:
    (path,) = home.profiles.glob("*.json")
    document: dict[str, Any] = json.loads(path.read_text())
    return document


def key_of(plan: dict[str, Any]) -> str:
    """Return the key by which measurements name this plan, which is on the CPU."""
    launch = plan["launch"]
    numbers = f"context {plan['context']:,}, kv_type {plan['kv_type']}, threads {launch['threads']}"
    return f"{numbers}, ubatch {launch['ubatch']:,}, load_mode {launch['load_mode']}, placement CPU"


def change(home: Home, alter: Callable[[dict[str, Any]], None]) -> None:
    """Alter the document of the only profile on the volume."""
    (path,) = home.profiles.glob("*.json")
    document = json.loads(path.read_text())
    alter(document)
    path.write_text(json.dumps(document))


def test_the_first_start_measures_and_serves_the_fastest_plan(home: Home) -> None:
    predicted = home.plan()["launch"]["threads"]
    fast = max(1, predicted - 1)  # the search tries it even on a machine with one CPU
    knobs = ("--decode-ms", f"{fast}:5,20", "--prefill-ms", "256:1,8")
    may_load = home.folder / "may-load"
    home.set_engine(*knobs, "--load-until", str(may_load))
    with home.serving(tune="first", budget_s="600", kv_type="f16", load_mode="mmap") as serving:
        serving.event("listening")
        assert serving.ask("GET", "/health/live") == (200, {"status": "live"})
        eventually(lambda: serving.ask("GET", "/health/ready")[1]["phase"] == "tuning", what=lambda: serving.text)
        assert serving.ask("GET", "/health/ready")[0] == 503
        status, document = serving.chat()
        assert (status, document["error"]["code"]) == (503, "model_loading")

        may_load.touch()
        serving.event("tuned", timeout_s=120)
        serving.wait_ready()
        measured = serving.names().count("tune_measured")
        status, document = serving.chat()
        assert (status, document["choices"][0]["message"]["content"]) == (200, "hello there")
        assert serving.ask("POST", "/v1/chat/completions", {}, key="sk-wrong")[0] == 401
        assert serving.ask("POST", "/v1/chat/completions", {})[0] == 401

        plan = serving.document("plan")
        assert (plan["launch"]["threads"], plan["launch"]["ubatch"], plan["context"]) == (fast, 256, 4096)
        assert plan["head"]["context"].startswith("4,096 tokens, the model's native length, KV cache ")
        assert plan["head"]["speed"].startswith("decodes ")
        assert f"--threads {fast} " in plan["head"]["command"]
        found = serving.document("status")
        assert (found["from_profile"], found["measured_since_start"]) == (True, True)
        ready = serving.event("ready")
        sizes = {"model": 92.1, "kv": 90.0, "compute": 17.51, "output": 0.75}
        assert {name: ready["allocated_mib"][name] for name in sizes} == sizes
        serving.terminate()
    assert f"--threads {fast} " in home.started[-1]
    assert "--ubatch-size 256 " in home.started[-1]
    assert all("--fit off" in line for line in home.started)
    profile = profile_of(home)
    assert (profile["plan"]["launch"]["threads"], profile["plan"]["launch"]["ubatch"]) == (fast, 256)
    assert len(profile["measurements"]) == measured > 2
    (*_, chosen) = (m for m in profile["measurements"] if m["key"] == key_of(profile["plan"]) and m["is_long"])
    empty, work, deep = (p["depth"] for p in chosen["points"])
    assert (empty, work) == (32, 640)
    assert deep > 960
    assert chosen["points"][0]["decode_ms"] == pytest.approx(5 * (1 + 32 / 2048))
    assert [p["prefill_tokens"] for p in chosen["points"]] == [32, 608, deep - 640]  # what was cached is not read again
    assert all(m["conditions"]["interval_s"] > 0 for m in profile["measurements"])
    assert profile["allocated"]["kv"] == 90.0
    assert list(home.profiles.glob("*.partial")) == []


def test_the_list_of_models_is_there_before_the_model_is(home: Home) -> None:
    may_load = home.folder / "may-load"
    home.set_engine("--load-until", str(may_load))
    with home.serving(alias="mine") as serving:
        serving.event("listening")
        status, listed = serving.ask("GET", "/v1/models", key=home.key)
        assert (status, listed["object"]) == (200, "list")
        (model,) = listed["data"]
        assert (model["id"], model["object"], model["owned_by"]) == ("mine", "model", "appliance")
        assert model["state"] in ("starting", "loading")
        assert "loaded_context_length" not in model
        assert model["max_context_length"] == model["meta"]["n_ctx_train"] > 0
        assert serving.ask("GET", "/models", key=home.key)[0] == 200
        assert serving.ask("GET", "/v1/models")[0] == 401
        assert serving.chat()[0] == 503
        may_load.touch()
        serving.wait_ready()
        (model,) = serving.ask("GET", "/v1/models", key=home.key)[1]["data"]
        context = serving.document("status")["context"]
        assert (model["id"], model["state"]) == ("mine", "ready")
        assert model["context_length"] == model["max_model_len"] == model["meta"]["n_ctx"] == context
        for name in ("mine", *model["aliases"]):
            status, one = serving.ask("GET", f"/v1/models/{name}", key=home.key)
            assert (status, one) == (200, model)
        assert serving.ask("GET", "/v1/models/other", key=home.key)[1]["error"]["code"] == "model_not_found"


def test_what_the_first_token_does_not_need_is_imported_after_it(known: Home) -> None:
    with known.serving() as serving:
        serving.wait_ready()
        assert serving.chat()[0] == 200
        slow = ("fastapi", "pydantic", "aiohttp", "prometheus_client")
        maps = Path(f"/proc/{serving.process.pid}/maps").read_text()
        assert not [name for name in slow if f"/{name}" in maps]
        # A status and a scrape, which the host's `status` asks for, may be the first requests of all.
        assert serving.document("status")["phase"] == "ready"
        request = Request(f"http://127.0.0.1:{serving.port}/metrics", headers={"Authorization": f"Bearer {known.key}"})
        with urlopen(request, timeout=60) as scraped:
            assert "appliance_requests_in_flight 0.0" in scraped.read().decode()
        assert "pydantic_core" not in Path(f"/proc/{serving.process.pid}/maps").read_text()
        assert serving.ask("GET", "/nowhere", key=known.key)[0] == 404
        assert "pydantic_core" in Path(f"/proc/{serving.process.pid}/maps").read_text()


def test_the_second_start_serves_from_the_profile_without_measuring(known: Home, tuned: Home) -> None:
    """The model is in another folder: its path is no part of the profile."""
    with known.serving() as serving:
        serving.wait_ready()
        assert serving.chat()[0] == 200
        names = serving.names()
        assert not MEASURING & set(names)
        assert names.index("profile_used") < names.index("engine_start") < names.index("listening")
        requests = serving.engine_requests()
        assert not {"POST /tokenize", "POST /completion"} & set(requests)
        found = serving.document("status")
        assert (found["from_profile"], found["measured_since_start"]) == (True, False)
        assert serving.document("profile")["key"]["id"] == profile_of(tuned)["key"]["id"]
        serving.terminate()
    assert len(known.started) == 1
    assert str(known.data / "models/small.gguf") in known.started[0]


def test_a_changed_setting_is_named_and_measured_anew(known: Home) -> None:
    with known.serving(tune="first", ctx_size="2048") as serving:
        assert "settings.ctx_size: None -> 2048" in serving.event("profile_unused")["message"]
        serving.event("tuned")
        serving.wait_ready()
        assert serving.document("plan")["context"] == 2048
    assert len(list(known.profiles.glob("*.json"))) == 2


def test_a_corrupt_profile_is_set_aside_and_measured_anew(known: Home) -> None:
    (path,) = known.profiles.glob("*.json")
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    with known.serving(tune="first") as serving:
        assert f"{path.stem}.corrupt" in serving.event("profile_set_aside")["message"]
        serving.event("tuned")
        serving.wait_ready()
    assert path.with_suffix(".corrupt").read_bytes() == whole[: len(whole) // 2]
    assert profile_of(known)["key"] == json.loads(whole)["key"]


def test_while_another_measures_on_this_volume_a_start_serves_at_once_and_the_next_one_from_its_profile(
    home: Home,
) -> None:
    home.set_engine("--load-seconds", "600")
    with home.serving(tune="first") as one:
        eventually(lambda: home.started)
        home.set_engine()
        with home.serving(tune="first") as other:
            other.wait_ready()
            assert other.chat()[0] == 200
            assert "serving the prediction" in other.event("tune_elsewhere")["message"]
            assert not MEASURING & set(other.names())
            assert other.document("status")["from_profile"] is False
            one.terminate()
            assert home.command("tune").returncode == 0
            assert other.chat()[0] == 200
            other.terminate()
    home.calm()
    with home.serving(tune="first") as again:
        again.wait_ready()
        assert again.event("profile_used")["profile"] == profile_of(home)["key"]["id"]
        assert not MEASURING & set(again.names())


def test_of_two_starts_on_one_volume_one_measures_and_the_other_serves_the_prediction_meanwhile(home: Home) -> None:
    predicted = home.plan()
    slow_at = predicted["launch"]["threads"]
    home.set_engine("--decode-ms", f"{slow_at}:50,5", "--load-seconds", "0.5")  # so that plans differ
    with home.serving(tune="first", budget_s="60") as one:  # longer than the other's start takes on a busy machine
        one.event("tune_step")
        with home.serving(tune="first") as other:
            assert "its profile at the next start" in other.event("tune_elsewhere")["message"]
            other.wait_ready()
            assert other.chat()[0] == 200
            assert other.document("plan")["launch"]["threads"] == predicted["launch"]["threads"]
            assert other.document("profile") == {}
            assert not (MEASURING | {"profile_used"}) & set(other.names())
            other.terminate()
        one.event("tuned", timeout_s=120)
        one.wait_ready()
        assert one.chat()[0] == 200
        home.calm()
        with home.serving(tune="first") as third:
            third.event("profile_used")
            third.wait_ready()
            assert not MEASURING & set(third.names())
            served = third.document("plan")
            assert key_of(served) == key_of(one.document("plan")) != key_of(predicted)


def test_the_verb_tune_does_not_measure_beside_another(home: Home) -> None:
    home.set_engine("--load-seconds", "600")
    with home.serving(tune="first") as serving:
        serving.event("tune_step")
        done = home.command("tune")
        assert done.returncode == 10
        assert "another container on this volume is measuring" in done.stderr
        serving.terminate()


def test_the_caches_follow_the_memory_of_this_start_and_what_was_measured_stays(known: Home) -> None:
    before = profile_of(known)

    def shrink(document: dict[str, Any]) -> None:
        for plan in (document["plan"], *document["plans"]):  # as if little memory had been free when it was measured
            plan["launch"]["cache_ram_mib"] = 1
            plan["memory"]["cache"] = 1.0

    change(known, shrink)
    with known.serving() as serving:
        serving.wait_ready()
        assert not MEASURING & set(serving.names())
        plan = serving.document("plan")
        assert plan["launch"]["cache_ram_mib"] >= 128
        assert key_of(plan) == key_of(before["plan"])


def test_the_best_that_fits_now_is_served_and_what_the_better_one_lacks_is_said(known: Home) -> None:
    before = profile_of(known)
    assert len(before["plans"]) > 1

    def swell(document: dict[str, Any]) -> None:
        for plan in (document["plan"], *document["plans"]):
            if key_of(plan) == key_of(before["plan"]):
                plan["memory"]["compute"] += 1e9
        for look in document["measurements"]:
            for point in look["points"]:
                point["decode_ms"] = 40.0 if look["key"] == key_of(before["plan"]) else 50.0

    change(known, swell)
    with known.serving() as serving:
        said = serving.event("plan_passed_over")
        assert said["level"] == "warning"
        assert said["message"].startswith(f"{key_of(before['plan'])}: it needs 1,000,0")
        picked = serving.event("plan_picked")["message"]
        serving.wait_ready()
        plan = serving.document("plan")
        assert key_of(plan) != key_of(before["plan"])
        assert f"serving {key_of(plan)}: " in picked
        status = serving.document("status")
        measured = status["speeds"]["measured"]
        assert measured["plan"] == status["speeds"]["predicted"]["plan"] == key_of(plan)
        assert {round(at["decode_tokens_per_s"], 9) for at in measured["at"]} == {20.0}
        assert status["speed"].startswith("decodes 20.0 tok/s at 32 tokens of context")
        assert not MEASURING & set(serving.names())
    assert key_of(json.loads(known.command("plan", "--json").stdout)["plan"]) == key_of(plan)


def test_where_nothing_that_was_measured_fits_the_prediction_is_served(known: Home) -> None:
    def swell(document: dict[str, Any]) -> None:
        for plan in (document["plan"], *document["plans"]):
            plan["memory"]["compute"] += 1e9

    change(known, swell)
    with known.serving() as serving:
        assert "serving the prediction" in serving.event("plan_predicted")["message"]
        serving.wait_ready()
        assert serving.chat()[0] == 200
        assert not MEASURING & set(serving.names())


def test_another_mode_is_served_from_the_same_profile(known: Home) -> None:
    with known.serving(mode="speed") as serving:
        said = serving.event("plan_picked")
        assert said["mode"] == "speed"
        assert "; chosen among what was measured for mode 'balanced'" in said["message"]
        serving.wait_ready()
        assert "profile_used" in serving.names()
        assert not MEASURING & set(serving.names())
    assert len(list(known.profiles.glob("*.json"))) == 1


def test_an_engine_that_hangs_while_it_is_measured_is_given_up(home: Home) -> None:
    home.set_engine("--hang-on-completion")
    with home.serving(tune="first", stall_timeout_s="2", budget_s="5") as serving:
        assert serving.wait_exit() == 43
        assert "made no progress for 2 s while it was measured" in serving.text


def test_a_refusal_is_said_and_not_fatal(known: Home) -> None:
    with known.serving(threads="4096", tune="off") as serving:
        assert "held at what this container may use" in serving.event("not_as_asked")["message"]
        serving.wait_ready()


def test_health_finds_a_gateway_that_flags_moved(known: Home) -> None:
    with known.serving(tune="off") as serving:
        serving.wait_ready()
        done = known.command("health", beside=serving, port="1")
        assert done.returncode == 0, done.stderr


def test_a_port_that_is_taken_is_10_and_leaves_no_engine(known: Home) -> None:
    with socket.socket() as listener:
        port = free_port()
        listener.bind(("127.0.0.1", port))
        listener.listen()
        with known.serving(port=str(port)) as serving:
            assert serving.wait_exit() == 10
            assert f"cannot listen on port {port}" in serving.text
            assert "APPLIANCE_PORT" in serving.text
            assert serving.engine_pids() == []


def test_sigterm_while_measuring_ends_it_and_leaves_no_profile(home: Home) -> None:
    home.set_engine("--load-seconds", "600", "--ignore-sigterm")
    with home.serving(tune="first") as serving:
        serving.event("tune_step")
        eventually(serving.engine_pids)
        serving.terminate()
    assert list(home.profiles.glob("*.json")) == []


def is_measurement_kept(home: Home) -> bool:
    return any(json.loads(path.read_text())["measurements"] for path in home.profiles.glob("*.partial"))


def test_what_was_interrupted_goes_on_at_the_next_start(home: Home) -> None:
    home.set_engine("--load-seconds", "0.5")
    with home.serving(tune="first") as serving:
        serving.event("tune_measured")
        eventually(lambda: is_measurement_kept(home))
        serving.process.kill()
    (partial,) = home.profiles.glob("*.partial")
    kept = json.loads(partial.read_text())["measurements"]
    home.set_engine()
    with home.serving(tune="first") as serving:
        words = f"{len(kept)} measurements are kept from an interrupted start"
        assert words in serving.event("tune_start")["message"]
        serving.event("tuned")
        serving.wait_ready()
    assert profile_of(home)["measurements"][: len(kept)] == kept
    assert not partial.exists()


def test_sigterm_in_mid_stream_ends_it_with_an_error_event(known: Home) -> None:
    """Two things hold the end up: a client that stays, and an engine that ignores SIGTERM."""
    known.set_engine("--chunks", "100000", "--chunk-interval", "0.02", "--hold-streams", "--ignore-sigterm")
    with known.serving() as serving:
        serving.wait_ready()
        with serving.stream() as connection:
            received = connection.recv(65536)
            assert b"200 OK" in received
            began = time.monotonic()
            serving.process.send_signal(signal.SIGTERM)
            while data := connection.recv(65536):
                received += data
        assert serving.wait_exit() == 0
        assert time.monotonic() - began < 90  # the stream has 2,000 s more to say
        assert b'data: {"error"' in received.replace(b"\r\n", b"\n")
        assert serving.engine_pids() == []
        assert {"stopping", "stopped"} <= set(serving.names())


def test_control_sequences_of_an_engines_log_are_shown_as_words(home: Home) -> None:
    home.set_engine("--die-before-ready", "1", "--error-line", "error: \x1b[2J\x1b]0;title\x07 of a model")
    with home.serving(tune="off") as serving:
        assert serving.wait_exit() == 43
        text = serving.text
    assert r"error: \x1b[2J\x1b]0;title\x07 of a model" in text
    assert "\x1b" not in text


@pytest.mark.parametrize("tune", ["first", "off"])
@pytest.mark.parametrize(
    ("words", "code"),
    [
        ("error loading model: tensor 'blk.0' has wrong shape", 30),
        ("error: something that nobody has seen before", 43),
        ("error while loading shared libraries: libgomp.so.1: cannot open shared object file", 44),
        ("error: invalid argument: --ubatch-sise", 40),
        ("ggml_backend_cpu_buffer_type_alloc_buffer: failed to allocate buffer of size 99", 42),
    ],
)
def test_an_engine_that_dies_before_it_is_ready_ends_the_start_with_its_log(
    home: Home, tune: str, words: str, code: int
) -> None:
    home.set_engine("--die-before-ready", "1", "--error-line", words)
    with home.serving(tune=tune, budget_s="5") as serving:
        assert serving.wait_exit() == code
        text = serving.text

    assert any(line.startswith("  | ") and words in line for line in text.splitlines())
    assert "error: engine llama-server exited with code 1 before it was ready" in text
    assert "\nhint: " in text
    if code in (30, 40, 44) or (tune == "off" and code != 42):
        assert len(home.started) == 1  # no other plan would mend it


def test_an_engine_that_stalls_is_43_whatever_it_said_before(home: Home) -> None:
    home.set_engine("--load-seconds", "600", "--error-line", "unable to allocate a huge page, going on without")
    with home.serving(tune="off", stall_timeout_s="1") as serving:
        assert serving.wait_exit() == 43
        assert "made no progress" in serving.text.split("error: ")[-1]


def test_an_engine_that_is_not_there_is_said(home: Home) -> None:
    (home.folder / "engine/llama-server").unlink()
    with home.serving(tune="first") as serving:
        assert serving.wait_exit() == 43
        assert "the engine cannot be started" in serving.text


def test_an_engine_that_dies_while_it_is_measured_is_told_by_its_cause(home: Home) -> None:
    home.set_engine("--die-on-request")
    with home.serving(tune="first", budget_s="5") as serving:
        assert serving.wait_exit() == 45
        assert (
            "fake engine was asked to die" in next(e for e in serving.events if e["event"] == "tune_failed")["message"]
        )
        assert "error: engine llama-server exited with code 1 while serving" in serving.text


def test_a_plan_that_fails_while_measuring_is_skipped_with_a_warning(home: Home) -> None:
    predicted = home.plan()
    bad = ("--die-before-ready", "1", "--error-line", "the first plan does not work")
    home.set_engine(*bad, where=f"--ubatch-size {predicted['launch']['ubatch']} ")
    with home.serving(tune="first", budget_s="30", kv_type="f16", load_mode="mmap", speculation="off") as serving:
        failed = serving.event("tune_failed")
        assert failed["level"] == "warning"
        assert "the first plan does not work" in failed["message"]
        serving.wait_ready()
        assert serving.chat()[0] == 200
    profile = profile_of(home)
    assert profile["plan"]["launch"]["ubatch"] != predicted["launch"]["ubatch"]
    assert any(m["error"] for m in profile["measurements"])


def test_an_engine_that_dies_while_serving_comes_back_five_times(home: Home) -> None:
    home.set_engine("--die-on-request")

    def has_restarted(times: int) -> bool:
        status, document = serving.ask("GET", "/appliance/v1/status", key=home.key)
        return status == 200 and document["engine_restarts"] == times and document["phase"] == "ready"

    with home.serving(tune="off") as serving:
        serving.wait_ready()
        for times in range(1, 6):
            assert serving.chat()[0] in (502, 503)
            eventually(partial(has_restarted, times))
        serving.chat()
        assert serving.wait_exit() == 45
        died = [event for event in serving.events if event["event"] == "engine_died"]
        assert len(died) >= 5
        assert any("fake engine was asked to die" in line for line in died[0]["log"])
        assert (died[0]["exit_code"], bool(died[0]["hint"])) == (45, True)
        assert "fake engine was asked to die" in serving.text.split("error: ")[-1]
        assert serving.engine_pids() == []
    assert len(home.started) == 6


def test_tuning_off_serves_the_prediction_and_keeps_no_profile(home: Home) -> None:
    predicted = home.plan()
    with home.serving(tune="off") as serving:
        serving.wait_ready()
        assert "tune_off" in serving.names()
        assert not MEASURING & set(serving.names())
        plan = serving.document("plan")
        assert plan["knobs"] == predicted["knobs"]
        assert serving.document("profile") == {}
    assert list(home.profiles.glob("*.json")) == []


def test_the_verb_tune_measures_again_and_ends(known: Home) -> None:
    before = profile_of(known)
    # On a busy machine the new measurement is disturbed, and may replace only a disturbed one.
    change(known, lambda document: document.update(disturbance="made up"))
    known.set_engine("--decode-ms", "1")
    done = known.command("tune")
    assert done.returncode == 0, done.stderr
    after = profile_of(known)
    assert after["key"] == before["key"]
    assert after["measurements"][0]["points"][0]["decode_ms"] < before["measurements"][0]["points"][0]["decode_ms"]
    listed = json.loads(known.command("profiles", "--json").stdout)
    assert [row["id"] for row in listed] == [after["key"]["id"]]


def test_a_budget_that_is_used_up_ends_the_measuring(home: Home) -> None:
    home.set_engine("--load-seconds", "3")
    done = home.command("tune", budget_s="5")
    assert done.returncode == 0, done.stderr
    assert profile_of(home)["stopped_by"] == "budget"
    assert 1 <= len(profile_of(home)["measurements"]) <= 2


def test_when_the_appliance_is_killed_the_engine_goes_with_it(known: Home) -> None:
    known.set_engine("--ignore-sigterm")
    with known.serving() as serving:
        serving.wait_ready()
        pids = serving.engine_pids()
        assert pids
        serving.process.send_signal(signal.SIGKILL)
        eventually(lambda: not any(is_alive(pid) for pid in pids))


def test_authentication_that_is_off_is_said(known: Home) -> None:
    with known.serving(auth="off") as serving:
        assert serving.event("auth_off")["level"] == "warning"
        serving.wait_ready()
        assert serving.ask("POST", "/v1/chat/completions", {"messages": []})[0] == 200
    assert not (known.data / "secrets/api_key").exists()


def test_the_key_that_the_verb_prints_is_the_key_that_works(known: Home) -> None:
    printed = known.command("key")
    with known.serving() as serving:
        serving.wait_ready()
        assert serving.chat(key=printed.stdout.strip())[0] == 200
        assert serving.chat(key=printed.stdout.strip() + "x")[0] == 401
        health = known.command("health", port=str(serving.port))
        assert (health.returncode, json.loads(health.stdout)) == (0, {"status": "ready"})
    assert known.command("health", port=str(free_port())).returncode == 1


def test_stopping_an_idle_appliance_is_quick(known: Home) -> None:
    with known.serving() as serving:
        serving.wait_ready()
        serving.terminate()
