"""The pages' side of the gateway: files without a key, sessions by cookie, the stream of events."""

from __future__ import annotations

import gzip
import json
import re
import socket
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from appliance.gateway.clients.auth import Keys
from appliance.gateway.clients.connections import Limits
from appliance.gateway.face.feed import WATCHERS_MAX
from appliance.gateway.face.pages import LOGIN_BYTES_MAX, STATIC, content_of
from tests.process.stages.gateway import KEY, Answer, Stage, eventually, on_stage, read_all, read_until

HOSTILE = '</script><b>&"\x1b[2J\r\nevent: now\r\ndata: {}\r\n\r\n'
CHAT = {"messages": [{"role": "user", "content": "a secret of mine"}], "stream": True}


@pytest.fixture
def stage() -> Iterator[Stage]:
    with on_stage("fake_engine.py", documents={"status": lambda: {"note": HOSTILE}}, slots=2) as stage:
        yield stage


def own(stage: Stage) -> dict[str, str]:
    return {"Origin": stage.url}


def log_in(stage: Stage, key: str = KEY, **headers: str) -> Answer:
    return stage.ask("POST", "/login", {"key": key}, headers={**own(stage), **headers}, key=None)


def session_of(stage: Stage) -> dict[str, str]:
    """Return the headers of a page with a session, which has no key."""
    answer = log_in(stage)
    assert answer.status == 204, answer.body
    return {"Cookie": answer.headers["set-cookie"].partition(";")[0]}


def watching(stage: Stage, **headers: str) -> socket.socket:
    lines = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
    return stage.raw(f"GET /appliance/v1/events HTTP/1.1\r\nHost: 127.0.0.1:{stage.port}\r\n{lines}\r\n".encode())


def with_key(stage: Stage) -> socket.socket:
    return watching(stage, Authorization=f"Bearer {KEY}")


def events_of(received: bytes) -> list[tuple[str, Any]]:
    """Return the whole events of an answer in chunks. No event has a carriage return outside of its JSON's strings."""
    body = re.sub(rb"\r\n[0-9a-f]+\r\n", b"", received.partition(b"\r\n\r\n")[2].partition(b"\r\n")[2])
    *blocks, _ = body.split(b"\n\n")
    pairs = (block.partition(b"\ndata: ")[::2] for block in blocks if block.startswith(b"event: "))
    return [(name.decode().removeprefix("event: "), json.loads(data)) for name, data in pairs]


@pytest.mark.parametrize("path", ["/", "/chat/"])
def test_a_page_is_served_without_a_key_and_runs_only_our_scripts(stage: Stage, path: str) -> None:
    plain = stage.ask("GET", path, key=None)
    assert plain.status == 200
    policy = plain.headers["content-security-policy"]
    assert policy.startswith("default-src 'none'; script-src 'self'; style-src 'self';")
    assert "unsafe" not in policy
    assert "frame-ancestors 'none'" in policy
    assert plain.headers["x-content-type-options"] == "nosniff"
    packed = stage.ask("GET", path, key=None, headers={"Accept-Encoding": "gzip, br"})
    assert gzip.decompress(packed.body) == plain.body
    again = stage.ask("GET", path, key=None, headers={"If-None-Match": plain.headers["etag"]})
    assert (again.status, again.body) == (304, b"")
    assert b"small" not in plain.body  # the model's name


@pytest.mark.parametrize(
    ("accepted", "is_packed"),
    [("gzip", True), ("br, gzip;q=0.5", True), ("GZIP ; q=1", True), ("gzip;q=0", False), ("gzip; q=0.0, br", False),
     ("x-gzip", False), ("", False)],
)  # fmt: skip
def test_a_page_is_packed_for_who_takes_that(stage: Stage, accepted: str, is_packed: bool) -> None:
    answer = stage.ask("GET", "/", key=None, headers={"Accept-Encoding": accepted})
    assert answer.headers.get("content-encoding") == ("gzip" if is_packed else None)


def test_a_file_that_is_known_is_not_sent_again(stage: Stage) -> None:
    tag = stage.ask("GET", "/", key=None).headers["etag"]
    for known in (tag, f"W/{tag}", f'"other", {tag}'):
        assert stage.ask("GET", "/", key=None, headers={"If-None-Match": known}).status == 304
    for other in ('"other"', tag.strip('"'), ""):
        assert stage.ask("GET", "/", key=None, headers={"If-None-Match": other}).status == 200


def test_an_odd_cookie_is_no_session_and_no_fault(stage: Stage) -> None:
    session = session_of(stage)["Cookie"].encode()
    name = session.partition(b"=")[0]
    odd = [
        b"",
        b";;;",
        b"=",
        b"\xff\xfe=\xff",
        name,
        name + b"=",
        name + b"=..",
        name + b"=\xff.\xc3\xa9",
        session[:-1],
    ]
    odd += [b"x" + session, session.upper(), b";".join([name + b"="] * 300)]
    for cookie, status in [*((each, b"401") for each in odd), (b"\xff=\xff; " + session, b"200")]:
        request = b"GET /v1/models HTTP/1.1\r\nHost: a\r\nConnection: close\r\nCookie: " + cookie + b"\r\n\r\n"
        with stage.raw(request) as connection:
            assert read_all(connection).split(b" ")[1] == status, cookie


