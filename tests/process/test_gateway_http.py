"""What HTTP asks for, and what no API can read: each refused in the form of the client's API, whatever the engine."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Iterator

import anthropic
import pytest

from appliance.documents import VALUES_MAX
from appliance.engines.vllm.api.client_errors import ERRORS as VLLM_ERRORS
from appliance.engines.vllm.api.routes import ROUTES as VLLM_ROUTES
from appliance.gateway.wire.http_answers import HEADER_BYTES_MAX, HEADERS_MAX, LINE_BYTES_MAX
from tests.process.stages.gateway import KEY, Stage, on_stage, read_all

CHAT = {"messages": [{"role": "user", "content": "hello there"}], "max_tokens": 4}
AUTHORIZATION = f"Authorization: Bearer {KEY}\r\n"


@pytest.fixture(scope="module")
def stage() -> Iterator[Stage]:
    with on_stage("fake_engine.py", "--alias", "demo") as stage:
        yield stage


@pytest.fixture(scope="module")
def vllm() -> Iterator[Stage]:
    """vLLM's routes; the fake behind them keeps the bodies that it was sent."""
    with on_stage("fake_engine.py", routes=VLLM_ROUTES, errors=VLLM_ERRORS) as stage:
        yield stage


@pytest.fixture(scope="module")
def odd() -> Iterator[Stage]:
    with on_stage("odd_engine.py") as stage:
        yield stage


def spoken(stage: Stage, head: str, body: bytes = b"") -> tuple[bytes, bytes]:
    """Head and body of the answer to a request that closes."""
    with stage.raw(head.encode("latin-1") + b"\r\n" + body) as connection:
        answer, _, text = read_all(connection).partition(b"\r\n\r\n")
    return answer.lower(), text


# HTTP


def test_a_request_without_host(stage: Stage) -> None:
    head, body = spoken(stage, f"GET /v1/models HTTP/1.1\r\n{AUTHORIZATION}Connection: close\r\n")
    assert head.startswith(b"http/1.1 400 ")
    assert json.loads(body)["error"]["code"] == "missing_host"


@pytest.mark.parametrize("hosts", ["Host: a\r\nHost: b\r\n", "Host: a\r\nhost: a\r\n"])
@pytest.mark.parametrize("version", ["1.0", "1.1"])
def test_a_request_with_two_hosts(stage: Stage, hosts: str, version: str) -> None:
    """A proxy in front may have gone by the other one."""
    head, body = spoken(stage, f"GET /v1/models HTTP/{version}\r\n{hosts}{AUTHORIZATION}Connection: close\r\n")
    assert head.split()[1] == b"400"
    assert json.loads(body)["error"]["code"] == "several_hosts"


@pytest.mark.parametrize(
    ("host", "status"), [("a b", 400), ("a/b", 400), ("u@a", 400), ("", 200), ("[::1]:80", 200), ("x_y.z:80", 200)]
)
def test_a_host_is_a_name_or_an_address(stage: Stage, host: str, status: int) -> None:
    request = f"GET /v1/models HTTP/1.1\r\nHost: {host}\r\n{AUTHORIZATION}Connection: close\r\n"
    assert int(spoken(stage, request)[0].split()[1]) == status


def test_a_body_that_is_compressed_on_its_way(stage: Stage) -> None:
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: a\r\n{AUTHORIZATION}Connection: close\r\n"
    answer, body = spoken(stage, f"{head}Transfer-Encoding: gzip, chunked\r\n", b"0\r\n\r\n")
    assert answer.split()[1] == b"415"
    assert json.loads(body)["error"]["code"] == "unsupported_encoding"


OFFER = "Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABkAAQCAAAAAAIAAAAA\r\n"


