"""The data path: what the SDK sees, what passes, who is told when somebody leaves or dies."""

from __future__ import annotations

import asyncio
import gzip
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import aiohttp
import openai
import pytest

from appliance.console.progress import Phase, Progress
from appliance.engines.vllm.api.client_errors import ERRORS as VLLM_ERRORS
from appliance.gateway.routes.forward import ATTEMPTS_ALONE
from tests.process.stages.gateway import KEY, Stage, eventually, on_stage, read_all, read_until

MESSAGES: Any = [{"role": "user", "content": "one two three"}]
CHAT = {"model": "demo", "messages": MESSAGES}
STREAM = {**CHAT, "stream": True}


@pytest.fixture(scope="module")
def stage() -> Iterator[Stage]:
    with on_stage("fake_engine.py", "--alias", "demo", "--chunks", "6", "--chunk-interval", "0.02") as stage:
        yield stage


@pytest.fixture(scope="module")
def odd() -> Iterator[Stage]:
    with on_stage("odd_engine.py") as stage:
        yield stage


@pytest.fixture
def endless() -> Iterator[Stage]:
    with on_stage("fake_engine.py", "--chunks", "100000", "--chunk-interval", "0.02") as stage:
        yield stage


# As it should be


def test_the_metrics_tell_how_fast_streams_are_now(endless: Stage) -> None:
    """About one event every 20 ms, less on a busy machine."""

    def per_s() -> float:
        text = endless.ask("GET", "/metrics").body.decode()
        return float(text.partition("\nappliance_stream_events_per_second ")[2].partition("\n")[0])

    assert per_s() == 0.0
    with endless.post("/v1/chat/completions", STREAM):
        eventually(lambda: 1.0 < per_s() < 60.0, timeout_s=60)
    eventually(lambda: per_s() == 0.0, timeout_s=60)


def gauges(stage: Stage) -> dict[str, float]:
    lines = stage.ask("GET", "/metrics").body.decode().splitlines()
    ours = (line.removeprefix("vllm:") for line in lines if line.startswith(("vllm:num_", "vllm:kv_")))
    found = (line.partition('{model_name="small"} ') for line in ours)
    return {name: float(value) for name, _, value in found}


def test_the_metrics_tell_the_load_under_the_names_of_the_inference_gateway() -> None:
    """Three streams and two slots; the fake engine says that each stream has 1,024 of 8,192 tokens."""
    with on_stage("fake_engine.py", "--chunks", "100000", "--chunk-interval", "0.02", slots=2) as stage:
        idle = {"num_requests_waiting": 0.0, "num_requests_running": 0.0, "kv_cache_usage_perc": 0.0}
        eventually(lambda: gauges(stage) == idle)
        streams = [stage.post("/v1/chat/completions", STREAM) for _ in range(3)]
        try:
            busy = {"num_requests_waiting": 1.0, "num_requests_running": 2.0, "kv_cache_usage_perc": 0.375}
            eventually(lambda: gauges(stage) == busy)
            stage.progress = Progress(phase=Phase.LOADING)  # then none of them is with an engine
            assert gauges(stage) == {"num_requests_waiting": 3.0, "num_requests_running": 0.0}
        finally:
            stage.progress = Progress(phase=Phase.READY)
            for stream in streams:
                stream.close()
        eventually(lambda: gauges(stage) == idle)


def test_an_engine_that_does_not_tell_of_its_cache_has_no_such_gauge(stage: Stage, odd: Stage) -> None:
    assert gauges(odd) == {}  # nor is it known there how many it works on at once
    assert stage.ask("GET", "/slots").status == 404  # clients do not see what the gateway asks


def test_the_sdk_chats(stage: Stage) -> None:
    with stage.openai() as client:
        reply = client.chat.completions.create(model="demo", messages=MESSAGES)
        assert reply.choices[0].message.content == "one two three"
        assert [model.id for model in client.models.list()] == ["small"]
        assert client.models.retrieve("small").id == "small"
        assert client.embeddings.create(model="demo", input="a", encoding_format="float").data[0].embedding == [0, 1]


def test_the_sdk_streams(stage: Stage) -> None:
    with (
        stage.openai() as client,
        client.chat.completions.create(model="demo", messages=MESSAGES, stream=True) as events,
    ):
        text = "".join(event.choices[0].delta.content or "" for event in events)
    assert text == "one two three one two three "