def test_each_file_of_the_pages_is_served(stage: Stage) -> None:
    names = [path.name for path in STATIC.iterdir()]
    assert {"index.html", "chat.html"} <= {*names}
    for name in names:
        answer = stage.ask("GET", f"/assets/{name}", key=None)
        assert (answer.status, answer.body) == (200, content_of(STATIC / name))


def test_only_lines_of_comments_are_left_out_and_only_of_own_scripts(tmp_path: Path) -> None:
    for path in STATIC.glob("*.js"):
        lines, left = path.read_text().splitlines(), iter(content_of(path).decode().splitlines())
        kept = next(left)
        for line in lines:
            if line == kept:
                kept = next(left, "the end")
            else:
                assert line.strip().startswith(("//", "/**", "*")), (path.name, line)
        assert kept == "the end", path.name
    library = tmp_path / "library.js"
    library.write_bytes(b"/** A licence. */\n// More of it.\n")
    assert content_of(library) == library.read_bytes()


@pytest.mark.parametrize(
    "name",
    ["", "..", "../pages.py", "%2e%2e/pages.py", "/etc/passwd", "../../../../../etc/passwd", "none.js", "a\0b", "."],
)
def test_nothing_else_is_a_file_of_the_pages(stage: Stage, name: str) -> None:
    with stage.raw(b"GET /assets/%s HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n" % name.encode()) as connection:
        head = read_all(connection).partition(b"\r\n")[0]
    assert head.split(b" ")[1] in (b"404", b"400")


def test_a_session_reads_and_its_own_page_writes(stage: Stage) -> None:
    session = session_of(stage)
    assert stage.ask("GET", "/v1/models", headers=session, key=None).status == 200
    body = {"messages": [{"role": "user", "content": "hi"}]}
    path = "/v1/chat/completions"
    assert stage.ask("POST", path, body, headers={**session, **own(stage)}, key=None).status == 200
    for foreign in ({}, {"Origin": "https://evil.example"}, {"Origin": "null"}, {"Origin": "http://127.0.0.1:1"}):
        refused = stage.ask("POST", path, body, headers={**session, **foreign}, key=None)
        assert (refused.status, refused.error["code"]) == (401, "invalid_api_key")
    out = stage.ask("POST", "/logout", headers={**session, **own(stage)}, key=None)
    assert (out.status, "Max-Age=0" in out.headers["set-cookie"]) == (204, True)


def test_a_login_needs_the_key_and_a_page_of_ours(stage: Stage) -> None:
    assert log_in(stage, key=KEY[:-1]).error["code"] == "invalid_api_key"
    assert log_in(stage, key="").error["code"] == "invalid_api_key"
    for path in ("/login", "/logout"):
        foreign = stage.ask("POST", path, {"key": KEY}, headers={"Origin": "https://evil.example"}, key=None)
        assert (foreign.status, foreign.error["code"]) == (403, "foreign_origin")
        assert "set-cookie" not in foreign.headers


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b'"x"', b'{"kex": 1}', b"[" * 3000, b"\xff"])
def test_a_login_that_is_none_is_refused(stage: Stage, body: bytes) -> None:
    answer = stage.ask("POST", "/login", body, headers=own(stage), key=None)
    assert (answer.status, answer.error["code"]) == (400, "invalid_request")
    assert KEY not in answer.error["message"]


