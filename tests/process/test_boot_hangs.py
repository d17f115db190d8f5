"""An engine that does nothing any more: as it loads, while it is measured, in the middle of an answer, and at rest."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.process.stages.boot import Home, Serving, eventually
from tests.process.stages.front import front_of
from tests.process.stages.gateway import read_all, read_until
from tests.process.stages.vllm import family
from tests.process.stages.vllm_home import VllmHome

ENDLESS = ("--chunks", "1000000", "--chunk-interval", "0.02")
STALL_S = "2"
LAST = b"\r\n0\r\n\r\n"  # of a chunked body: the connection is kept
MESSAGES = [{"role": "user", "content": "one two three"}]


@pytest.fixture(params=["llama", "vllm"])
def home(request: pytest.FixtureRequest, tmp_path: Path) -> Home:
    if request.param == "vllm":
        return VllmHome.make(tmp_path / "home")
    made = Home.make(tmp_path / "home")
    made.set_engine(*ENDLESS)
    return made


def knobs(home: Home, llama: tuple[str, ...], vllm: tuple[str, ...]) -> None:
    home.set_engine(*(vllm if isinstance(home, VllmHome) else llama))


def tree_of(serving: Serving) -> list[int]:
    """The engine's processes, parents first."""
    return family(min(serving.engine_pids()))


def stop(pids: Sequence[int]) -> None:
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)


def has_hung(serving: Serving) -> bool:
    return any("hung and was killed" in event["message"] for event in serving.events if event["event"] == "engine_died")


def metrics(serving: Serving) -> str:
    with socket.create_connection(("127.0.0.1", serving.port), timeout=60) as connection:
        head = f"GET /metrics HTTP/1.1\r\nHost: a\r\nAuthorization: Bearer {serving.home.key}\r\n"
        connection.sendall(f"{head}Connection: close\r\n\r\n".encode())
        return read_all(connection).decode()


def assert_back(serving: Serving) -> None:
    """Check that the engine answers again, and that one hang and one restart are counted."""
    serving.wait_ready()
    if isinstance(serving.home, VllmHome):
        assert serving.chat()[0] == 200
    else:
        serving.stream().close()
    status = serving.document("status")
    assert (status["engine_restarts"], status["engine_hangs"]) == (1, 1)
    assert "appliance_engine_hangs_total 1.0" in metrics(serving)


@pytest.mark.parametrize(
    ("home", "member"),
    [("llama", None), ("vllm", None), ("vllm", 1), ("vllm", 2)],
    ids=["llama", "vllm", "core", "worker"],
    indirect=["home"],
)
def test_one_that_is_stopped_in_mid_stream_is_told_of_killed_and_started_again(home: Home, member: int | None) -> None:
    with home.serving(stall_timeout_s=STALL_S) as serving:
        serving.wait_ready()
        tree = tree_of(serving)
        with serving.stream(max_tokens=10**6) as connection:
            received = read_until(connection, b"data: ")
            stop(tree if member is None else tree[member : member + 1])
            began = time.monotonic()
            received = read_until(connection, LAST, received)
            assert time.monotonic() - began > float(STALL_S)
        error = json.loads(received.rpartition(b"data: ")[2].partition(b"\n")[0])["error"]
        assert error["code"] == "engine_died"
        assert "the engine hung while it worked on this request" in error["message"]
        eventually(lambda: has_hung(serving))
        assert_back(serving)
        assert not set(tree) & set(tree_of(serving))
        serving.terminate()


def test_readiness_tells_of_it_while_it_is_started_again(home: Home) -> None:
    with home.serving(stall_timeout_s=STALL_S) as serving:
        serving.wait_ready()
        knobs(home, ("--load-seconds", "600"), ("--fake-load-s", "600"))
        with serving.stream(max_tokens=10**6) as connection:
            read_until(connection, b"data: ")
            stop(tree_of(serving))
            assert serving.ask("GET", "/health/ready")[0] == 200
            read_until(connection, LAST)
        eventually(lambda: serving.ask("GET", "/health/ready")[0] == 503)
        document = serving.ask("GET", "/health/ready")[1]
        assert document["phase"] == "restarting"
        assert "hung" in document["message"]
        status, answer = serving.chat()
        assert (status, answer["error"]["code"]) == (503, "model_loading")


def test_one_that_is_stopped_at_rest_is_found_without_a_request(home: Home) -> None:
    with home.serving(stall_timeout_s=STALL_S) as serving:
        serving.wait_ready()
        stop(tree_of(serving))
        eventually(lambda: has_hung(serving))
        assert_back(serving)
        serving.terminate()


def test_one_that_is_stopped_and_goes_on_in_time_is_left_alone(home: Home) -> None:
    with home.serving(stall_timeout_s="3") as serving:
        serving.wait_ready()
        tree = tree_of(serving)
        with serving.stream(max_tokens=10**6) as connection:
            read_until(connection, b"data: ")
            stop(tree)
            time.sleep(0.5)  # the pause itself
            for pid in reversed(tree):
                os.kill(pid, signal.SIGCONT)
            for _ in range(200):
                read_until(connection, b"data: ")
        assert tree_of(serving) == tree
        assert not has_hung(serving)


