"""Receipts in answers: in the usage of a document or of a stream's last event, and nothing else changes."""

from __future__ import annotations

import itertools
import json
from typing import Any

import pytest

from appliance.gateway.wire.receipts import EVENT_BYTES, ReceiptEvents, in_document, is_asked

RECEIPT = {"plan": "context 4,096", "tokens_per_s": 9.5, "slowed_by": []}
DONE = b"data: [DONE]\n\n"


def event(document: dict[str, Any], name: str = "") -> bytes:
    head = f"event: {name}\n" if name else ""
    return f"{head}data: {json.dumps(document)}\n\n".encode()


def chunk(text: str, **more: Any) -> bytes:
    return event({"id": "c1", "model": "m", "created": 7, "choices": [{"delta": {"content": text}}], **more})


def passed(*pieces: bytes, tokens: tuple[int | None, int | None] = (None, None)) -> bytes:
    """Return what a client gets of these pieces."""
    events = ReceiptEvents()
    found = b""
    for piece in pieces:
        found += events.feed(piece)
        if events.is_at_end:
            found += events.end(RECEIPT, tokens)
    return found + events.rest()


def documents(stream: bytes) -> list[Any]:
    lines = [line for line in stream.split(b"\n") if line.startswith(b"data: {")]
    return [json.loads(line.removeprefix(b"data: ")) for line in lines]


def cuts(stream: bytes) -> list[tuple[bytes, ...]]:
    """Return the stream in one piece, in single bytes, and cut in two at each place."""
    halves = [(stream[:at], stream[at:]) for at in range(1, len(stream))]
    return [(stream,), tuple(bytes([byte]) for byte in stream), *halves]


def test_it_is_asked_for_by_a_header() -> None:
    assert is_asked([(b"x-appliance-receipt", b" 1 ")])
    for value in (b"0", b"", b"true", b"11", b"1\x00"):
        assert not is_asked([(b"x-appliance-receipt", value)])
    assert not is_asked([])


def test_a_document_keeps_its_other_fields() -> None:
    body = json.dumps({"id": "c1", "usage": {"prompt_tokens": 3}, "choices": [{"text": "é\ud83d"}]}).encode()
    found = json.loads(in_document(body, RECEIPT))
    assert found["usage"] == {"prompt_tokens": 3, "appliance": RECEIPT}
    assert {name: found[name] for name in ("id", "choices")} == {"id": "c1", "choices": [{"text": "é\ud83d"}]}
    assert json.loads(in_document(b'{"usage": null}', RECEIPT)) == {"usage": {"appliance": RECEIPT}}


@pytest.mark.parametrize("body", [b"", b"[1]", b"nothing", b'{"usage"', b"[" * 100_000, b"\xff"])
def test_what_is_no_object_is_unchanged(body: bytes) -> None:
    assert in_document(body, RECEIPT) == body


def test_the_last_chunk_with_usage_gets_it() -> None:
    stream = chunk("a") + chunk("", usage=None) + chunk("b", choices=[], usage={"prompt_tokens": 3}) + DONE
    for pieces in cuts(stream):
        found = passed(*pieces)
        assert found.endswith(b"\n\n" + DONE)
        *others, last = documents(found)
        assert last["usage"] == {"prompt_tokens": 3, "appliance": RECEIPT}
        assert others == documents(chunk("a") + chunk("", usage=None))


def test_usage_in_every_chunk_is_passed_in_order() -> None:
    stream = [chunk(text, usage={"completion_tokens": at}) for at, text in enumerate("abc")]
    found = documents(passed(*stream, DONE))
    assert [each["usage"].get("completion_tokens") for each in found] == [0, 1, 2]
    assert ["appliance" in each["usage"] for each in found] == [False, False, True]


def test_without_usage_there_is_a_chunk_of_our_own() -> None:
    found = passed(b": a comment\n\n", chunk("a"), DONE, tokens=(3, 4))
    assert found.startswith(b": a comment\n\n" + chunk("a"))
    assert documents(found)[-1] == {
        "id": "c1",
        "model": "m",
        "created": 7,
        "choices": [],
        "usage": {"prompt_tokens": 3, "completion_tokens": 4, "total_tokens": 7, "appliance": RECEIPT},
    }
    assert documents(passed(chunk("a"), DONE))[-1]["usage"] == {"appliance": RECEIPT}


def test_anthropic_s_last_usage_gets_it() -> None:
    start = event({"type": "message_start", "message": {"usage": {"input_tokens": 5}}}, "message_start")
    delta = event({"type": "message_delta", "delta": {}, "usage": {"output_tokens": 2}}, "message_delta")
    stop = event({"type": "message_stop"}, "message_stop")
    for pieces in cuts(start + delta + stop):
        found = passed(*pieces)
        assert found.startswith(start)
        assert found.endswith(stop)
        assert documents(found)[1]["usage"] == {"output_tokens": 2, "appliance": RECEIPT}


@pytest.mark.parametrize("name", ["response.completed", "response.incomplete"])
def test_the_response_s_own_usage_gets_it(name: str) -> None:
    begun = event({"type": "response.created", "response": {"usage": None}}, "response.created")
    ended = event({"type": name, "response": {"id": "r1", "usage": {"input_tokens": 1}}}, name)
    found = passed(begun, ended)
    assert found.startswith(begun)
    assert documents(found)[1]["response"] == {"id": "r1", "usage": {"input_tokens": 1, "appliance": RECEIPT}}


def test_a_text_that_looks_like_usage_is_a_text() -> None:
    text = 'data: [DONE]\n\n"usage": {"a": 1}'
    found = documents(passed(chunk(text), DONE))
    assert found[0]["choices"][0]["delta"]["content"] == text
    assert found[1]["usage"] == {"appliance": RECEIPT}


def test_a_stream_that_breaks_off_loses_nothing() -> None:
    stream = chunk("a") + chunk("b", usage={"completion_tokens": 1}) + b'data: {"half'
    for pieces in cuts(stream):
        assert passed(*pieces) == stream


@pytest.mark.parametrize("usage", [{}, {"usage": {"prompt_tokens": 3}}])
def test_events_that_pass_without_a_look_change_nothing(usage: dict[str, Any]) -> None:
    stream = [chunk("one"), chunk("two"), chunk('"usage":{'), chunk("three", **usage), DONE, b": later\n\n"]
    events, found, looked_at = ReceiptEvents(), b"", 0
    for piece in stream:
        if found and events.passes(piece):
            found += piece
            continue
        looked_at += 1
        found += events.feed(piece)
        if events.is_at_end:
            found += events.end(RECEIPT, (None, None))
    assert found == passed(*stream)
    assert looked_at == (3 if usage else 2)  # the first, that with usage, and the last


def test_what_follows_the_end_passes() -> None:
    assert passed(chunk("a"), DONE + b": later\n\n", b"more").endswith(DONE + b": later\n\nmore")


def test_a_stream_without_events_is_not_kept() -> None:
    pieces = [b"x" * 2**18] * 8
    events = ReceiptEvents()
    kept = 0
    for piece in itertools.chain(pieces):
        kept += len(piece) - len(events.feed(piece))
        assert kept <= EVENT_BYTES + 2**18
    assert kept == 0
