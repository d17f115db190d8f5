"""Answers of our own API as answers of Ollama's."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from appliance.gateway.wire.ollama.answers import AnswerError, Lines, Writer, error_text, whole
from appliance.gateway.wire.ollama_paths import CHAT, EMBED, EMBEDDINGS, GENERATE

USAGE = {"prompt_tokens": 12, "completion_tokens": 3, "total_tokens": 15}
TIMINGS = {"cache_n": 4, "prompt_n": 8, "prompt_ms": 20.0, "predicted_n": 3, "predicted_ms": 30.0}


class Clock:
    """A clock that a test moves."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def event(document: Any) -> bytes:
    return f"data: {json.dumps(document)}\n\n".encode()


def delta(finish: str | None = None, **said: Any) -> bytes:
    return event({"choices": [{"index": 0, "delta": said, "finish_reason": finish}]})


def call(number: int, arguments: str, **named: str) -> dict[str, Any]:
    return {"index": number, **({"id": named["id"]} if "id" in named else {}), "type": "function",
            "function": {"arguments": arguments, **({"name": named["name"]} if "name" in named else {})}}  # fmt: skip


END = event({"choices": [], "usage": USAGE, "timings": TIMINGS}) + b"data: [DONE]\n\n"


def lines_of(*pieces: bytes, kind: str = CHAT) -> list[dict[str, Any]]:
    lines = Lines(Writer(kind, "m"))
    made = b"".join([*(lines.feed(piece) for piece in pieces), lines.end()])
    assert made.endswith(b"\n")
    return [json.loads(line) for line in made.splitlines()]


