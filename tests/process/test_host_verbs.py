"""`appliance status`, `list`, `stop`, `logs`, `chat`, `version` and `upgrade` against a Docker daemon with knobs."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from docker.api import APIClient

from appliance.__main__ import HOST_VERBS
from tests.ports import free_port
from tests.process.stages.daemon import IMAGE, ROOT, Host, on_host

NEXT = "appliance:next"


def test_status_says_what_it_does_now() -> None:
    with on_host() as host:
        port = host.serving()
        done = host.run("status")
    rows = dict(re.split(r"\s+", line, maxsplit=1) for line in done.out.splitlines())
    assert done.code == 0, done.err
    assert rows["model"] == "m"
    assert rows["phase"] == "ready"
    assert rows["now"] == "42.5 tok/s, 1 running"
    assert rows["memory"] == "120 MiB of VRAM, 36 MiB of host memory"
    assert rows["mode"] == "balanced, context 8,192"
    assert rows["endpoint"] == f"http://127.0.0.1:{port}/v1"
    assert re.fullmatch(r"\d+(\.\d)? s|\d+ min \d+ s", rows["uptime"])


def test_mode_shows_the_modes_and_switches() -> None:
    with on_host() as host:
        host.serving()
        shown = host.run("mode")
        switched = host.run("mode", "speed", "--json", "--name", "one")
        refused = host.run("mode", "context")
        unknown = host.run("mode", "sped")
    assert (shown.code, shown.err) == (0, "")
    rows = shown.out.splitlines()
    assert rows[0] == "* balanced  context     8,192, decode 100.0 tok/s, prefill unknown, measured; serves"
    assert rows[1] == "  speed     no plan of it fits"
    assert json.loads(switched.out)["mode"] == "speed"
    assert (refused.code, refused.err.splitlines()[0]) == (43, "error: the appliance refuses: plans are being measured")
    assert (unknown.code, "'balanced', 'speed', 'context'" in unknown.err) == (2, True)


def test_usage_is_a_table_or_json() -> None:
    with on_host() as host:
        host.serving()
        shown = host.run("usage", "--by", "key")
        as_json = host.run("usage", "one", "--days", "7", "--by", "key", "--json")
        wrong = host.run("usage", "--days", "401")
    assert (shown.code, shown.err) == (0, "")
    assert shown.out.splitlines() == [
        "key        requests  errors  tokens in  cached  out  seconds",
        "ci                3       1      1,200       0   34      2.5",
        "(own key)         3       1      1,200       0   34      2.5",
        "total             6       1      1,200       0   34      2.5",
        "1 requests without tokens: the client left, or the engine did not tell them",
    ]
    assert json.loads(as_json.out)["days"] == 7
    assert (wrong.code, "not a number from 1 to 400: 401" in wrong.err) == (2, True)


def test_status_as_json_has_every_field() -> None:
    with on_host() as host:
        host.serving()
        status = json.loads(host.run("status", "one", "--json").out)
    assert status["tokens_per_s"] == 42.5
    assert status["vram_mib"] == 120.0
    assert status["allocated_mib"] == 156.0
    assert status["requests"] == 1
    assert (status["name"], status["state"], status["phase"], status["exit_code"]) == ("one", "running", "ready", 0)


def test_status_of_one_that_fetches_shows_how_far_it_is() -> None:
    words = ("--name", "one", "--image", IMAGE, "--port", str(free_port()))
    with on_host("--fetch-for", "3600") as host, host.begin("run", host.model(), *words) as program:
        wait_for_list(host, "fetching")
        done = host.run("status", "one")
        program.send_signal(signal.SIGTERM)
        program.communicate(timeout=90)
    assert "phase     fetching: weights are fetched\n" in done.out
    assert re.search(r"fetched   [0-9.]+ of 4.9 GB, 38 MB/s, 1 min 37 s left\n", done.out)


def wait_for_list(host: Host, phase: str) -> None:
    deadline = time.monotonic() + 90
    while phase not in (said := host.run("list").out):
        assert time.monotonic() < deadline, said


def test_status_of_one_that_ended_has_its_code() -> None:
    with on_host() as host:
        host.serving()
        host.end("one", 45)
        done = host.run("status", "one")
        listed = json.loads(host.run("list", "--json").out)
    assert done.code == 45
    assert "phase     exited: Exited (45)\n" in done.out
    assert [(row["name"], row["phase"], row["is_ours"]) for row in listed] == [("one", "exited", True)]


def test_status_again_and_again_until_ctrl_c() -> None:
    with on_host() as host:
        host.serving()
        with host.begin("status", "--watch", "--json") as program:
            assert program.stdout
            rows = [json.loads(program.stdout.readline()) for _ in range(2)]
            program.send_signal(signal.SIGINT)
            _, err = program.communicate(timeout=90)
    assert [row["phase"] for row in rows] == ["ready", "ready"]
    assert program.returncode == 130
    assert "Traceback" not in err


def test_a_key_that_is_refused_is_said() -> None:
    with on_host("--wanted-key", "sk-other") as host:
        port = free_port()
        done = host.run("run", host.model(), "--name", "one", "-d", "--image", IMAGE, "--port", str(port))
    assert done.code == 10
    assert "error: the appliance refuses its key: invalid API key" in done.err
    assert "sk-" not in done.err


def test_which_one_is_meant_is_asked_for_where_there_are_several() -> None:
    with on_host() as host:
        assert host.run("status").code == 10
        host.serving()
        port = free_port()
        host.run("run", host.model("t.gguf"), "--name", "two", "-d", "--image", IMAGE, "--port", str(port))
        several, near, begun = host.run("status"), host.run("status", "onee"), host.run("status", "tw")
    assert several.code == 10
    assert re.search(
        r"several appliances are on this machine: (one, two|two, one)\n\nhint: choose one: --name NAME", several.err
    )
    assert "perhaps you meant 'one'" in near.err
    assert begun.code == 0, begun.err


def test_every_verb_takes_the_name_as_a_word_and_as_a_flag() -> None:
    with on_host() as host:
        host.serving()
        for verb in ("status", "logs", "chat"):
            for words in (("one",), ("--name", "one")):
                assert host.run(verb, *words).code == 0, (verb, words)
        both = host.run("status", "one", "--name", "two")
        wrong = [host.run(verb, "--name", "none").err for verb in ("logs", "chat", "upgrade", "stop", "bench")]
        stopped = host.run("stop", "--name", "one")
    assert (both.code, "two containers are named: one and two" in both.err) == (2, True)
    assert all("no such appliance: none" in err for err in wrong), wrong
    assert (stopped.code, stopped.out) == (0, "stopping one\nkept: volume appliance\n")


def test_a_list_has_the_model_of_what_somebody_else_started() -> None:
    """Such a container may have weights in its image. It is asked for its model while it serves; after that the image's
    recipe tells it."""
    port = free_port()
    with on_host("--label", "io.appliance.recipe=demo") as host:
        with APIClient(host.environment["DOCKER_HOST"], version="1.45") as client:
            bound = client.create_host_config(port_bindings={11435: ("127.0.0.1", port)})
            made = client.create_container(IMAGE, name="appliance-up", ports=[11435], host_config=bound)
            client.start(made["Id"])
        [serving] = json.loads(host.run("list", "--json").out)
        shown = host.run("list").out
        host.end("up", 45)
        [ended] = json.loads(host.run("list", "--json").out)
    assert (serving["model"], serving["is_ours"], serving["endpoint"]) == ("m", False, f"http://127.0.0.1:{port}/v1")
    assert re.search(r"^up +m +ready ", shown, re.MULTILINE)
    assert (ended["model"], ended["phase"]) == ("demo", "exited")
    # Names that scripts read: none of them may be called otherwise.
    assert tuple(serving) == tuple(ended) == (
        "name", "container", "model", "phase", "state", "endpoint", "created_s", "image", "cell", "is_ours",
    )  # fmt: skip
    assert (serving["name"], serving["container"], serving["image"]) == ("up", "appliance-up", IMAGE)


def test_stop_all_stops_all_and_keeps_the_volume() -> None:
    with on_host() as host:
        host.serving("--volume", "first")
        port = free_port()
        host.run("run", host.model("t.gguf"), "--name", "two", "-d", "--image", IMAGE, "--port", str(port))
        told = json.loads(host.run("stop", "--all", "--json").out)
        assert host.run("list").out.startswith("no appliance on this machine")
    assert sorted(told["stopped"]) == ["appliance-one", "appliance-two"]
    assert told["kept_volumes"] == ["appliance", "first"]


def test_logs_are_sentences() -> None:
    event = {"time": "2026-11-22T16:49:38.161+00:00", "level": "warning", "event": "e", "message": "it is [late]"}
    with on_host("--log", json.dumps(event), "--log", "no event") as host:
        host.serving()
        assert host.run("logs").out == "16:49:38 warning: it is [late]\nno event\n"
        assert host.run("logs", "--json").out.splitlines()[0] == json.dumps(event)


def test_the_last_lines_of_a_log() -> None:
    with on_host("--log", "one", "--log", "two", "--log", "three") as host:
        host.serving()
        assert host.run("logs", "one", "--tail", "2").out == "two\nthree\n"
        assert host.run("logs", "one", "--tail", "0").out == ""
        refused = host.run("logs", "one", "--tail", "-1")
    assert (refused.code, refused.out) == (2, "")
    assert "not a number of lines: '-1'" in refused.err


@pytest.mark.parametrize("by", ["its end", "Ctrl-C"])
def test_a_log_is_followed_until_its_end_or_ctrl_c(by: str) -> None:
    with on_host("--log", "begun") as host:
        host.serving()
        with host.begin("logs", "-f") as program:
            assert program.stdout
            assert [program.stdout.readline() for _ in range(3)] == ["begun\n", "still here\n", "still here\n"]
            if by == "Ctrl-C":
                program.send_signal(signal.SIGINT)
            else:
                host.end("one", 0)
            _, err = program.communicate(timeout=90)
    assert (program.returncode, err) == (130 if by == "Ctrl-C" else 0, "")


# A conversation.


def test_a_conversation_is_kept_until_it_is_cleared() -> None:
    with on_host() as host:
        host.serving()
        done = host.run("chat", "--system", "be short", stdin="one?\ntwo?\n/clear\nthree?\n/what\n/exit\nnever?\n")
    assert done.code == 0, done.err
    # The answer begins with how many messages were sent.
    assert done.out == "2: It guides ships.\n4: It guides ships.\n2: It guides ships.\n"
    assert "/exit ends" in done.err


@pytest.mark.parametrize(
    ("answer", "code", "said"),
    [("refused", 43, "error: the appliance refuses: the model is being loaded"), ("error", 43, "shutting down"),
     ("torn", 45, "error: the answer broke off: the connection closed before its end")],
)  # fmt: skip
def test_an_answer_that_fails_is_said(answer: str, code: int, said: str) -> None:
    with on_host("--answer", answer) as host:
        host.serving()
        done = host.run("chat", stdin="one?\n")
    assert done.code == code
    assert said in done.err


# An upgrade.


def test_an_upgrade_says_what_changed_and_what_became_slower() -> None:
    with on_host("--image", IMAGE, "--image", NEXT, "--slow-image", NEXT) as host:
        port = host.serving()
        done = host.run("upgrade", "--image", NEXT, "--court-s", "0")
        assert done.code == 0, done.err
        assert "both images were not compared: --court-s 0\n" in done.out
        assert "  version: appliance:llama-cpu -> appliance:next\n" in done.out
        assert "slower by more than 5 %: decode at 32 tokens: 100.0 -> 90.0 tok/s, 10% slower\n" in done.out
        assert "  prefill at 32 tokens: 300.0 -> 300.0 tok/s\n" in done.out
        after = json.loads(host.run("status", "one", "--json").out)
        assert (after["image"], after["endpoint"]) == (NEXT, f"http://127.0.0.1:{port}/v1")
        back = host.run("upgrade", "one", "--back")
        assert "one is back" in back.out
        assert "decode at 32 tokens: 90.0 -> 100.0 tok/s, 11% faster\n" in back.out
        assert json.loads(host.run("status", "one", "--json").out)["image"] == IMAGE
        again = json.loads(host.run("upgrade", "one", "--back", "--json").out)
        assert [row["what"] for row in again["speeds"] if row["is_slower"]] == ["decode at 32 tokens"]
        assert host.run("stop", "one").code == 0
        assert host.run("list").out.startswith("no appliance")


def test_an_upgrade_that_does_not_come_up_leaves_the_one_before() -> None:
    with on_host("--image", IMAGE, "--image", NEXT, "--exit", "44", "--exit-from", "1") as host:
        host.serving()
        done = host.run("upgrade", "one", "--image", NEXT, "--court-s", "0")
        images = [row["image"] for row in json.loads(host.run("list", "--json").out)]
    assert done.code == 44
    assert "one is started again as before" in done.err
    assert images == [IMAGE]


def test_ctrl_c_in_an_upgrade_leaves_the_one_before() -> None:
    with on_host("--image", IMAGE, "--image", NEXT, "--loading-image", NEXT) as host:
        port = host.serving()
        with host.begin("upgrade", "one", "--image", NEXT, "--court-s", "0") as program:
            deadline = time.monotonic() + 90
            while len(host.told("start")) < 2:
                assert time.monotonic() < deadline
            program.send_signal(signal.SIGINT)
            _, err = program.communicate(timeout=90)
        after = json.loads(host.run("status", "one", "--json").out)
    assert program.returncode == 130, err
    assert "one is started again as before" in err
    assert "Traceback" not in err
    assert (after["image"], after["phase"]) == (IMAGE, "ready")
    assert after["endpoint"] == f"http://127.0.0.1:{port}/v1"


def test_there_is_nothing_to_upgrade_to() -> None:
    with on_host() as host:
        host.serving()
        done = host.run("upgrade")
        back = host.run("upgrade", "--back")
    assert (done.code, done.out) == (0, f"one is up to date: {IMAGE}\n")
    assert "build it with --yes" in done.err
    assert back.code == 10
    assert "one has no previous container" in back.err


def test_without_measuring_nothing_is_compared_and_that_is_said() -> None:
    with on_host("--image", IMAGE, "--image", NEXT, "--tuning", "off") as host:
        host.serving()
        done = host.run("upgrade", "--image", NEXT, "--court-s", "0")
    assert done.code == 0, done.err
    assert "speeds were not compared: nothing was measured before the upgrade" in done.out


# The command line.


def test_versions_are_told_also_without_docker() -> None:
    with on_host() as host:
        host.serving()
        assert "docker: 26.1\none: llama-cpu appliance:llama-cpu" in host.run("version").out
    with on_host(daemon=False) as host:
        done = host.run("version")
    assert done.code == 0
    assert "docker: none: Docker is" in done.out


def test_the_appliance_hands_over_to_the_host_command() -> None:
    with on_host() as host:
        for words in (["list"], ["version", "--json"], ["--help"], ["run", "--help"]):
            argv = [sys.executable, "-m", "appliance", *words]
            done = subprocess.run(argv, cwd=ROOT, env=host.environment, capture_output=True, text=True, timeout=300)
            assert done.returncode == 0, done.stderr
            assert "docker" in done.stdout or "appliance" in done.stdout


def test_without_the_package_for_docker_it_says_what_to_install() -> None:
    script = (
        "import sys; sys.modules['docker'] = None\nfrom appliance.host.__main__ import main\nsys.exit(main(['list']))"
    )
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 10
    assert "is not installed: docker" in done.stderr
    assert "pipx install" in done.stderr


@pytest.mark.parametrize(
    ("verb", "hint"), [("status", "inside the container use `appliance health`"), ("stop", "`docker stop NAME`")]
)
def test_inside_of_a_container_it_says_what_to_call_there(tmp_path: Path, verb: str, hint: str) -> None:
    (tmp_path / "image_facts.json").touch()
    script = (
        f"import sys; sys.modules['docker'] = None\nfrom appliance.__main__ import main\nsys.exit(main([{verb!r}]))"
    )
    environment = {"APPLIANCE_FACTS_DIR": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 10
    said = f"error: `appliance {verb}` is for the machine that runs this container, and cannot be used inside of it"
    assert said in done.stderr
    assert hint in done.stderr.partition("hint: ")[2]
    assert f"or on that machine: appliance {verb}" in done.stderr
    assert "pipx" not in done.stderr


@pytest.mark.parametrize(
    ("words", "hint"),
    [
        (["statsu"], "perhaps you meant 'status'"),
        ([], "known are run"),
        (["list", "--jsn"], "perhaps you meant '--json'"),
        (["mode", "--data-dir", "/data"], "unknown argument: --data-dir"),
        (["stop", "one", "--all"], "give only one of them"),
        (["upgrade", "--back", "--image", "x"], "--back returns to the previous container"),
        (["logs", "--tail", "all"], "see `python -m appliance.host logs --help`"),
        (["inject", "zedd"], "perhaps you meant 'zed'"),
    ],
)
def test_misspelt_words_name_the_near_miss(words: list[str], hint: str) -> None:
    with on_host(daemon=False) as host:
        done = host.run(*words)
    assert done.code == 2
    assert hint in done.err


def test_help_needs_no_docker_and_imports_none() -> None:
    script = (
        "import sys\nfrom appliance.host.__main__ import main\nmain(['--help'])\nassert 'docker' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert all(f"  {verb} " in done.stdout for verb in HOST_VERBS)


def test_bench_and_inject_take_the_appliance_that_runs_here() -> None:
    with on_host() as host:
        port = host.serving()
        shown = host.run("inject", "zed", "--create", "--dry-run")
        other = host.run("bench", "--name", "two")
    assert shown.code == 0, shown.err
    assert f'+        "api_url": "http://127.0.0.1:{port}/v1"' in shown.out
    assert '+            "max_tokens": 8192' in shown.out
    assert other.code == 10
    assert "no such appliance: two" in other.err
