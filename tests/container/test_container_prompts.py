"""A conversation goes on after the container was killed, stopped, or had loaded another model in between."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from typing import Any

import docker.types
import pytest
import requests

from tests.container.stages.containers import MODEL, Stage, started, volume, wait_for
from tests.container.stages.three_models import three_in_memory_for_two

WORDS = (
    "the",
    "quick",
    "brown",
    "fox",
    "jumps",
    "over",
    "lazy",
    "dogs",
    "while",
    "seven",
    "wizards",
    "brew",
)
STOP_S = 9.0  # until a stopped container is gone
FOLDER = "/data/cache/prompts"


def prompt(seed: int, words: int = 500) -> list[dict[str, str]]:
    rng = random.Random(seed)
    return [{"role": "user", "content": " ".join(rng.choice(WORDS) for _ in range(words))}]


def ask(stage: Stage, messages: list[dict[str, str]], model: str | None = None, *, key: str = "") -> dict[str, Any]:
    body = {"messages": messages, "max_tokens": 4, "temperature": 0, **({"model": model} if model else {})}
    headers = {"Authorization": f"Bearer {key or stage.key()}", "X-Appliance-Receipt": "1"}
    reply = requests.post(f"{stage.base}/v1/chat/completions", json=body, headers=headers, timeout=300)
    assert reply.status_code == 200, reply.text
    found: dict[str, Any] = reply.json()
    return found


def saved(stage: Stage) -> list[str]:
    return [line for line in stage.run("sh", "-c", f"ls {FOLDER} || true").split() if line.endswith(".prompt")]


def assert_from_disk(answer: dict[str, Any]) -> None:
    timings, tokens = answer["timings"], answer["usage"]["prompt_tokens"]
    assert timings["disk_n"] == timings["cache_n"] == answer["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert timings["cache_n"] >= tokens - 8, timings


@pytest.fixture(scope="module")
def home() -> Iterator[str]:
    with volume() as name:
        yield name


@pytest.fixture(scope="module")
def first(home: str) -> dict[str, Any]:
    """Answer of a container that was killed once the prompt was saved."""
    with started(home) as stage:
        stage.wait_ready()
        answer = ask(stage, prompt(1))
        assert answer["timings"]["disk_n"] == 0
        wait_for(lambda: saved(stage), 60, stage.logs)
        stage.container.kill("SIGKILL")
    return answer


def test_a_killed_container_goes_on_with_the_conversation(home: str, first: dict[str, Any]) -> None:
    with started(home) as stage:
        stage.wait_ready()
        said = first["choices"][0]["message"]
        answer = ask(stage, [*prompt(1), said, {"role": "user", "content": "Go on."}])
        timings = answer["timings"]
        assert timings["disk_n"] >= first["usage"]["prompt_tokens"] - 8
        assert timings["prompt_n"] < 100
        modes = stage.run("sh", "-c", f"stat -c %a {FOLDER}/*.prompt /data/secrets/prompts").split()
        assert modes == ["600"] * len(saved(stage)) + ["640"]
        secret = stage.run("cat", "/data/secrets/prompts").strip()
        lines = stage.run("sh", "-c", "for p in /proc/[0-9]*; do tr '\\0' ' ' < $p/cmdline; echo; done")
        assert "--cache-disk-key" in lines
        assert secret not in lines
        assert secret not in stage.logs()
        assert "wizards" not in stage.logs(), "no text of a prompt"


def test_a_stop_saves_what_was_said_last_and_is_as_quick_as_before(home: str, first: dict[str, Any]) -> None:
    with started(home) as stage:
        stage.wait_ready()
        ask(stage, prompt(2))
        begun = time.monotonic()
        stage.container.stop()
        assert time.monotonic() - begun < STOP_S
        assert stage.wait_exit() == 0
    with started(home) as stage:
        stage.wait_ready()
        assert_from_disk(ask(stage, prompt(2)))
        assert_from_disk(ask(stage, prompt(1)))


def test_another_cache_type_reads_its_prompts_anew(home: str, first: dict[str, Any]) -> None:
    with started(home, env={"APPLIANCE_KV_TYPE": "q8_0"}) as stage:
        stage.wait_ready()
        assert ask(stage, prompt(1))["timings"]["cache_n"] < 16


def test_a_removed_key_takes_its_prompts_along(home: str, first: dict[str, Any]) -> None:
    with started(home) as stage:
        stage.wait_ready()
        before = saved(stage)
        key = next(word for word in stage.run("appliance", "keys", "add", "ci").split() if word.startswith("sk-"))
        wait_for(lambda: stage.get("/v1/models", headers={"Authorization": f"Bearer {key}"}).ok, 30, stage.logs)
        ask(stage, prompt(3), key=key)
        wait_for(lambda: len(saved(stage)) > len(before), 60, stage.logs)
        stage.run("appliance", "keys", "remove", "ci")
        assert saved(stage) == before


def test_a_volume_that_fills_up_stops_nothing_and_is_told_once() -> None:
    disk = docker.types.Mount("/data", None, type="tmpfs", tmpfs_size=600 * 2**20, tmpfs_mode=0o775)
    weights = docker.types.Mount("/weights", str(MODEL.parent), type="bind", read_only=True)
    env = {"APPLIANCE_MODEL": f"/weights/{MODEL.name}", "APPLIANCE_CTX_SIZE": "4096"}
    with started(None, env=env, mounts=[disk, weights]) as stage:
        stage.wait_ready()
        stage.container.exec_run(["sh", "-c", "cat /dev/zero > /data/fill"])
        ask(stage, prompt(1))
        refused = "prompt disk: not saved: the volume is full"
        wait_for(lambda: refused in stage.logs(), 60, stage.logs)
        ask(stage, prompt(2))
        time.sleep(5)  # the engine is idle long enough to try again
        assert stage.logs().count(refused) == 1
        assert stage.run("ls", "-A", FOLDER) == ""
        stage.run("rm", "/data/fill")
        ask(stage, prompt(3))
        wait_for(lambda: saved(stage), 60, stage.logs)


def test_a_model_that_was_sent_away_finds_its_prompt_again() -> None:
    with three_in_memory_for_two() as stage:
        ask(stage, prompt(1), "alpha")
        for name in ("beta", "gamma"):
            ask(stage, prompt(4, words=20), name)
        rows = stage.get("/appliance/v1/fleet", headers=stage.authorized()).json()["models"]
        assert next(row["evictions"] for row in rows if row["name"] == "alpha") > 0
        assert_from_disk(ask(stage, prompt(1), "alpha"))
