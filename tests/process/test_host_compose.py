"""`appliance compose` as `docker compose` calls it, against a Docker daemon with knobs: its JSON lines alone."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.ports import free_port
from tests.process.stages.daemon import Done, Host, on_host

CALL = ("compose", "--project-name=shop")
QWEN = ("--image", "appliance/qwen:llama-cpu", "--label", "io.appliance.recipe=qwen")
NETWORK = ("--network", "shop_default")


def up(host: Host, *options: str, service: str = "llm") -> Done:
    return host.run(*CALL, "up", *options, service)


def messages(done: Done) -> list[dict[str, Any]]:
    """Return all messages: nothing else may be on stdout, and Compose shows nothing of stderr."""
    found = [json.loads(line) for line in done.out.splitlines()]
    assert all(set(each) == {"type", "message"} for each in found)
    assert done.err == ""
    return found


def told(done: Done, kind: str) -> list[str]:
    return [each["message"] for each in messages(done) if each["type"] == kind]


def test_up_starts_it_in_the_projects_network_and_tells_the_variables() -> None:
    with on_host(*QWEN, *NETWORK, "--ready-after", "0.3") as host:
        done = up(host, "--model=qwen", "--ctx_size=4096", "--set=parallel=2", "--set=keep_alive=10m", "--fast=true")
        assert done.code == 0, done.out
        assert told(done, "setenv") == ["URL=http://llm:11435/v1", "API_KEY=sk-fake", "MODEL=m"]
        assert "the model is being loaded: m.gguf" in told(done, "info")
        created = host.created()
        joined = host.asked("networks/shop_default/connect")
    assert created["Image"] == "appliance/qwen:llama-cpu"
    given = {"APPLIANCE_CTX_SIZE=4096", "APPLIANCE_PARALLEL=2", "APPLIANCE_KEEP_ALIVE=10m", "APPLIANCE_TUNE=off"}
    assert given <= set(created["Env"])
    assert (created["HostConfig"]["ReadonlyRootfs"], created["HostConfig"]["CapDrop"]) == (True, ["ALL"])
    assert joined[-1]["EndpointConfig"]["Aliases"] == ["llm"]


def test_a_second_up_changes_nothing_and_another_option_starts_it_again() -> None:
    with on_host(*QWEN, *NETWORK) as host:
        first = up(host, "--model=qwen")
        count = len(host.asked("containers/create"))  # two if a test beside this one took the port first
        again = up(host, "--model=qwen")
        assert (again.code, told(again, "setenv")) == (0, told(first, "setenv"))
        assert len(host.asked("containers/create")) == count
        other = up(host, "--model=qwen", "--mode=speed")
        assert (other.code, told(other, "setenv")) == (0, told(first, "setenv")), other.out
        assert len(host.asked("containers/create")) > count
        assert [row["name"] for row in json.loads(host.run("list", "--json").out)] == ["shop-llm"]


def test_a_chosen_port_is_kept_by_a_second_up() -> None:
    with on_host(*QWEN) as host:
        port = free_port()
        for _ in range(2):
            done = up(host, "--model=qwen", f"--port={port}", "--cpu=true")
            assert done.code == 0, done.out
        # Without a network of the project, the port on this machine is the way.
        assert told(done, "setenv")[0] == f"URL=http://127.0.0.1:{port}/v1"
        assert len(host.asked("containers/create")) == 1


@pytest.mark.parametrize("action", ["down", "stop"])
def test_down_removes_it_and_is_content_if_there_is_nothing(action: str) -> None:
    with on_host(*QWEN, *NETWORK) as host:
        assert up(host, "--model=qwen").code == 0
        done = host.run(*CALL, action, "--model=qwen", "llm")  # Compose passes the options here as well
        assert (done.code, told(done, "info")) == (0, ["stopping: running answers get their time"])
        assert json.loads(host.run("list", "--json").out) == []
        done = host.run(*CALL, action, "llm")
        assert (done.code, told(done, "info")) == (0, ["nothing to stop"])


def test_metadata_passes_every_option_on_and_has_a_stop() -> None:
    with on_host() as host:
        done = host.run("compose", "metadata")
    assert (done.code, json.loads(done.out)) == (0, {"stop": {}})


@pytest.mark.parametrize(
    ("options", "code", "said"),
    [
        ((), 2, "service llm: the provider's option model is missing; options: {model: qwen}"),
        (("--modell=qwen",), 2, "service llm: no such option of the provider: modell; perhaps you meant 'model'"),
        (("--colour=red",), 2, "no such option of the provider: colour; known are model, mode, ctx-size"),
        (("--model=qwen", "--cpu=yes"), 2, "the provider's option cpu is true or false: 'yes'; cpu: true"),
        (("--model=qwen", "--port=x"), 2, "service llm: argument --port: invalid int value: 'x'"),
        (("--model=qwem",), 10, "no recipe has a model of this name: qwem; perhaps you meant qwen"),
        (("--model=qwen", "--mode=fast"), 10, "fast"),
        (("--model=qwen", "--set=prot=1", "--cpu=true", "--gpus=all"), 10, "--cpu and --gpus all exclude each other"),
        (("--model=./missing.gguf",), 30, "no such model file: missing.gguf"),
    ],
)
def test_what_is_wrong_is_one_error_message(options: tuple[str, ...], code: int, said: str) -> None:
    with on_host(*QWEN) as host:
        done = up(host, *options)
        assert host.asked("containers/create") == []
    [error] = told(done, "error")
    assert said in error
    assert done.code == code
    assert messages(done)[-1]["type"] == "error"


def test_no_daemon_is_said() -> None:
    with on_host(daemon=False) as host:
        for action in ("up", "down"):
            done = host.run(*CALL, action, "--model=qwen", "llm")
            assert done.code == 10
            assert told(done, "error")[0].startswith("Docker is missing: nothing answers at ")


def test_a_container_that_ends_gives_its_words_and_its_code() -> None:
    said = ("--log", "loading", "--log", "error: model does not fit", "--log", "hint: a smaller one")
    with on_host(*QWEN, "--exit", "31", *said) as host:
        done = up(host, "--model=qwen")
        assert json.loads(host.run("list", "--json").out) == []
    assert done.code == 31
    assert told(done, "error") == ["the container ended with code 31: model does not fit; a smaller one"]


def test_without_project_or_service_it_says_who_calls_it() -> None:
    with on_host() as host:
        done = host.run("compose", "up", "--model=qwen", "llm")
        assert done.code == 2
        assert told(done, "error")[0].startswith("no project: --project-name is missing; `docker compose` calls")
        for words in ((), ("--model=qwen",)):
            done = host.run(*CALL, "up", *words)
            assert done.code == 2
            assert told(done, "error")[0].startswith("no service: its name is the last word")