def test_slow_logins_keep_nobody_out_and_delay_no_stop() -> None:
    with on_stage("fake_engine.py", limits=Limits(connections=24, requests=4)) as stage, ExitStack() as slow:
        own_page = f"Host: 127.0.0.1:{stage.port}\r\nOrigin: {stage.url}"
        head = f"POST /login HTTP/1.1\r\n{own_page}\r\nContent-Length: 4000\r\n\r\n"
        for _ in range(8):
            slow.enter_context(stage.raw(head.encode() + b"{"))
        eventually(lambda: open_connections(stage) > 8)
        assert (
            stage.ask("POST", "/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}]}).status == 200
        )
        last = slow.enter_context(stage.raw(head.encode() + b"{"))
        eventually(lambda: open_connections(stage) > 9)
        assert stage.drain(60.0) < 30
        assert b"x-appliance-error: shutting_down" in read_all(last)


def open_connections(stage: Stage) -> float:
    text = stage.ask("GET", "/metrics").body.decode()
    return float(text.partition("\nappliance_connections ")[2].partition("\n")[0])


def test_a_login_may_not_be_large(stage: Stage) -> None:
    answer = stage.ask("POST", "/login", b" " * (LOGIN_BYTES_MAX + 1), headers=own(stage), key=None)
    assert (answer.status, answer.error["message"]) == (413, "the request body is over the limit of 4 KiB")


def test_without_keys_every_page_is_open() -> None:
    with on_stage("fake_engine.py", keys=None) as stage:
        assert log_in(stage).status == 204
        with watching(stage) as connection:
            read_until(connection, b"event: now")


def test_a_watcher_sees_the_state_and_each_request_without_its_text(stage: Stage) -> None:
    with watching(stage, **session_of(stage)) as connection:
        received = read_until(connection, b"event: now")
        head = received.partition(b"\r\n\r\n")[0].lower()
        assert b"content-type: text/event-stream" in head
        with stage.post("/v1/chat/completions", CHAT) as chat:
            read_until(chat, b"[DONE]")
        received = read_until(connection, b"event: request\n", received)
        received = read_until(connection, b"event: now\n", received + read_until(connection, b"event: now\n"))
    events = events_of(received)
    assert [name for name, _ in events][:2] == ["requests", "status"]
    assert next(document for name, document in events if name == "status") == {"note": HOSTILE}
    now = next(document for name, document in events if name == "now")
    assert (now["model"], now["phase"], now["engine_restarts"]) == ("small", "ready", 3)
    (row,) = (document for name, document in events if name == "request")
    assert (row["model"], row["route"], row["ending"], row["status"]) == ("small", "/v1/chat/completions", "stop", 200)
    assert row["stream"]
    assert row["tokens_out"] > 0
    assert row["ttft_s"] > 0
    assert b"secret" not in received


def test_a_later_watcher_gets_the_requests_before(stage: Stage) -> None:
    for _ in range(2):
        stage.ask("POST", "/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}]})
    stage.ask("POST", "/v1/chat/completions", b"{")
    stage.ask("POST", "/tokenize", {"content": "hi"})  # needs no model
    with with_key(stage) as connection:
        events = events_of(read_until(connection, b"event: now"))
    (name, document), *_ = events
    assert name == "requests"
    assert [row["status"] for row in document["requests"]] == [400, 200, 200]
    assert [row["ending"] for row in document["requests"]] == ["error", "stop", "stop"]


def test_a_client_that_leaves_is_told_of(stage: Stage) -> None:
    with with_key(stage) as connection:
        received = read_until(connection, b"event: now")
        chat = stage.post("/v1/chat/completions", {**CHAT, "max_tokens": 10**6})
        read_until(chat, b"data: ")
        chat.close()
        received = read_until(connection, b"event: request\n", received)
        received = read_until(connection, b"event: now\n", received + read_until(connection, b"event: now\n"))
    (row,) = (document for name, document in events_of(received) if name == "request")
    assert (row["ending"], row["status"]) == ("client_left", 499)


def test_nothing_is_made_while_nobody_looks() -> None:
    asked: list[int] = []

    def status() -> dict[str, Any]:
        asked.append(1)
        return {}

    with on_stage("fake_engine.py", documents={"status": status}) as stage:
        with with_key(stage) as connection:
            read_until(connection, b"event: status")
        made = len(asked)
        assert made
        with with_key(stage) as connection:
            eventually(lambda: len(asked) > made)
            read_until(connection, b"event: now")
        eventually(lambda: stage.ask("GET", "/health").status == 200)
        made = len(asked)
        with pytest.raises(AssertionError, match="did not happen"):
            eventually(lambda: len(asked) > made + 1, timeout_s=5)


def test_a_stream_ends_when_the_appliance_stops(stage: Stage) -> None:
    with with_key(stage) as connection:
        received = read_until(connection, b"event: now")
        assert stage.drain(30.0) < 20
        events = events_of(received + read_all(connection))
    assert events[-1][0] == "now"
    assert events[-1][1]["phase"] == "stopping"


def test_two_hundred_pages_are_too_many_and_end_nothing(stage: Stage) -> None:
    with ExitStack() as open_pages:
        pages = [open_pages.enter_context(with_key(stage)) for _ in range(200)]
        heads = [read_until(page, b"\r\n\r\n") for page in pages]
        assert sum(b" 200 " in head for head in heads) == WATCHERS_MAX
        assert sum(b"x-appliance-error: too_many_watchers" in head for head in heads) == 200 - WATCHERS_MAX
        assert stage.ask("POST", "/v1/chat/completions", {"messages": []}).status in (200, 400)
        assert stage.ask("GET", "/health").status == 200

    def is_watched() -> bool:
        with with_key(stage) as connection:
            return b" 200 " in read_until(connection, b"\r\n")

    eventually(is_watched)


def test_head_of_the_stream_ends(stage: Stage) -> None:
    answer = stage.ask("HEAD", "/appliance/v1/events")
    assert (answer.status, answer.body) == (200, b"")


def test_no_key_at_all_is_needed_for_a_page_only(stage: Stage) -> None:
    with on_stage(keys=Keys(frozenset({KEY}))) as other, watching(other) as connection:
        assert b" 401 " in read_until(connection, b"\r\n")