@pytest.mark.parametrize("is_split", [False, True])
@pytest.mark.parametrize("is_chunked", [False, True])
def test_an_offer_of_another_protocol_is_passed_over(stage: Stage, is_chunked: bool, is_split: bool) -> None:
    """Java's client makes it with its first request. Neither that one's body is lost nor the request after it."""
    body = json.dumps({**CHAT, "user": "java"}).encode()
    framing = b"Transfer-Encoding: chunked" if is_chunked else b"Content-Length: %d" % len(body)
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: a\r\n{AUTHORIZATION}{OFFER}".encode() + framing + b"\r\n\r\n"
    sent = b"%x\r\n%s\r\n0\r\n\r\n" % (len(body), body) if is_chunked else body
    rest = sent + head + sent + b"GET /health/live HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n"
    with stage.raw(head if is_split else head + rest) as connection:
        if is_split:
            time.sleep(0.05)  # until the header was read, which nothing shows
            connection.sendall(rest)
        answers = read_all(connection)
    assert answers.count(b"HTTP/1.1 200 OK\r\n") == 3
    assert [each["body"] for each in stage.engine_saw()["requests"][-2:]] == [body.decode()] * 2


def test_http_1_0_has_no_host(stage: Stage) -> None:
    head, _ = spoken(stage, f"GET /v1/models HTTP/1.0\r\n{AUTHORIZATION}")
    assert head.startswith(b"http/1.1 200 ")


@pytest.mark.parametrize("is_stream", [True, False])
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages"])
def test_a_client_of_http_1_0_gets_no_chunks(stage: Stage, path: str, is_stream: bool) -> None:
    """RFC 9112, 6.1: its answer ends with the connection."""
    data = json.dumps({**CHAT, "stream": is_stream}).encode()
    head, body = spoken(stage, f"POST {path} HTTP/1.0\r\n{AUTHORIZATION}Content-Length: {len(data)}\r\n", data)

    assert head.startswith(b"http/1.1 200 ")
    assert b"connection: close" in head
    assert b"transfer-encoding" not in head
    if is_stream:
        assert b"content-length" not in head
        assert all(not line or line.startswith((b"data: ", b"event: ", b":")) for line in body.split(b"\n"))
    else:
        json.loads(body)


def test_a_client_of_http_1_1_gets_chunks(stage: Stage) -> None:
    data = json.dumps({**CHAT, "stream": True}).encode()
    line = "POST /v1/chat/completions HTTP/1.1\r\nHost: a\r\nConnection: close\r\n"
    head, body = spoken(stage, f"{line}{AUTHORIZATION}Content-Length: {len(data)}\r\n", data)
    assert b"transfer-encoding: chunked" in head
    assert body.endswith(b"0\r\n\r\n")


def test_an_old_client_of_an_engine_that_dies(odd: Stage) -> None:
    data = json.dumps({"act": "torn_event"}).encode()
    line = "POST /v1/chat/completions HTTP/1.0\r\n"
    _, body = spoken(odd, f"{line}{AUTHORIZATION}Content-Length: {len(data)}\r\n", data)
    *_, last = body.rstrip(b"\n").split(b"\n\n")
    assert json.loads(last.removeprefix(b"data: "))["error"]["code"] == "engine_died"


@pytest.mark.parametrize(
    ("request_head", "dialect"),
    [
        ("BROKEN\r\n", "openai"),
        ("GET / HTTP/9.9\r\nHost: a\r\n", "openai"),
        ("POST /v1/messages HTTP/1.1\r\nHost: a\r\nContent-Length: 1\r\nContent-Length: 2\r\n", "anthropic"),
        ("POST /v1/chat/completions HTTP/1.1\r\nHost: a\r\nContent-Length: x\r\n", "openai"),
    ],
)
def test_what_is_no_http(stage: Stage, request_head: str, dialect: str) -> None:
    head, body = spoken(stage, request_head)
    assert head.startswith(b"http/1.1 400 ")
    assert b"content-type: application/json" in head
    document = json.loads(body)
    assert document["error"]["code"] == "invalid_http"
    assert document.get("type") == ("error" if dialect == "anthropic" else None)


