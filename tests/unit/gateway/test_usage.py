"""Tokens and times, as engines tell them at the edges of their answers."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from appliance.gateway.engine.upstream import FIRST_BYTES, LAST_BYTES, Response
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
        # vLLM's whole answer, with spaces and nulls
        (
            b'{"choices": [{"finish_reason": "length"}], "usage": {"prompt_tokens": 5, "completion_tokens": 2, '
            b'"prompt_tokens_details": null}}',
            Usage(tokens_in=5, tokens_out=2, ending="length"),
        ),
        # Anthropic's stream: input at its beginning, output at its end
        (
            b'event: message_start\ndata: {"message":{"usage":{"cache_read_input_tokens":10,"input_tokens":4,'
            b'"output_tokens":0}}}\n\nevent: message_delta\ndata: {"delta":{"stop_reason":"tool_use"},'
            b'"usage":{"output_tokens":7}}\n\n',
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
    assert parse_usage(body) == usage


def test_text_of_an_answer_is_never_read() -> None:
    text = '"usage":{"prompt_tokens":99,"completion_tokens":99},"finish_reason":"length"'
    body = json.dumps({"choices": [{"message": {"content": text}, "finish_reason": "stop"}], "usage": {}})
    assert parse_usage(body.encode()) == Usage(ending="stop")


@given(st.binary(max_size=200), st.integers(0, len(CHAT_END)), st.integers(0, len(CHAT_END)))
@settings(max_examples=examples(300))
def test_no_bytes_fail(noise: bytes, begin: int, end: int) -> None:
    found = parse_usage(noise + CHAT_END[begin:end] + noise)
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
    assert len(response.edges) <= FIRST_BYTES + LAST_BYTES