def without_times(lines: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    varies = ("created_at", "total_duration")
    return [{name: value for name, value in line.items() if name not in varies} for line in lines]


def test_each_event_is_a_line_and_the_last_has_the_figures() -> None:
    first, second, last = lines_of(delta(content="one "), delta(content="two"), delta("stop"), END)
    assert first["message"] == {"role": "assistant", "content": "one "}
    assert (first["model"], first["done"]) == ("m", False)
    assert second["message"]["content"] == "two"
    assert last["message"] == {"role": "assistant", "content": ""}
    assert last["total_duration"] >= 0
    assert without_times([last])[0] == {
        "model": "m",
        "message": {"role": "assistant", "content": ""},
        "done": True,
        "done_reason": "stop",
        "prompt_eval_count": 12,
        "prompt_eval_duration": 20_000_000,
        "eval_count": 3,
        "eval_duration": 30_000_000,
    }


def test_a_line_is_made_as_soon_as_its_event_is_complete() -> None:
    lines = Lines(Writer(CHAT, "m"))
    data = delta(content="one")
    assert lines.feed(data[:-1]) == b""
    assert b'"content":"one"' in lines.feed(data[-1:])


def test_times_that_no_engine_tells_are_those_that_were_seen() -> None:
    clock = Clock()
    lines = Lines(Writer(GENERATE, "m", clock))
    clock.now += 2
    lines.feed(event({"choices": [{"index": 0, "text": "one", "finish_reason": None}]}))
    clock.now += 3
    lines.feed(event({"choices": [{"index": 0, "text": "", "finish_reason": "length"}], "usage": USAGE}))
    last = json.loads(lines.feed(b"data: [DONE]\n\n"))
    assert last["done_reason"] == "length"
    assert (last["prompt_eval_duration"], last["eval_duration"]) == (2 * 10**9, 3 * 10**9)
    assert (last["total_duration"], last["eval_count"]) == (5 * 10**9, 3)


@pytest.mark.parametrize("field", ["reasoning_content", "reasoning"])
def test_reasoning_is_thinking(field: str) -> None:
    thought, said, _ = lines_of(delta(**{field: "hm"}), delta("stop", content="yes"), END)
    assert thought["message"] == {"role": "assistant", "content": "", "thinking": "hm"}
    assert said["message"] == {"role": "assistant", "content": "yes"}
    thought, *_ = lines_of(delta(**{field: "hm"}), delta("stop"), END, kind=GENERATE)
    assert (thought["response"], thought["thinking"]) == ("", "hm")


def test_a_call_is_one_line_once_its_arguments_are_complete() -> None:
    first, second, last = lines_of(
        delta(tool_calls=[call(0, "", id="a", name="one")]),
        delta(tool_calls=[call(0, '{"x"')]),
        delta(tool_calls=[call(0, ":1}")]),
        delta(tool_calls=[call(1, "", id="b", name="two")]),
        delta("tool_calls"),
        END,
    )
    assert first["message"]["tool_calls"] == [
        {"id": "a", "function": {"index": 0, "name": "one", "arguments": {"x": 1}}}
    ]
    assert second["message"]["tool_calls"] == [{"id": "b", "function": {"index": 1, "name": "two", "arguments": {}}}]
    assert last["done_reason"] == "stop"


def test_a_call_that_was_cut_short_is_an_error_in_words() -> None:
    (line,) = lines_of(delta(tool_calls=[call(0, '{"x": "ab', id="a", name="one")]), delta("length"), END)
    assert line == {"error": "the model's call of 'one' has arguments that are not a JSON object, perhaps cut short"}


def test_a_comment_is_an_empty_part_which_keeps_the_client_waiting() -> None:
    first, *_ = lines_of(b": loading 40 %\n\n", delta("stop", content="one"), END)
    assert (first["message"]["content"], first["done"]) == ("", False)


def test_an_error_is_the_last_line() -> None:
    error = {"error": {"message": "the engine ended", "type": "service_unavailable", "code": "engine_died"}}
    assert lines_of(delta(content="one"), event(error), END)[1:] == [{"error": "the engine ended"}]


@pytest.mark.parametrize(
    "pieces", [[], [delta(content="a")], [b'data: {"cho'], [b"data: [DONE]\n\n"], [b"data: 7\n\n"]]
)
def test_a_stream_without_its_end_is_never_done(pieces: list[bytes]) -> None:
    lines = Lines(Writer(CHAT, "m"))
    made = b"".join([*map(lines.feed, pieces), lines.end()])
    last = json.loads(made.splitlines()[-1])
    assert set(last) == {"error"}
    assert lines.has_failed


def test_log_probabilities_keep_their_form() -> None:
    entry = {"token": "one", "logprob": -0.5, "bytes": [111], "top_logprobs": []}
    choice = {"index": 0, "delta": {"content": "one"}, "logprobs": {"content": [entry]}, "finish_reason": "stop"}
    assert lines_of(event({"choices": [choice]}), END)[0]["logprobs"] == [entry]


def test_a_receipt_is_in_the_last_line() -> None:
    end = event({"choices": [], "usage": {**USAGE, "appliance": {"plan": "p"}}}) + b"data: [DONE]\n\n"
    assert lines_of(delta("stop", content="a"), end)[-1]["appliance"] == {"plan": "p"}


EVENTS = st.sampled_from([
    delta(role="assistant", content=None),
    delta(content="größe\n\n"),
    delta(reasoning_content="hm"),
    delta(tool_calls=[call(0, '{"a":1}', id="a", name="one")]),
    b": a comment\n\n",
    delta("stop"),
    END,
    END.replace(b"\n", b"\r\n"),
])  # fmt: skip


@given(st.lists(EVENTS, max_size=8), st.data())
def test_how_a_stream_is_cut_into_pieces_changes_nothing(events: list[bytes], data: st.DataObject) -> None:
    stream = b"".join(events)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=6)))
    pieces = [stream[begin:end] for begin, end in zip([0, *cuts], [*cuts, len(stream)], strict=True)]
    clock = Clock()
    outs = []
    for cut in ([stream], pieces):
        lines = Lines(Writer(CHAT, "m", clock))
        made = b"".join([*map(lines.feed, cut), lines.end()])
        outs.append(without_times([json.loads(line) for line in made.splitlines()]))
    assert outs[0] == outs[1]
    ends = [line for line in outs[0] if "error" in line or line["done"]]
    assert ends == outs[0][-1:]


