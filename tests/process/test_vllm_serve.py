"""The appliance as a user starts it, with a vLLM that is faked down to its processes."""

from __future__ import annotations

import json
import os
import signal
import tempfile
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.process.stages.boot import Serving, eventually, is_alive
from tests.process.stages.gateway import read_until
from tests.process.stages.vllm import family
from tests.process.stages.vllm_home import VllmHome

MEASURING = {"tune_start", "measured"}
ENDINGS = Path(__file__).parents[1] / "endings"


@pytest.fixture
def home(tmp_path: Path) -> Iterator[VllmHome]:
    home = VllmHome.make(tmp_path / "home")
    yield home
    home.free_segments()


def tree_of(serving: Serving) -> list[int]:
    """API server, EngineCore, worker."""
    leaders = [pid for pid in serving.engine_pids() if len(family(pid)) > 2]
    (leader,) = leaders
    return family(leader)


def gauges(serving: Serving) -> dict[str, float]:
    headers = {"Authorization": f"Bearer {serving.home.key}"}
    request = urllib.request.Request(f"http://127.0.0.1:{serving.port}/metrics", headers=headers)
    with urllib.request.urlopen(request, timeout=60) as reply:
        lines = reply.read().decode().splitlines()
    return {
        line.partition("{")[0].removeprefix("vllm:"): float(line.split()[-1])
        for line in lines
        if line.startswith(("vllm:num_", "vllm:kv_"))
    }


def test_it_serves_every_dialect_and_says_how_its_start_goes(home: VllmHome) -> None:
    with home.serving() as serving:
        serving.wait_ready()
        status, reply = serving.chat()
        assert status == 200
        assert reply["choices"][0]["message"]["content"].startswith("word")
        body = {"model": "small", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}
        assert serving.ask("POST", "/v1/messages", body, key=home.key)[1]["type"] == "message"
        assert serving.ask("POST", "/v1/responses", {"model": "small", "input": "a"}, key=home.key)[0] == 200
        assert serving.ask("POST", "/tokenize", {"model": "small", "prompt": "one two"}, key=home.key)[0] == 200
        assert serving.chat(key="sk-wrong")[0] == 401
        assert serving.ask("POST", "/invocations", body, key=home.key)[0] == 404
        status, reply = serving.ask("POST", "/v1/embeddings", {"model": "small", "input": "a"}, key=home.key)
        assert (status, reply["error"]["code"]) == (400, "model_gives_text")
        assert serving.event("ready")["message"].endswith("as predicted")  # how many tokens its cache has room for
        stages = [event["stage"] for event in serving.events if event["event"] == "engine_step"]
        assert list(dict.fromkeys(stages))[:3] == ["bind", "imports", "weights"]
        assert stages[-1] == "first token"
        tree = tree_of(serving)
        serving.terminate()
    eventually(lambda: not [pid for pid in tree if is_alive(pid)])
    assert home.segments == []


def test_every_name_of_the_list_answers(home: VllmHome) -> None:
    with home.serving(alias="mine") as serving:
        serving.wait_ready()
        (listed,) = serving.ask("GET", "/v1/models", key=home.key)[1]["data"]
        assert (listed["id"], len(listed["aliases"])) == ("mine", 1)
        for name in ("mine", *listed["aliases"], "another"):
            body = {"model": name, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}
            assert serving.ask("POST", "/v1/chat/completions", body, key=home.key)[0] == 200, name
        serving.terminate()


@pytest.mark.parametrize(
    ("template", "promised", "unknown"),
    [
        (r"{% if tools %}<tool_call>\n{\"name\": <function-name>", ["tool_use"], []),
        (r"{% if tools %}<tool_call>\n{\"name\": </think> enable_thinking", ["tool_use"], []),
        ("{{ tools }}", [], ["tool_calls"]),
        ("{{ messages }}", [], []),
    ],
)
def test_the_list_of_models_promises_what_the_engine_takes(
    template: str, promised: list[str], unknown: list[str], home: VllmHome
) -> None:
    (home.data / "models/small/chat_template.jinja").write_text(template)
    with home.serving() as serving:
        serving.wait_ready()
        (model,) = serving.ask("GET", "/v1/models", key=home.key)[1]["data"]
        assert model["capabilities"] == promised
        assert ("tools" in model["supported_parameters"]) == bool(promised)
        body = {"model": "small", "messages": [{"role": "user", "content": "a"}], "tools": [{}], "max_tokens": 2}
        assert serving.ask("POST", "/v1/chat/completions", body, key=home.key)[0] == (200 if promised else 400)
        said = [event["message"] for event in serving.events if event["event"] == "not_as_asked"]
        assert [words.split()[0] for words in said if "no parser is known for its chat template" in words] == unknown
        serving.terminate()


@pytest.mark.parametrize(
    ("knobs", "words", "less"),
    [
        (("--fake-tokens-less", "128"), "tokens, its metrics ", 128),
        (("--fake-more-blocks", "3"), "blocks, and ", 0),
    ],
)
def test_metrics_that_tell_of_another_cache_are_believed_and_said(
    knobs: tuple[str, ...], words: str, less: int, home: VllmHome
) -> None:
    with home.serving() as serving:
        serving.wait_ready()
        agreed = serving.event("ready")["allocated_mib"]["kv_tokens"]
        assert "allocated_otherwise" not in serving.names()
        serving.terminate()
    home.set_engine(*knobs)
    with home.serving() as serving:
        serving.wait_ready()
        eventually(lambda: "allocated_otherwise" in serving.names())
        assert words in serving.event("allocated_otherwise")["message"]
        assert serving.document("status")["allocated"]["kv_tokens"] == agreed - less
        serving.terminate()