def test_one_that_is_stopped_as_it_loads_ends_the_start(home: Home) -> None:
    knobs(home, ("--load-seconds", "600"), ("--fake-load-s", "600"))
    with home.serving(stall_timeout_s=STALL_S) as serving:
        eventually(lambda: serving.engine_pids())
        stop(serving.engine_pids())
        assert serving.wait_exit() == 43
        assert "made no progress" in serving.text.split("error: ")[-1]


def test_one_that_is_stopped_as_it_is_measured_beside_serving_ends_the_measurement(tmp_path: Path) -> None:
    home = Home.make(tmp_path / "home")
    home.set_engine("--hang-on-completion")  # a trial that lasts until it is stopped; what serves is not measured
    with home.serving(tune="idle", stall_timeout_s=STALL_S, idle_s="1") as serving:
        serving.wait_ready()
        serves = serving.engine_pids()
        eventually(lambda: set(serving.engine_pids()) - set(serves))
        trial = set(serving.engine_pids()) - set(serves)
        stop(tuple(trial))
        said = serving.event("idle_failed")["message"]
        assert "made no progress" in said
        eventually(lambda: serving.engine_pids() == serves)
        assert serving.ask("GET", "/health/ready")[0] == 200
        assert not has_hung(serving)


# With a patience that a test can wait for, which no setting has.


@pytest.mark.parametrize("is_stream", [True, False], ids=["stream", "whole"])
async def test_one_that_uses_a_core_logs_answers_health_and_makes_no_token_is_given_up(
    home: Home, is_stream: bool
) -> None:
    knobs(home, ("--works-s", "inf", "--log-every-s", "0.1"), ("--fake-mute-after", "3"))
    async with front_of(home, stall_timeout_s=1.0, patience_s=2.0) as front:
        began = time.monotonic()
        status, answer = await front.ask(messages=MESSAGES, stream=is_stream, max_tokens=100)
        assert time.monotonic() - began >= 2.0
        assert b"got nothing for" in answer
        assert b"none of them progressed" in answer
        assert b'"code":"engine_died"' in answer
        assert status == (200 if is_stream and isinstance(home, VllmHome) else 502)
        assert front.hangs == 1


async def test_clients_that_give_up_sooner_do_not_hide_it(home: Home) -> None:
    knobs(home, ("--works-s", "inf"), ("--fake-mute-after", "3"))
    async with front_of(home, stall_timeout_s=1.0, patience_s=2.0) as front:
        while not front.hangs:
            try:
                await front.ask(messages=MESSAGES, max_tokens=100, timeout_s=0.6)
            except TimeoutError:
                continue


@pytest.mark.parametrize(
    "others", [("/tokenize", {"content": "a", "prompt": "a"}), ("/v1/chat/completions", {"messages": 7})]
)
async def test_answers_that_need_no_model_do_not_hide_it(tmp_path: Path, others: tuple[str, dict[str, Any]]) -> None:
    home = Home.make(tmp_path / "home")
    home.set_engine("--works-s", "inf", "--sleeps")
    async with front_of(home, stall_timeout_s=1.5, patience_s=60.0) as front:
        waiting = asyncio.create_task(front.ask(messages=MESSAGES))
        while not waiting.done():
            if others[0] == "/tokenize":
                await front.ask(path=others[0], **others[1])
            await asyncio.sleep(0.1)
        status, answer = await waiting
        assert (status, front.hangs) == (502, 1)
        assert b"no work was seen" in answer


async def test_a_long_prefill_that_uses_a_core_lives(tmp_path: Path) -> None:
    home = Home.make(tmp_path / "home")
    home.set_engine("--works-s", "2")
    async with front_of(home, stall_timeout_s=1.0, patience_s=30.0) as front:
        assert (await front.ask(messages=MESSAGES, stream=True))[0] == 200
        assert (await front.ask(path="/v1/embeddings", input="a"))[0] == 200
        assert front.hangs == 0


async def test_a_long_answer_in_one_piece_lives_as_long_as_the_engine_tells_that_it_works(tmp_path: Path) -> None:
    home = Home.make(tmp_path / "home")
    home.set_engine("--works-s", "7", "--tells-work")
    async with front_of(home, stall_timeout_s=1.0, patience_s=3.0) as front:
        assert (await front.ask(messages=MESSAGES))[0] == 200
        assert front.hangs == 0


def test_a_client_that_does_not_read_is_no_hang(tmp_path: Path) -> None:
    home = Home.make(tmp_path / "home")
    home.set_engine("--chunks", "20000", "--chunk-interval", "0")
    with home.serving(stall_timeout_s=STALL_S) as serving:
        serving.wait_ready()
        with serving.stream() as connection:
            time.sleep(2.5)  # the engine waits for it
            assert not has_hung(serving)
            assert read_until(connection, LAST).endswith(b"data: [DONE]\n\n" + LAST)