@given(st.lists(st.binary(max_size=40) | st.just(b"data: {}\n\n") | st.just(b'data: {"choices":[{"delta":[]}]}\n\n')))
def test_whatever_an_engine_sends_becomes_lines_of_json(pieces: list[bytes]) -> None:
    lines = Lines(Writer(CHAT, "m"))
    made = b"".join([*map(lines.feed, pieces), lines.end()])
    assert all(isinstance(json.loads(line), dict) for line in made.splitlines())


def answer(kind: str, document: Any) -> dict[str, Any]:
    return whole(Writer(kind, "m"), kind, json.dumps(document).encode())


def test_an_answer_in_one_piece() -> None:
    said = {
        "role": "assistant",
        "content": None,
        "reasoning_content": "hm",
        "tool_calls": [{"id": "a", "type": "function", "function": {"name": "one", "arguments": '{"x":1}'}}],
    }
    choices = [{"index": 0, "message": said, "finish_reason": "tool_calls"}]
    found = answer(CHAT, {"choices": choices, "usage": USAGE, "timings": TIMINGS})
    assert without_times([found])[0] == {
        "model": "m",
        "message": {
            "role": "assistant",
            "content": "",
            "thinking": "hm",
            "tool_calls": [{"id": "a", "function": {"index": 0, "name": "one", "arguments": {"x": 1}}}],
        },
        "done": True,
        "done_reason": "stop",
        "prompt_eval_count": 12,
        "prompt_eval_duration": 20_000_000,
        "eval_count": 3,
        "eval_duration": 30_000_000,
    }


def test_an_answer_in_one_piece_without_timings_has_no_invented_ones() -> None:
    found = answer(GENERATE, {"choices": [{"text": "one", "finish_reason": "length"}], "usage": USAGE})
    assert (found["response"], found["done_reason"], found["eval_count"]) == ("one", "length", 3)
    assert "eval_duration" not in found


def test_what_the_text_of_an_answer_says_of_usage_is_text() -> None:
    text = '{"usage": {"prompt_tokens": 99}} "timings": {"predicted_n": 98}'
    found = answer(CHAT, {"choices": [{"message": {"content": text}, "finish_reason": "stop"}], "usage": USAGE})
    assert (found["prompt_eval_count"], found["eval_count"]) == (12, 3)


def test_vectors_come_in_the_order_of_their_numbers() -> None:
    data = [{"index": 1, "embedding": [2.0]}, {"index": 0, "embedding": [1.0]}]
    found = answer(EMBED, {"data": data, "usage": {"prompt_tokens": 5}})
    assert (found["embeddings"], found["prompt_eval_count"]) == ([[1.0], [2.0]], 5)
    assert answer(EMBEDDINGS, {"data": data}) == {"embedding": [1.0]}


@pytest.mark.parametrize(
    "body", [b"", b"[]", b"{}", b'{"choices":[]}', b'{"choices":[{"message":{"tool_calls":[1]}}]}']
)
def test_an_answer_that_is_not_understood_is_an_error(body: bytes) -> None:
    for kind in (CHAT, EMBED):
        with pytest.raises(AnswerError, match="not understood"):
            whole(Writer(kind, "m"), kind, body)


@pytest.mark.parametrize(
    ("body", "text"),
    [
        (b'{"error":{"message":"too long","type":"t","code":400}}', "too long"),
        (b'{"error":"too long"}', "too long"),
        (b'{"object":"error","message":"too long"}', "too long"),
        (b'{"detail":"too long"}', "too long"),
        (b"<html>", "the engine refused this request with status 418 and gave no reason"),
        (b"[1]", "the engine refused this request with status 418 and gave no reason"),
    ],
)
def test_an_error_of_any_form_is_one_sentence(body: bytes, text: str) -> None:
    assert error_text(body, 418) == text