def test_chunks_pass_as_they_arrive(tmp_path: Path) -> None:
    """The engine ends the stream only after the client has had a part of it."""
    enough = tmp_path / "enough"
    with (
        on_stage("fake_engine.py", "--until", str(enough), "--chunk-interval", "0.02") as stage,
        stage.post("/v1/chat/completions", STREAM) as connection,
    ):
        first = read_until(connection, b"one")
        assert b"[DONE]" not in first
        enough.touch()
        read_until(connection, b"[DONE]")
    head = first.partition(b"\r\n\r\n")[0].lower()
    assert b"content-type: text/event-stream" in head
    assert b"transfer-encoding: chunked" in head


def test_an_error_of_the_engine_passes_untouched(stage: Stage) -> None:
    answer = stage.ask("POST", "/v1/chat/completions", b"{not json")
    assert answer.status == 400
    assert answer.json["error"]["message"].startswith("[json.exception.parse_error.101]")
    assert "x-appliance-error" not in answer.headers


def test_an_error_that_names_a_flag_is_told_in_our_words(odd: Stage) -> None:
    answer = odd.ask("POST", "/v1/embeddings", {"act": "flag_named"})
    assert (answer.status, answer.error["code"]) == (400, "model_gives_text")
    assert "--embeddings" not in answer.error["message"]
    assert "--pooling" in answer.error["message"]
    anthropic = odd.ask("POST", "/v1/messages", {"act": "flag_named"})
    assert (anthropic.status, anthropic.json["error"]["type"]) == (400, "invalid_request_error")


def test_an_event_that_names_a_flag_is_told_in_our_words(odd: Stage) -> None:
    first, error, *rest = odd.ask("POST", "/v1/chat/completions", {"act": "flag_streamed"}).body.split(b"\n\n")
    assert first == b'data: {"choices":[]}'
    assert json.loads(error.removeprefix(b"data: "))["error"]["code"] == "model_gives_text"
    assert rest == [b""]


@pytest.fixture
def odd_vllm() -> Iterator[Stage]:
    with on_stage("odd_engine.py", errors=VLLM_ERRORS) as stage:
        yield stage


def test_an_anthropic_event_that_names_a_log_is_told_in_our_words(odd_vllm: Stage) -> None:
    name, data = odd_vllm.ask("POST", "/v1/messages", {"act": "flag_in_event"}).body.rstrip(b"\n").split(b"\n")
    assert name == b"event: error"
    error = json.loads(data.removeprefix(b"data: "))["error"]
    assert (error["type"], "stack trace" in error["message"]) == ("api_error", False)
    # The same words in an answer are the model's own.
    answer = odd_vllm.ask("POST", "/v1/chat/completions", {"act": "flag_in_text"})
    assert (answer.status, "stack trace" in answer.json["content"]) == (200, True)


async def test_64_streams_at_once(stage: Stage) -> None:
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:

        async def stream(index: int) -> str:
            body = {"messages": [{"role": "user", "content": f"stream{index}"}], "stream": True}
            url, headers = f"{stage.url}/v1/chat/completions", {"Authorization": f"Bearer {KEY}"}
            async with session.post(url, json=body, headers=headers) as response:
                return await response.text()

        texts = await asyncio.gather(*(stream(index) for index in range(64)))
    for index, text in enumerate(texts):
        assert text.count(f'"content": "stream{index} "') == 6
        assert text.endswith("data: [DONE]\n\n")


def test_kept_connections_serve_again(stage: Stage) -> None:
    request = f"GET /v1/models HTTP/1.1\r\nHost: a\r\nAuthorization: Bearer {KEY}\r\n\r\n".encode()
    with stage.raw(request) as connection:
        for _ in range(3):
            assert b"HTTP/1.1 200 " in read_until(connection, b"}]}")
            connection.sendall(request)


def test_what_does_not_pass_and_what_does(odd: Stage) -> None:
    answer = odd.ask("POST", "/tokenize", {"act": "headers"}, headers={"Origin": "https://evil.example"})
    assert set(answer.headers) == {"content-type", "content-length", "x-custom", "date"}


def test_a_compressed_reply_stays_compressed(odd: Stage) -> None:
    answer = odd.ask("POST", "/tokenize", {"act": "compressed"})
    assert answer.headers["content-encoding"] == "gzip"
    assert gzip.decompress(answer.body) == b'{"squeezed":true}'


