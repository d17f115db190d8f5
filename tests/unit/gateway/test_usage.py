"""Tokens and times, as engines tell them at the edges of their answers."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from appliance.gateway.engine.upstream import FIRST_BYTES, LAST_BYTES, Response
from appliance.gateway.wire.edges import Edges, first_members, last_members
from appliance.gateway.wire.usage import Usage, parse_usage
from tests.builders import examples

CHAT_END = (
    b'data: {"choices":[{"finish_reason":"stop","index":0,"delta":{}}],"usage":{"completion_tokens":9,'
    b'"prompt_tokens":31,"total_tokens":40,"prompt_tokens_details":{"cached_tokens":12}},"timings":{"cache_n":12,'
    b'"prompt_n":19,"prompt_ms":80.5,"predicted_n":9,"predicted_ms":74.1}}\n\ndata: [DONE]\n\n'
)


@pytest.mark.parametrize(
    ("body", "usage"),
    [
        (
            CHAT_END,
            Usage(tokens_in=31, tokens_cached=12, tokens_out=9, prefill_s=0.0805, decode_s=0.0741, ending="stop"),
        ),
        # an engine that keeps prompts on disk
        (
            CHAT_END.replace(b'"cache_n":12,', b'"cache_n":12,"disk_n":8,'),
            Usage(
                tokens_in=31,
                tokens_cached=12,
                tokens_from_disk=8,
                tokens_out=9,
                prefill_s=0.0805,
                decode_s=0.0741,
                ending="stop",
            ),
        ),
        # vLLM's whole answer, with spaces and nulls
        (
            b'{"choices": [{"finish_reason": "length"}], "usage": {"prompt_tokens": 5, "completion_tokens": 2, '
            b'"prompt_tokens_details": null}}',
            Usage(tokens_in=5, tokens_out=2, ending="length"),
        ),
        # Anthropic's stream: input at its beginning, output at its end
        (
            b'event: message_start\ndata: {"type":"message_start","message":{"usage":{"cache_read_input_tokens":10,'
            b'"input_tokens":4,"output_tokens":0}}}\n\nevent: message_delta\ndata: {"type":"message_delta",'
            b'"delta":{"stop_reason":"tool_use"},"usage":{"output_tokens":7}}\n\n',
            Usage(tokens_in=14, tokens_cached=10, tokens_out=7, ending="tool_calls"),
        ),
        # the responses API
        (
            b'{"status":"incomplete","incomplete_details":{"reason":"max_output_tokens"},"usage":{"input_tokens":8,'
            b'"input_tokens_details":{"cached_tokens":3},"output_tokens":16}}',
            Usage(tokens_in=8, tokens_cached=3, tokens_out=16, ending="length"),
        ),
        (b'{"object":"list","usage":{"prompt_tokens":6,"total_tokens":6}}', Usage(tokens_in=6)),
        (b"", Usage()),
        (b'{"usage":{"prompt_tokens":', Usage()),
        (b'{"usage":{"prompt_tokens":-1,"completion_tokens":true},"timings":{"prompt_ms":"x"}}', Usage()),
    ],
)
def test_each_form_is_read(body: bytes, usage: Usage) -> None:
    assert parse_usage(whole(body)) == usage


def whole(body: bytes) -> Edges:
    return Edges(end=body, is_stream=not body.startswith(b"{"))


def received(body: bytes, *, is_stream: bool, piece_bytes: int = 700, is_cut: bool = False) -> Edges:
    """What is kept of an answer that came in pieces. `is_cut`: the connection ended before its last byte."""
    response = Response("POST")
    kind = b"text/event-stream" if is_stream else b"application/json"
    head = b"HTTP/1.1 200 OK\r\nContent-Type: %s\r\nContent-Length: %d\r\n\r\n"
    response.data_received(head % (kind, len(body) + is_cut))
    for at in range(0, len(body), piece_bytes):
        response.data_received(body[at : at + piece_bytes])
    return response.edges


def test_text_of_an_answer_is_never_read() -> None:
    text = '"usage":{"prompt_tokens":99,"completion_tokens":99},"finish_reason":"length"'
    body = json.dumps({"choices": [{"message": {"content": text}, "finish_reason": "stop"}], "usage": {}})
    assert parse_usage(whole(body.encode())) == Usage(ending="stop")


# What a client may plant in its tools, its metadata, its stop words or the arguments that it demands of a call.
PLANTED: Any = {
    "usage": {"prompt_tokens": 0, "completion_tokens": 0, "input_tokens": 0, "output_tokens": 0,
              "prompt_tokens_details": {"cached_tokens": 0}, "cache_read_input_tokens": 0},
    "timings": {"prompt_n": 0, "predicted_n": 0, "prompt_ms": 1, "predicted_ms": 1, "cache_n": 0},
    "finish_reason": "length",
    "stop_reason": "max_tokens",
    "incomplete_details": {"reason": "max_output_tokens"},
    "message": {"usage": {"input_tokens": 0}},
    "response": {"usage": {"input_tokens": 0}},
    "choices": [{"finish_reason": "length"}],
    "type": "message_start",
}  # fmt: skip
TOOL = {"type": "function", "name": "f", "parameters": {"type": "object", "properties": PLANTED, "const": PLANTED}}
OPENAI = {"prompt_tokens": 31, "completion_tokens": 9}
OTHERS = {"input_tokens": 31, "output_tokens": 9}
CHAT = {
    "id": "a",
    "object": "chat.completion",
    "choices": [{"index": 0, "message": {"content": "x", "echo": PLANTED}, "finish_reason": "stop",
                 "stop_reason": "max_tokens"}],
    "usage": OPENAI,
    "echo": PLANTED,
}  # fmt: skip
RESPONSE = {
    "object": "response", "output": [{"type": "function_call", "arguments": json.dumps(PLANTED)}], "usage": OTHERS,
    "metadata": PLANTED, "tools": [TOOL], "text": {"format": {"schema": PLANTED}}, "status": "completed",
}  # fmt: skip
MESSAGE = {
    "type": "message", "content": [{"type": "tool_use", "name": "f", "input": PLANTED}], "stop_reason": "tool_use",
    "usage": OTHERS, "echo": [PLANTED],
}  # fmt: skip


@pytest.mark.parametrize("spaces", [(",", ":"), (", ", " : ")], ids=["compact", "spaced"])
@pytest.mark.parametrize("padding", [0, 5_000, 40_000])
@pytest.mark.parametrize(
    ("document", "ending"),
    [(CHAT, "stop"), (RESPONSE, None), (MESSAGE, "tool_calls")],
    ids=["chat", "responses", "messages"],
)
@pytest.mark.parametrize("is_first", [True, False], ids=["padding first", "padding last"])
def test_a_planted_number_in_a_document_counts_for_nothing(
    document: Any, ending: str | None, padding: int, spaces: tuple[str, str], is_first: bool
) -> None:
    long = {"echo_long": [[PLANTED], 'x\\"' * padding, [PLANTED]]}
    body = json.dumps({**long, **document} if is_first else {**document, **long}, separators=spaces).encode()
    found = parse_usage(received(body, is_stream=False))
    if not padding:
        assert found == Usage(tokens_in=31, tokens_out=9, ending=ending)
    else:  # a part is missing, and may be unknown, but is never taken from elsewhere
        assert found.tokens_in in (31, None)
        assert found.tokens_out in (9, None)
        assert (found.tokens_cached, found.prefill_s, found.decode_s) == (None, None, None)
        assert found.ending in (ending, None)
    if is_first and padding:
        assert (found.tokens_in, found.tokens_out) == (31, 9), "an engine's usage at the end is kept"


@pytest.mark.parametrize("end", range(0, 700, 7))
def test_a_document_cut_off_in_a_planted_part_tells_nothing(end: int) -> None:
    body = json.dumps({"type": "message", "model": "m" * 6000, "content": [{"input": PLANTED}]}).encode()
    assert parse_usage(received(body[: len(body) - end], is_stream=False, is_cut=True)) == Usage()


def events(*documents: Any) -> bytes:
    return b"".join(
        (f"event: {document['type']}\n" if "type" in document else "").encode()
        + b"data: " + json.dumps(document).encode() + b"\n\n"
        for document in documents
    )  # fmt: skip


@pytest.mark.parametrize("padding", [0, 30_000])
@pytest.mark.parametrize(
    ("body", "ending"),
    [
        (
            events(
                {"choices": [{"delta": {"content": 'data: {"usage":{"prompt_tokens":0}}', "echo": PLANTED}}]},
                {"choices": [{"delta": {}, "finish_reason": "stop", "stop_reason": "length"}], "echo": PLANTED},
                {"choices": [], "usage": OPENAI},
            )
            + b"data: [DONE]\n\n",
            "stop",
        ),
        (
            events(
                {"type": "response.created", "response": {**RESPONSE, "usage": PLANTED["usage"]}},
                {"type": "response.output_item.done", "item": {"type": "function_call", **PLANTED, "arguments": "{}"}},
                {"type": "response.completed", "response": RESPONSE},
            ),
            None,
        ),
        (
            events(
                {
                    "type": "message_start",
                    "message": {"content": [], "usage": {"input_tokens": 31, "output_tokens": 0}},
                },
                {"type": "content_block_start", "content_block": {**PLANTED, "type": "tool_use", "input": PLANTED}},
                {"type": "message_delta", "delta": {"stop_reason": "tool_use"}, "usage": {"output_tokens": 9}},
                {"type": "message_stop"},
            ),
            "tool_calls",
        ),
    ],
    ids=["chat", "responses", "messages"],
)
def test_a_planted_number_in_a_stream_counts_for_nothing(body: bytes, ending: str | None, padding: int) -> None:
    first, mark, rest = body.partition(b"\n\n")
    long = {"type": "response.in_progress", "response": {"tools": [PLANTED, 'x\n"' * padding, TOOL], "usage": None}}
    body = first + mark + events(long) + rest if padding else body
    assert parse_usage(received(body, is_stream=True)) == Usage(tokens_in=31, tokens_out=9, ending=ending)


def test_the_end_of_an_event_that_is_longer_than_what_is_kept_is_read() -> None:
    """vLLM repeats tools and answer in the last event, and its usage after them."""
    response = {"tools": [TOOL], "output": ['x"' * LAST_BYTES, PLANTED], "usage": OTHERS, "user": None}
    body = events(
        {"type": "response.created", "response": {"usage": None}},
        {"type": "response.completed", "response": response, "sequence_number": 9},
    )
    assert parse_usage(received(body, is_stream=True, piece_bytes=50_000)) == Usage(tokens_in=31, tokens_out=9)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(st.sampled_from('\\"{}[]:,a\n'), max_size=6),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["usage", "timings", "a", '"usage"', "\\"]), inner, max_size=3)
    ),
    max_leaves=12,
)
OBJECTS = st.dictionaries(st.sampled_from(["usage", "timings", "b", "c"]), JSON, max_size=4)


@given(OBJECTS, st.integers(0, 400))
@settings(max_examples=examples(500))
def test_each_end_of_a_document_is_read_as_json_reads_it(document: dict[str, Any], cut: int) -> None:
    body = json.dumps(document).encode()
    names = frozenset({"usage", "timings"})
    for members, is_all in (
        (list(last_members(body[cut:], names)), cut == 0),
        (list(first_members(body[: len(body) - cut], names)), cut == 0),
    ):
        top = [member for member in members if member.depth == 1]
        assert all(member.value in (document[member.name], None) for member in top)
        if is_all:
            assert {member.name for member in top} == names & document.keys()
            assert {member.name: member.value for member in top} == {
                name: document[name] for name in names & document.keys()
            }


@given(st.binary(max_size=200), st.integers(0, len(CHAT_END)), st.integers(0, len(CHAT_END)), st.booleans())
@settings(max_examples=examples(300))
def test_no_bytes_fail(noise: bytes, begin: int, end: int, is_stream: bool) -> None:
    found = parse_usage(Edges(begin=noise, end=CHAT_END[begin:end] + noise, is_stream=is_stream))
    for count in (found.tokens_in, found.tokens_cached, found.tokens_out):
        assert count is None or count >= 0


@pytest.mark.parametrize("size", [10, 5_000, 40_000, 200_000])
@pytest.mark.parametrize("pieces", [1, 3, 40])
def test_the_end_of_an_answer_is_kept_however_it_comes(size: int, pieces: int) -> None:
    body = b'{"choices":[{"text":"%s","finish_reason":"length"}],"usage":{"prompt_tokens":3}}' % (b"x" * size)
    response = Response("POST")
    response.data_received(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(body))
    step = max(200, -(-len(body) // pieces))  # engines send no smaller pieces of an answer that is no stream
    for at in range(0, len(body), step):
        response.data_received(body[at : at + step])
    found = parse_usage(response.edges)
    assert (found.ending, found.tokens_in) == ("length", 3)
    assert len(response.edges.begin) <= FIRST_BYTES
    assert len(response.edges.end) <= LAST_BYTES