def test_its_load_is_told_as_vllm_tells_it(home: VllmHome) -> None:
    with home.serving() as serving:
        serving.wait_ready()
        with serving.stream(max_tokens=10**6) as connection:
            read_until(connection, b"word")
            busy = {"num_requests_waiting": 0.0, "num_requests_running": 1.0, "kv_cache_usage_perc": 0.25}
            eventually(lambda: gauges(serving) == busy)
        serving.terminate()


@pytest.mark.parametrize("member", range(3), ids=["api", "core", "worker"])
def test_whichever_process_is_killed_in_mid_stream_it_comes_back(member: int, home: VllmHome) -> None:
    with home.serving() as serving:
        serving.wait_ready()
        old = tree_of(serving)
        with serving.stream(max_tokens=10**6) as connection:
            read_until(connection, b"word")
            os.kill(old[member], signal.SIGKILL)
            eventually(lambda: not [pid for pid in old if is_alive(pid)])
        eventually(lambda: "engine_died" in serving.names())
        serving.wait_ready()
        assert serving.chat()[0] == 200
        assert serving.document("status")["engine_restarts"] == 1
        assert len(home.segments) == 2  # a segment and a semaphore
        serving.terminate()
    assert home.segments == []


def test_what_another_appliance_has_in_shared_memory_is_left_alone(home: VllmHome, tmp_path: Path) -> None:
    """Both have the same /dev/shm, as with --ipc=host; of a third program nobody knows anything."""
    other = VllmHome.make(tmp_path / "other")
    with home.serving() as serving, other.serving() as beside:
        serving.wait_ready()
        beside.wait_ready()
        with tempfile.NamedTemporaryFile(dir="/dev/shm", prefix="psm_") as third:
            theirs, mine = other.segments, home.segments
            os.kill(tree_of(serving)[1], signal.SIGKILL)
            eventually(lambda: "engine_died" in serving.names())
            serving.wait_ready()
            assert not set(mine) & set(home.segments)
            serving.terminate()
            assert home.segments == []
            assert other.segments == theirs
            assert Path(third.name).exists()
            assert beside.chat()[0] == 200
        beside.terminate()
    assert other.segments == []


def test_a_stop_in_mid_stream_that_it_hangs_in_ends_in_time(home: VllmHome) -> None:
    home.set_engine("--fake-hang-at-sigterm")
    with home.serving() as serving:
        serving.wait_ready()
        tree = tree_of(serving)
        with serving.stream(max_tokens=10**6) as connection:
            read_until(connection, b"word")
            assert serving.terminate() < 30  # 9 s on a machine that has nothing else to do
            assert not [pid for pid in tree if is_alive(pid)]
    assert home.segments == []


@pytest.mark.parametrize("name", ["no-weights", "bad-choice", "environment-no-number", "cuda-no-kernel"])
def test_it_ends_with_the_code_of_what_its_log_tells(name: str, home: VllmHome) -> None:
    codes = {"no-weights": 30, "bad-choice": 40, "environment-no-number": 10, "cuda-no-kernel": 20}
    log = ENDINGS / f"vllm-{name}.log"
    home.set_engine("--fake-end-at", "weights", "--fake-replay", str(log))
    with home.serving() as serving:
        assert serving.wait_exit() == codes[name]


def test_a_cache_that_is_too_small_is_stepped_to_the_context_that_the_log_names_at_once(home: VllmHome) -> None:
    log = ENDINGS / "vllm-kv-too-small.log"
    home.set_engine("--fake-end-at", "profile", "--fake-replay", str(log), where="--max-model-len 8192 ")
    with home.serving() as serving:
        serving.wait_ready()
        stepped = serving.event("stepped_down")
        assert stepped["context_before"] == 8192
        assert len(home.started) == 2
        longest = int(log.read_text().partition("estimated maximum model length is ")[2].partition(".")[0])
        assert stepped["context"] == serving.document("status")["context"] <= longest
        serving.terminate()


def test_it_is_tuned_through_the_doors_and_the_next_start_serves_the_profile(home: VllmHome) -> None:
    home.set_engine("--fake-decode-ms", "4", "--fake-tokens-less", "1")
    done = home.command("tune", budget_s="30")
    assert done.returncode == 0, done.stderr
    (path,) = home.profiles.glob("*.json")
    profile = json.loads(path.read_text())
    assert profile["plan"]["engine"] == "vllm"
    assert profile["measurements"]
    assert profile["allocated"]["kv_tokens"] % 128 == 127  # what its metrics told, not its log
    before = len(home.started)
    with home.serving() as serving:
        serving.wait_ready()
        assert not MEASURING & set(serving.names())
        assert serving.document("status")["from_profile"] is True
        serving.terminate()
    assert len(home.started) == before + 1


def test_what_is_measured_is_compiled_for_the_next_start_and_its_price_is_kept(home: VllmHome) -> None:
    config = """--compilation-config '{"cudagraph_mode":"NONE"}'"""
    done = home.command("tune", budget_s="5", engine_arg=config)
    assert done.returncode == 0, done.stderr
    # How many steps fit into the time is the machine's: each value of these flags is another program.
    flags = (
        "--max-model-len",
        "--max-num-seqs",
        "--max-num-batched-tokens",
        "--kv-cache-dtype",
        "--block-size",
        "--speculative-config",
    )
    keys = {tuple(_given(line, flag) for flag in flags) for line in home.started}
    (path,) = home.data.glob("cache/*/vllm-compiled.json")
    kept = json.loads(path.read_text())
    assert kept["cold_s"] == 13.4  # as its log said
    assert 0 < len(kept["keys"]) <= len(keys)
    assert not list(home.data.glob("cache/*/vllm-last-start.json"))  # nothing was served


def _given(line: str, flag: str) -> str:
    return line.partition(f"{flag} ")[2].partition(" ")[0]
