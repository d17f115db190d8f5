"""Three models in one container whose memory holds two: loaded on demand, and the kernel kills nothing."""

from __future__ import annotations

import os
import random
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import openai
import pytest
import requests

from tests.container.stages.containers import Stage
from tests.container.stages.three_models import NAMES, three_in_memory_for_two

STEPS = int(os.environ.get("APPLIANCE_TEST_STEPS", "40"))


@pytest.fixture
def client(stage: Stage) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{stage.base}/v1", api_key=stage.key(), max_retries=0, timeout=300) as made:
        yield made


@pytest.fixture(scope="module")
def stage() -> Iterator[Stage]:
    with three_in_memory_for_two() as made:
        yield made


def fleet(stage: Stage) -> dict[str, Any]:
    reply = stage.get("/appliance/v1/fleet", headers=stage.authorized())
    assert reply.status_code == 200
    found: dict[str, Any] = reply.json()
    return found


def kills(stage: Stage) -> bool:
    stage.container.reload()
    return bool(stage.container.attrs["State"]["OOMKilled"])


def test_the_file_names_the_models_and_the_first_is_loaded(stage: Stage) -> None:
    listed = stage.get("/v1/models", headers=stage.authorized()).json()["data"]
    assert [model["id"] for model in listed[:3]] == list(NAMES)
    assert [model["status"]["value"] for model in listed[:3]] == ["loaded", "unloaded", "unloaded"]
    refused = requests.post(
        f"{stage.base}/v1/chat/completions",
        json={"model": "delta", "messages": [{"role": "user", "content": "hi"}]},
        headers=stage.authorized(),
        timeout=60,
    )
    assert (refused.status_code, refused.json()["error"]["code"]) == (404, "model_not_found")


def test_random_requests_are_all_answered_and_nothing_is_killed(stage: Stage, client: openai.OpenAI) -> None:
    """Three clients ask random models, whole or streamed, some of which leave early."""
    rng = random.Random(7)
    lock = threading.Lock()

    def ask(_: int) -> str:
        with lock:
            name, is_stream, leaves = rng.choice(NAMES), rng.random() < 0.5, rng.random() < 0.1
            tokens = rng.choice((1, 8, 24))
        messages: Any = [{"role": "user", "content": f"Say {name}."}]
        if not is_stream:
            reply = client.chat.completions.create(model=name, messages=messages, max_tokens=tokens)
            assert reply.model == name
            return "whole"
        events = client.chat.completions.create(model=name, messages=messages, max_tokens=tokens, stream=True)
        seen = 0
        for event in events:
            assert event.model == name
            seen += 1
            if leaves:
                events.close()
                return "left"
        assert seen
        return "stream"

    with ThreadPoolExecutor(3) as pool:
        endings = list(pool.map(ask, range(STEPS)))
    assert {"whole", "stream"} <= set(endings)
    found = fleet(stage)
    rows = {row["name"]: row for row in found["models"]}
    assert sum(row["evictions"] for row in rows.values()) > 0
    assert found["waiting"] == []
    assert not kills(stage)
    assert "engine_died" not in stage.names()
    restarts = [stage.get(f"/appliance/v1/status?model={name}", headers=stage.authorized()).json() for name in NAMES]
    assert [status["engine_restarts"] for status in restarts] == [0, 0, 0]


def test_a_hundred_first_requests_make_one_load(stage: Stage, client: openai.OpenAI) -> None:
    requests.post(f"{stage.base}/models/unload", json={"model": "beta"}, headers=stage.authorized(), timeout=60)
    before = {row["name"]: row["loads"] for row in fleet(stage)["models"]}
    messages: Any = [{"role": "user", "content": "hi"}]

    def ask(_: int) -> str:
        return client.chat.completions.create(model="beta", messages=messages, max_tokens=1).model

    with ThreadPoolExecutor(100) as pool:
        assert set(pool.map(ask, range(100))) == {"beta"}
    after = {row["name"]: row["loads"] for row in fleet(stage)["models"]}
    assert after["beta"] == before["beta"] + 1
    assert not kills(stage)