def test_a_reply_too_long_to_hold(odd: Stage) -> None:
    answer = odd.ask("POST", "/v1/embeddings", {"act": "big"})
    assert len(answer.body) == int(answer.headers["content-length"]) == 16 * 2**20


def test_a_redirect_is_not_followed(odd: Stage) -> None:
    assert odd.ask("POST", "/tokenize", {"act": "redirect"}).status == 302


# The client leaves


def test_a_streaming_client_leaves(endless: Stage) -> None:
    with endless.post("/v1/chat/completions", STREAM) as connection:
        read_until(connection, b"two")
        eventually(lambda: endless.engine_saw()["open_streams"] == 1)
    eventually(lambda: endless.engine_saw()["disconnects"] == 1)
    assert endless.engine_saw()["open_streams"] == 0


def test_a_client_with_a_long_prompt_leaves(endless: Stage) -> None:
    """A body above uvicorn's limit pauses reading, and only who reads notices that the client has left."""
    with endless.post("/v1/completions", {"prompt": "word " * 200_000, "stream": True}) as connection:
        read_until(connection, b"data: ")
    eventually(lambda: endless.engine_saw()["disconnects"] == 1)


def test_the_sdk_leaves(endless: Stage) -> None:
    with endless.openai() as client:
        events = client.chat.completions.create(model="demo", messages=MESSAGES, stream=True)
        next(iter(events))
        events.close()
        eventually(lambda: endless.engine_saw()["disconnects"] == 1)


def test_a_waiting_client_leaves(odd: Stage) -> None:
    before = odd.engine_saw()
    with odd.post("/v1/chat/completions", {"act": "slow"}):
        eventually(lambda: odd.engine_saw()["working"] > before["working"])
    eventually(lambda: odd.engine_saw()["disconnects"] > before["disconnects"])
    counted = b'appliance_requests_total{method="POST",route="/v1/chat/completions",status="499"}'
    eventually(lambda: counted in odd.ask("GET", "/metrics").body)


def test_a_client_leaves_while_it_sends(odd: Stage) -> None:
    before = odd.engine_saw()["working"]
    head = f"POST /tokenize HTTP/1.1\r\nHost: a\r\nAuthorization: Bearer {KEY}\r\nContent-Length: 1000\r\n\r\n"
    with odd.raw(head.encode() + b'{"act"'):
        eventually(lambda: b"appliance_requests_in_flight 1.0" in odd.ask("GET", "/metrics").body)
    eventually(lambda: b"appliance_requests_in_flight 0.0" in odd.ask("GET", "/metrics").body)
    assert odd.engine_saw()["working"] == before


def test_a_slow_reader_slows_the_engine(odd: Stage) -> None:
    with odd.post("/v1/chat/completions", {"act": "flood"}) as connection:
        read_until(connection, b"data: ")
        eventually(lambda: odd.engine_saw()["flooded_bytes"] > 0)
        seen = settled(lambda: int(odd.engine_saw()["flooded_bytes"]))
        assert 0 < seen < 32 * 2**20
        connection.settimeout(60)
        rest = read_until_end_of_chunks(connection)
    assert rest > 32 * 2**20
    eventually(lambda: odd.engine_saw()["flooded_bytes"] == 64 * 2**20)


# The engine dies


def test_the_engine_is_not_there() -> None:
    with on_stage() as stage:
        answer = stage.ask("POST", "/v1/chat/completions", CHAT)
    assert (answer.status, answer.error["code"]) == (503, "engine_died")
    assert answer.headers["retry-after"] == "2"


@pytest.mark.parametrize("act", ["nothing", "torn_reply"])
def test_the_engine_dies_before_its_reply_is_whole(odd: Stage, act: str) -> None:
    answer = odd.ask("POST", "/v1/chat/completions", {"act": act})
    assert (answer.status, answer.error["code"]) == (502, "engine_died")
    assert answer.error["type"] == "service_unavailable"


def test_the_engine_dies_for_good() -> None:
    with on_stage("fake_engine.py", "--die-on-request") as stage:
        assert stage.ask("POST", "/v1/chat/completions", CHAT).status == 502
        assert stage.engine
        stage.engine.wait(60)  # its connections end a moment before its socket does
        assert stage.ask("POST", "/v1/chat/completions", CHAT).status == 503