@pytest.mark.parametrize(
    "headers",
    [
        {"X-Large": "x" * (LINE_BYTES_MAX + 1)},
        {f"X-{number}": "a" for number in range(HEADERS_MAX + 1)},
        {f"X-{number}": "a" * 2000 for number in range(HEADER_BYTES_MAX // 2000 + 1)},
    ],
)
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages", "/nowhere"])
def test_headers_over_the_limit(stage: Stage, path: str, headers: dict[str, str]) -> None:
    answer = stage.ask("POST", path, CHAT, headers=headers)
    assert (answer.status, answer.error["code"]) == (431, "header_too_large")


def test_headers_at_the_limit_reach_the_engine(stage: Stage) -> None:
    large = "x" * (LINE_BYTES_MAX - len("x-large"))
    assert stage.ask("POST", "/tokenize", {"content": "a"}, headers={"X-Large": large}).status == 200


def test_an_address_over_the_limit(stage: Stage) -> None:
    answer = stage.ask("POST", f"/tokenize?a={'a' * LINE_BYTES_MAX}", {"content": "a"})
    assert (answer.status, answer.error["code"]) == (414, "uri_too_long")


@pytest.mark.parametrize("encoding", ["gzip", "br", "Zstd", "gzip, identity"])
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages", "/appliance/v1/tuning"])
def test_a_compressed_body(stage: Stage, path: str, encoding: str) -> None:
    answer = stage.ask("POST", path, b"\x1f\x8b", headers={"Content-Encoding": encoding})
    assert (answer.status, answer.error["code"]) == (415, "unsupported_encoding")


def test_identity_is_no_compression(stage: Stage) -> None:
    headers = {"Content-Encoding": "identity"}
    assert stage.ask("POST", "/tokenize", {"content": "a"}, headers=headers).status == 200


def test_an_engine_that_refuses_without_a_word(odd: Stage) -> None:
    for path in ("/v1/chat/completions", "/v1/messages"):
        answer = odd.ask("POST", path, {"act": "refused_without_a_word"})
        assert (answer.status, answer.error["code"]) == (415, "engine_refused")


@pytest.mark.parametrize("path", ["/", "/v1/models", "/health/live", "/nowhere", "/metrics"])
def test_head_is_get_without_the_body(stage: Stage, path: str) -> None:
    get, head = stage.ask("GET", path), stage.ask("HEAD", path)
    assert (head.status, head.body) == (get.status, b"")
    assert head.headers.get("content-type") == get.headers.get("content-type")


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages", "/v1/models", "/"])
def test_other_origins_are_told_nothing(stage: Stage, path: str) -> None:
    """A browser refuses its page the answer: a preflight has no key, and nothing allows an origin."""
    asked = {"Origin": "https://page.example", "Access-Control-Request-Method": "POST"}
    preflight = stage.ask("OPTIONS", path, headers=asked, key=None)
    assert preflight.status == (405 if path == "/" else 401)  # the page itself is open, and only GET
    for answer in (preflight, stage.ask("OPTIONS", path, headers=asked), stage.ask("GET", path, headers=asked)):
        assert not [name for name in answer.headers if name.startswith("access-control-")]


# Errors of our own, and of the engine, in the form of the client's API


@pytest.mark.parametrize(
    ("method", "path", "status", "kind"),
    [
        ("POST", "/v1/messages", 401, "authentication_error"),
        ("POST", "/v1/messages/count_tokens?beta=true", 401, "authentication_error"),
        ("POST", "/v1/messages/batches", 401, "authentication_error"),
    ],
)
def test_our_401_is_anthropics(stage: Stage, method: str, path: str, status: int, kind: str) -> None:
    answer = stage.ask(method, path, CHAT, key="sk-wrong")
    assert (answer.status, answer.json["type"], answer.error["type"]) == (status, "error", kind)


@pytest.mark.parametrize(
    ("method", "path", "status", "kind"),
    [
        ("GET", "/v1/messages", 405, "invalid_request_error"),
        ("POST", "/v1/messages/batches", 404, "not_found_error"),
        ("GET", "/v1/messages/batches/msgbatch_1", 404, "not_found_error"),
    ],
)
def test_our_other_errors_are_anthropics(stage: Stage, method: str, path: str, status: int, kind: str) -> None:
    answer = stage.ask(method, path)
    assert (answer.status, answer.json["type"], answer.error["type"]) == (status, "error", kind)


@pytest.mark.parametrize("path", ["/v1/messagesx", "/v1/chat/completions", "/v1/nowhere"])
def test_other_paths_have_openais_form(stage: Stage, path: str) -> None:
    assert "type" not in stage.ask("POST", path, CHAT, key=None).json


def test_the_engines_error_is_anthropics(odd: Stage) -> None:
    answer = odd.ask("POST", "/v1/messages", {"act": "refused"})
    assert (answer.status, answer.json["type"]) == (400, "error")
    assert answer.json["error"]["type"] == "invalid_request_error"
    assert answer.json["error"]["message"] == "'messages' must not be empty"
    openais = odd.ask("POST", "/v1/chat/completions", {"act": "refused"})
    assert openais.json["error"]["code"] == 400  # as the engine wrote it


def test_the_sdk_reads_both(stage: Stage) -> None:
    client = anthropic.Anthropic(base_url=stage.url, api_key="sk-wrong", max_retries=0)
    with client, pytest.raises(anthropic.AuthenticationError) as caught:
        client.messages.create(model="m", max_tokens=4, messages=[{"role": "user", "content": "a"}])
    assert caught.value.body["error"]["type"] == "authentication_error"  # type: ignore[index]


# Bodies that vLLM would take, or fail on

NO_JSON = {
    "cut": b'{"messages": [',
    "empty": b"",
    "nope": b"{nope",
    "nan": b'{"messages":[{"role":"user","content":"a"}],"temperature":NaN}',
    "infinity": b'{"messages":[{"role":"user","content":"a"}],"temperature":-Infinity}',
    "overflow": b'{"messages":[{"role":"user","content":"a"}],"temperature":1e400}',
    "surrogate": rb'{"messages":[{"role":"user","content":"\ud800 x"}],"max_tokens":3}',
    "low surrogate": rb'{"messages":[{"role":"user","content":"\udc00 x"}],"max_tokens":3}',
    "utf8": b'{"messages":[{"role":"user","content":"SECRET\xff"}]}',
    "utf8 surrogate": b'{"messages":[{"role":"user","content":"SECRET\xed\xa0\x80"}]}',
    "trailing": b'{"messages":[{"role":"user","content":"a"}]} x',
    "deep": b"[" * 100_000,
    "array": b"[]",
    "text": b'"SECRET"',
    "no messages": b'{"messages":[]}',
    "empty lists": b'{"messages":[' + b"[]," * VALUES_MAX + b"[]]}",
}


@pytest.mark.parametrize("name", NO_JSON)
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages"])
def test_what_is_no_request(vllm: Stage, path: str, name: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    answer = vllm.ask("POST", path, NO_JSON[name])
    assert (answer.status, answer.error["code"]) == (400, "invalid_request")
    assert answer.error["type"] == "invalid_request_error"
    assert "SECRET" not in answer.error["message"] + caplog.text
    assert not [seen for seen in vllm.engine_saw()["requests"] if seen["path"] == path]


@pytest.mark.parametrize(
    "body",
    [
        json.dumps({"content": "\U0001f600 \\ud800 NaN Infinity 1e400", "n": 1e-300}).encode(),
        b'\xef\xbb\xbf {"content": "\\ud83d\\ude00", "content": "twice"}\n',
    ],
)
def test_what_is_one_passes_byte_for_byte(vllm: Stage, body: bytes) -> None:
    assert vllm.ask("POST", "/tokenize", body).status == 200
    assert vllm.engine_saw()["requests"][-1]["body"].encode() == body
