"""The real vLLM in its own image, under `appliance serve`: dialects, its cache as predicted, kills, a small /dev/shm.

Run by `make test CELL=vllm-cpu`, which takes minutes: left out without `APPLIANCE_TEST_VLLM_IMAGE`, the image's name.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from typing import Any

import pytest
import requests
from docker.types import Mount

from appliance.engines.vllm.api.routes import ROUTES
from tests.container.stages.containers import ROOT, Stage, ended, started, volume, wait_for

IMAGE = os.environ.get("APPLIANCE_TEST_VLLM_IMAGE", "")
MODEL = ROOT / ".make/models/SmolLM2-135M-Instruct.Q4_1"
START_S = 900.0  # half a minute of imports; a cold disk and a busy machine take many times that
MESSAGES = [{"role": "user", "content": "In one sentence: what is a lighthouse for?"}]
# Words of a command line in its tree.
TREE = {"api": "vllm.entrypoints.cli.main", "core": "VLLM::EngineCore", "worker": "VLLM::Worker"}
SERVED = {"APPLIANCE_MODEL": "/models/small"}
# What this engine announces at its start, by its own log.
ANNOUNCED = re.findall(r"Route: (\S+), Methods: (\w+)", (ROOT / "tests/data/vllm/start-0.32-cpu.log").read_text())
OURS = {"/health", "/metrics", "/v1/models"}


@pytest.fixture(scope="module", autouse=True)
def _needed() -> None:
    if not IMAGE:
        pytest.skip("it has a run of its own: make test CELL=vllm-cpu")
    assert (MODEL / "config.json").is_file(), "python -m images fetch demo --rung 135m-bf16"


def options(shm_size: str) -> dict[str, Any]:
    mount = Mount(target="/models/small", source=str(MODEL), type="bind", read_only=True)
    return {"image": IMAGE, "mounts": [mount], "shm_size": shm_size, "env": SERVED}


@pytest.fixture(scope="module")
def stage() -> Iterator[Stage]:
    with volume(model=False) as name, started(name, **options("256m")) as stage:
        stage.wait_ready(START_S)
        yield stage


def tree(stage: Stage) -> dict[str, int]:
    """Return the engine's process ids on this machine, keyed by role."""
    found = stage.container.top(ps_args="-eo pid,args")["Processes"]
    return {name: int(pid) for pid, line in found for name, words in TREE.items() if words in line}


def post(stage: Stage, path: str, body: dict[str, Any], **more: Any) -> requests.Response:
    return requests.post(stage.base + path, json=body, headers=stage.authorized(), timeout=300, **more)


def test_every_dialect_is_answered_and_what_is_none_is_refused_politely(stage: Stage) -> None:
    chat = post(stage, "/v1/chat/completions", {"messages": MESSAGES, "max_tokens": 8}).json()
    assert chat["usage"]["completion_tokens"] == 8
    assert post(stage, "/v1/responses", {"input": "Say hi", "max_output_tokens": 4}).json()["object"] == "response"
    message = post(stage, "/v1/messages", {"model": "small", "max_tokens": 4, "messages": MESSAGES}).json()
    assert (message["type"], message["usage"]["output_tokens"]) == ("message", 4)
    assert post(stage, "/tokenize", {"prompt": "one two three"}).json()["count"] == 3
    vector = post(stage, "/v1/embeddings", {"input": "a"})
    assert (vector.status_code, vector.json()["error"]["code"]) == (400, "model_gives_text")
    assert requests.post(f"{stage.base}/v1/chat/completions", json={}, timeout=60).status_code == 401


def test_no_route_of_its_own_exists_outside_but_the_safe_ones(stage: Stage) -> None:
    refused = [row for row in ANNOUNCED if row[0] not in {route.path for route in ROUTES} | OURS]
    assert {("/invocations", "POST"), ("/generative_scoring", "POST"), ("/scale_elastic_ep", "POST")} <= set(refused)
    for path, method in refused:
        url = stage.base + path.format(response_id="a")
        body = {"prompt": "a"} if method == "POST" else None
        assert requests.request(method, url, json=body, headers=stage.authorized(), timeout=60).status_code == 404, path


def test_doctor_asks_the_engine_itself_and_ends_in_what_a_start_would(stage: Stage) -> None:
    found = json.loads(stage.run("appliance", "doctor", "--json"))
    assert (found["will_start"], found["exit_code"]) == (True, 0)
    checks = {check["name"]: check for check in found["checks"]}
    assert checks["engine"]["value"].startswith("vllm 0.32.0, ")
    assert checks["model fits"]["status"] == "pass"


def test_its_cache_has_as_many_tokens_as_predicted(stage: Stage) -> None:
    (ready,) = [event for event in stage.events() if event["event"] == "ready"][:1]
    assert ready["message"].endswith("its KV cache has room for 32,896 tokens, as predicted")
    assert "vllm:kv_cache_usage_perc{" in requests.get(
        f"{stage.base}/metrics", headers=stage.authorized(), timeout=60
    ).text  # fmt: skip


@pytest.mark.parametrize("member", TREE)
def test_whichever_process_is_killed_in_mid_stream_the_client_is_told_and_it_comes_back(
    member: str, stage: Stage
) -> None:
    old, deaths = tree(stage), stage.names().count("engine_died")
    shared = set(stage.run("ls", "/dev/shm").split())
    assert old.keys() == TREE.keys()
    body = {"messages": MESSAGES, "max_tokens": 8000, "ignore_eos": True, "stream": True}
    with post(stage, "/v1/chat/completions", body, stream=True) as stream:
        lines = stream.iter_lines()
        next(lines)
        os.kill(old[member], 9)
        rest = list(lines)
    assert any(b'"error"' in line for line in rest[-4:])
    assert b"data: [DONE]" not in rest
    wait_for(lambda: stage.names().count("engine_died") == deaths + 1, START_S, stage.logs)
    stage.wait_ready(START_S)
    assert not set(old.values()) & set(tree(stage).values())
    now = set(stage.run("ls", "/dev/shm").split())
    assert len([name for name in now if name.startswith("psm_")]) == 2  # of the tree that lives
    assert not shared & now, "semaphores too"


def test_dockers_own_shared_memory_is_refused_before_anything_is_started() -> None:
    with volume(model=False) as name:
        code, words = ended(name, timeout_s=START_S, **options("64m"))
    assert code == 10
    assert "shared memory is too small for vLLM's processes: 64 MiB in /dev/shm, 256 are needed" in words
    assert "--shm-size 1g" in words