def test_the_engine_dies_in_a_stream() -> None:
    with on_stage("fake_engine.py", "--die-on-request", "2") as stage, stage.openai() as client:
        events = client.chat.completions.create(model="demo", messages=MESSAGES, stream=True)
        with pytest.raises(openai.APIError, match="the engine ended while it worked on this request") as caught:
            list(events)
        assert caught.value.code == "engine_died"


def test_an_event_is_cut_in_the_middle(odd: Stage) -> None:
    events = odd.ask("POST", "/v1/chat/completions", {"act": "torn_event"}).body.split(b"\n\n")
    assert events[:2] == [b'data: {"choices":[]}', b'data: {"cho']
    assert json.loads(events[2].removeprefix(b"data: "))["error"]["code"] == "engine_died"
    assert events[3:] == [b""]


def test_an_anthropic_stream_is_told_in_its_own_words(odd: Stage) -> None:
    body = odd.ask("POST", "/v1/messages", {"act": "torn_event"}).body
    name, data = body.rstrip(b"\n").split(b"\n")[-2:]
    assert name == b"event: error"
    assert json.loads(data.removeprefix(b"data: "))["type"] == "error"


def test_a_body_that_can_hold_no_error_stays_torn(odd: Stage) -> None:
    with odd.post("/v1/audio/transcriptions", {"act": "torn_bytes"}) as connection:
        received = read_all(connection)
    assert received.endswith(b"4\r\nRIFF\r\n")


# The context that all share is full


def test_those_that_do_not_fit_together_are_answered_one_after_the_other(odd: Stage) -> None:
    answers: list[int] = []

    def ask() -> None:
        answers.append(odd.ask("POST", "/v1/chat/completions", {"act": "crowded"}).status)

    asked = [threading.Thread(target=ask) for _ in range(2)]
    for thread in asked:
        thread.start()
    for thread in asked:
        thread.join(60)
    assert answers == [200, 200]
    saw = odd.engine_saw()
    assert (saw["pairs"], saw["most_side_by_side"]) == (2, 1)


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages"])
def test_who_never_fits_beside_others_is_told_to_come_again(odd: Stage, path: str) -> None:
    before = odd.engine_saw()
    with odd.post("/v1/chat/completions", {"act": "slow"}):
        eventually(lambda: odd.engine_saw()["working"] > before["working"])
        answer = odd.ask("POST", path, {"act": "full"})
    assert (answer.status, answer.error["code"]) == (503, "context_full")
    assert answer.headers["retry-after"] == "2"
    assert odd.engine_saw()["crowding"] == before["crowding"] + 1 + ATTEMPTS_ALONE
    eventually(lambda: odd.engine_saw()["disconnects"] > before["disconnects"])


def test_who_crowds_itself_is_told_so(odd: Stage) -> None:
    before = odd.engine_saw()["crowding"]
    answer = odd.ask("POST", "/v1/chat/completions", {"act": "full"})
    assert (answer.status, answer.error["code"]) == (400, "context_length_exceeded")
    assert odd.engine_saw()["crowding"] == before + 2


def test_a_stream_that_runs_is_told_why_it_ends(odd: Stage) -> None:
    _, error, *rest = odd.ask("POST", "/v1/chat/completions", {"act": "full_later"}).body.split(b"\n\n")
    assert json.loads(error.removeprefix(b"data: "))["error"]["code"] == "context_full"
    assert rest == [b""]
    last = odd.ask("POST", "/v1/messages", {"act": "full_later"}).body.rstrip(b"\n").split(b"\n")
    assert last[-2] == b"event: error"
    assert b"fit into the model's context together" in last[-1]


# Helpers of the flood


def settled(figure: Callable[[], int], quiet_s: float = 0.5) -> int:
    """Return the first value that stays the same for `quiet_s`. Every buffer on the way is full then."""
    value, since = figure(), time.monotonic()

    def is_quiet() -> bool:
        nonlocal value, since
        if (now := figure()) != value:
            value, since = now, time.monotonic()
        return time.monotonic() - since > quiet_s

    eventually(is_quiet, timeout_s=60)
    return value


def read_until_end_of_chunks(connection: socket.socket) -> int:
    """The number of bytes up to the last chunk of a chunked body."""
    count, tail = 0, b""
    while not tail.endswith(b"\r\n0\r\n\r\n"):
        data = connection.recv(2**20)
        assert data
        count, tail = count + len(data), (tail + data)[-16:]
    return count
