"""The main job on the real image: measures, serves, remembers, stops."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator

import openai
import pytest
import requests
from openai.types.chat import ChatCompletionMessageParam

from tests.container.stages.containers import ROOT, WAIT_S, Stage, started, volume, wait_for

QUESTION: list[ChatCompletionMessageParam] = [{"role": "user", "content": "Say hello."}]


@pytest.fixture(scope="module")
def tuned_volume() -> Iterator[str]:
    with volume() as name:
        yield name


@pytest.fixture(scope="module")
def first_start(tuned_volume: str) -> Iterator[Stage]:
    # Time for more than one depth on most machines; when there are how many, test_tuner_fake.py judges.
    with started(tuned_volume, env={"APPLIANCE_TUNE": "first", "APPLIANCE_BUDGET_S": "40"}) as stage:
        wait_for(lambda: _answers(stage, "/health/live"), WAIT_S, stage.logs)
        loading = requests.post(
            f"{stage.base}/v1/chat/completions", json={"messages": QUESTION}, headers=stage.authorized(), timeout=60
        )
        assert loading.status_code == 503
        assert loading.json()["error"] | {"message": ""} == {
            "message": "", "type": "service_unavailable", "param": None, "code": "model_loading",
        }  # fmt: skip
        stage.wait_ready()
        yield stage


def _answers(stage: Stage, path: str) -> bool:
    try:
        return stage.get(path).status_code == 200
    except requests.ConnectionError:
        return False


@pytest.fixture
def client(first_start: Stage) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{first_start.base}/v1", api_key=first_start.key(), max_retries=0) as client:
        yield client


def test_first_start_measures_and_says_so(first_start: Stage) -> None:
    names = first_start.names()
    assert names.index("tune_start") < names.index("tuned") < names.index("ready")
    curve = next(event for event in first_start.events() if event["event"] == "tune_measured")["points"]
    depths = [point["depth"] for point in curve]
    assert depths == sorted(set(depths))
    assert depths
    assert all(point["decode_ms"] > 0 for point in curve)


def test_chat_and_models_through_the_openai_sdk(client: openai.OpenAI) -> None:
    [model] = client.models.list().data
    assert model.id == "SmolLM2-135M-Instruct.Q4_1"
    reply = client.chat.completions.create(model=model.id, messages=QUESTION, max_tokens=16)
    assert reply.choices[0].message.content
    assert reply.model == model.id


def test_streamed_chat(client: openai.OpenAI) -> None:
    stream = client.chat.completions.create(model="any", messages=QUESTION, max_tokens=16, stream=True)
    chunks = [chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices]
    assert len(chunks) > 3
    assert "".join(chunks).strip()


def test_bad_key_is_refused(first_start: Stage) -> None:
    with (
        openai.OpenAI(base_url=f"{first_start.base}/v1", api_key="sk-wrong", max_retries=0) as stranger,
        pytest.raises(openai.AuthenticationError) as caught,
    ):
        stranger.models.list()
    assert caught.value.status_code == 401


def test_responses_and_anthropic_messages(first_start: Stage) -> None:
    headers = first_start.authorized()
    responses = requests.post(
        f"{first_start.base}/responses",
        json={"model": "m", "input": "Hi", "max_output_tokens": 8},
        headers=headers,
        timeout=60,
    )
    assert responses.status_code == 200, responses.text
    messages = requests.post(
        f"{first_start.base}/v1/messages",
        json={"model": "m", "max_tokens": 8, "messages": QUESTION},
        headers={"x-api-key": headers["Authorization"].split()[1]},
        timeout=60,
    )
    assert messages.json()["type"] == "message", messages.text


@pytest.mark.parametrize("path", ["/props", "/slots", "/cors-proxy?url=http://127.0.0.1", "/tools", "/v1/streams"])
def test_engine_routes_that_are_not_listed_stay_closed(first_start: Stage, path: str) -> None:
    assert first_start.get(path, headers=first_start.authorized()).status_code == 404


def test_no_reply_exposes_a_path_of_the_machine(first_start: Stage, client: openai.OpenAI) -> None:
    headers = first_start.authorized()
    texts = [first_start.get("/v1/models", headers=headers).text]
    texts.append(client.chat.completions.create(model="m", messages=QUESTION, max_tokens=4).model_dump_json())
    assert not [text for text in texts if "/data" in text]


def test_key_is_in_no_log_and_no_process_list(first_start: Stage) -> None:
    key = first_start.key()
    processes = first_start.container.top()["Processes"]
    assert key not in first_start.logs()
    assert key not in json.dumps(processes)


def test_process_tree_and_hardening(first_start: Stage) -> None:
    inside = first_start.run("/bin/sh", "-c", "for p in /proc/[0-9]*; do tr '\\0' ' ' <$p/cmdline; echo; done")
    assert first_start.run("cat", "/proc/1/comm").strip() == "tini"
    assert "llama-server --model /data/models/" in inside
    assert "--fit off" in inside
    status = first_start.run("cat", "/proc/1/status")
    assert "CapEff:\t0000000000000000" in status
    assert "NoNewPrivs:\t1" in status
    assert "Uid:\t12345\t12345\t12345\t12345" in status
    assert first_start.container.diff() in (None, [])


def test_documents_show_prediction_beside_what_was_allocated(first_start: Stage) -> None:
    headers = first_start.authorized()
    profile = first_start.get("/appliance/v1/profile", headers=headers).json()
    assert profile["allocated"]["kv"] == pytest.approx(profile["plan"]["memory"]["kv"], rel=0.01)
    assert abs(profile["memory_prediction_error"]) < 0.2
    status = first_start.get("/appliance/v1/status", headers=headers).json()
    assert (status["phase"], status["cell"]) == ("ready", "llama-cpu")
    assert first_start.get("/appliance/v1/hardware", headers=headers).json()["cpu"]["logical"] >= 1
    assert first_start.get("/appliance/v1/plan", headers=headers).json()["choices"]
    assert first_start.get("/metrics", headers=headers).status_code == 200
    assert first_start.get("/metrics").status_code == 401


def test_a_side_request_costs_the_conversation_nothing(first_start: Stage) -> None:
    """Chat, side request, chat again: the prefix is still cached."""
    headers = first_start.authorized()
    story = "The ferry left the harbour a little after six, when the lamps were still lit. " * 30

    def ask(content: str) -> dict[str, int]:
        body = {"messages": [{"role": "user", "content": content}], "max_tokens": 4, "temperature": 0}
        reply = requests.post(f"{first_start.base}/v1/chat/completions", json=body, headers=headers, timeout=60)
        return dict(reply.json()["timings"])

    whole = ask(story)
    ask("Give this conversation a title of three words.")
    again = ask(story)
    prompt = whole["prompt_n"] + whole["cache_n"]
    assert again["cache_n"] >= 0.95 * prompt, again


def test_host_program_asks_and_reports(first_start: Stage) -> None:
    argv = [sys.executable, "-m", "appliance.host.up", str(first_start.container.id)]
    done = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    for word in ("answer", "endpoint", "http://127.0.0.1:", "appliance key", "tok/s", "threads"):
        assert word in done.stdout, done.stdout


def test_second_start_uses_the_profile(first_start: Stage, tuned_volume: str) -> None:
    first_start.key()
    with started(tuned_volume) as second:
        second.wait_ready()
        assert "profile_used" in second.names()
        assert "tune_start" not in second.names()
        assert second.key() == first_start.key()
        both = [_chat(stage) for stage in (first_start, second)]  # two containers on one volume, both serving
        assert all(both)
        wait_for(lambda: _health(second) == "healthy", WAIT_S, second.logs)


def _chat(stage: Stage) -> str:
    body = {"messages": QUESTION, "max_tokens": 8}
    reply = requests.post(f"{stage.base}/v1/chat/completions", json=body, headers=stage.authorized(), timeout=60)
    return str(reply.json()["choices"][0]["message"]["content"])


def _health(stage: Stage) -> str:
    stage.container.reload()
    return str(stage.container.attrs["State"]["Health"]["Status"])


def test_sigterm_in_mid_stream_ends_it_with_an_error_event(first_start: Stage, tuned_volume: str) -> None:
    assert first_start.key()
    with started(tuned_volume, env={"APPLIANCE_DRAIN_S": "1"}) as stage:
        stage.wait_ready()
        body = {"messages": QUESTION, "stream": True, "max_tokens": 8000, "ignore_eos": True}
        with requests.post(
            f"{stage.base}/v1/chat/completions", json=body, headers=stage.authorized(), stream=True, timeout=60
        ) as reply:
            lines = reply.iter_lines()
            assert next(lines).startswith(b"data: ")
            began = time.monotonic()
            stage.container.kill("SIGTERM")
            rest = [line for line in lines if line]
        code = stage.wait_exit()
        seconds = time.monotonic() - began
    assert code == 0
    assert seconds < 60  # the answer has minutes more to say
    error = json.loads(rest[-1].removeprefix(b"data: "))["error"]
    assert error["code"] == "shutting_down"


def test_engine_that_is_killed_is_restarted(first_start: Stage, tuned_volume: str) -> None:
    assert first_start.key()
    with started(tuned_volume) as stage:
        stage.wait_ready()
        stage.run("/bin/sh", "-c", "kill -9 $(grep -l llama-server /proc/[0-9]*/comm | cut -d/ -f3)")
        wait_for(lambda: stage.names().count("ready") == 2, WAIT_S, stage.logs)
        assert _chat(stage)
        died = next(event for event in stage.events() if event["event"] == "engine_died")
        assert "SIGKILL" in died["message"]


def test_a_library_on_the_volume_is_not_loaded_by_the_engine(first_start: Stage, tuned_volume: str) -> None:
    """ggml looks for backends in its working directory, too."""
    first_start.run("cp", "/opt/llama/libggml-cpu-x64.so", "/data/libggml-blas.so")
    try:
        with started(tuned_volume) as stage:
            stage.wait_ready()
            maps = stage.run("/bin/sh", "-c", "cat $(grep -l llama-server /proc/[0-9]*/comm | sed 's/comm/maps/')")
            assert "/opt/llama/libggml" in maps
            assert "/data/libggml" not in maps
    finally:
        first_start.run("rm", "/data/libggml-blas.so")


def test_nothing_outlives_an_appliance_that_is_killed(first_start: Stage, tuned_volume: str) -> None:
    assert first_start.key()
    with started(tuned_volume) as stage:
        stage.wait_ready()
        # not waited for: with the appliance the container ends, and the shell that killed it, perhaps before its answer
        kill = "kill -9 $(grep -l '^appliance$' /proc/[0-9]*/comm | cut -d/ -f3)"
        stage.container.exec_run(["/bin/sh", "-c", kill], detach=True)
        assert stage.wait_exit() == 137
