from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from appliance.gateway.wire.headers import to_client, to_engine


def test_what_reaches_the_engine() -> None:
    sent = [
        (b"host", b"appliance:11435"),
        (b"authorization", b"Bearer secret"),
        (b"x-api-key", b"secret"),
        (b"cookie", b"secret"),
        (b"connection", b"keep-alive, X-Hop"),
        (b"x-hop", b"1"),
        (b"content-length", b"9"),
        (b"transfer-encoding", b"chunked"),
        (b"accept-encoding", b"gzip, br"),
        (b"x-conversation-id", b"c"),
        (b"content-type", b"application/json"),
        (b"anthropic-version", b"2023-06-01"),
        (b"user-agent", b"caf\xe9"),
    ]
    assert to_engine(sent, frozenset({b"x-conversation-id"})) == [
        (b"content-type", b"application/json"),
        (b"anthropic-version", b"2023-06-01"),
        (b"user-agent", b"caf\xe9"),
        (b"accept-encoding", b"identity"),
    ]


def test_only_the_gateway_says_whose_prompt_it_is() -> None:
    sent = [(b"x-cache-owner", b"somebody"), (b"accept", b"*/*")]
    assert to_engine(sent) == [(b"accept", b"*/*"), (b"accept-encoding", b"identity")]
    assert to_engine(sent, owner="mine")[1:] == [(b"accept-encoding", b"identity"), (b"x-cache-owner", b"mine")]


def test_what_reaches_the_client() -> None:
    sent = [
        (b"Server", b"llama.cpp"),
        (b"Access-Control-Allow-Origin", b"*"),
        (b"Set-Cookie", b"a=b"),
        (b"Connection", b"close, Content-Type"),
        (b"Content-Type", b"text/event-stream"),
        (b"X-Accel-Buffering", b"no"),
    ]
    assert to_client(sent) == [(b"content-type", b"text/event-stream"), (b"x-accel-buffering", b"no")]


def test_one_framing_only() -> None:
    assert to_client([(b"Content-Length", b"5")]) == [(b"content-length", b"5")]
    assert to_client([(b"Content-Length", b"5"), (b"Transfer-Encoding", b"chunked")]) == []


names = st.text("abcdefghijklmnopqrstuvwxyz-", min_size=1, max_size=20).map(str.encode)


@given(st.lists(st.tuples(names, st.binary(max_size=20))))
def test_no_secret_passes_whatever_stands_beside_it(others: list[tuple[bytes, bytes]]) -> None:
    passed = {name for name, _ in to_engine([*others, (b"authorization", b"Bearer k"), (b"x-api-key", b"k")])}
    assert not passed & {b"authorization", b"x-api-key", b"cookie", b"host", b"connection"}
