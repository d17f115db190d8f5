from __future__ import annotations

import json
from typing import Any

import pytest

from appliance.abilities import judge
from appliance.abilities.answer import Answer, BrokenAnswerError, Call, read_answer, read_count
from appliance.abilities.record import Result
from appliance.abilities.rows import BOTH, REPORT, ROWS, SPECIAL, TRIP, WEATHER
from tests import json_schema

PARIS = json.dumps({"city": "Paris", "days": 2})
TRIP_MADE = {
    "stops": [{"city": "Rome", "nights": 1, "seats": ["aisle"]}],
    "by": {"kind": "train", "first_class": False},
}


def answer(*calls: tuple[str, str], text: str = "", reasoning: str = "", finish: str = "") -> Answer:
    finish = finish or ("tool_calls" if calls else "stop")
    made = tuple(Call(name=name, arguments=arguments) for name, arguments in calls)
    return Answer(text=text, reasoning=reasoning, calls=made, finish=finish)


@pytest.mark.parametrize(
    ("given", "result", "reason"),
    [
        (answer(("get_weather", PARIS)), "passed", ""),
        (answer(("get_weather", PARIS), reasoning="hm"), "passed", ""),
        (answer(text="It rains."), "failed", "no call, though one was forced"),
        (answer(("get_weather", PARIS), text="Here:"), "failed", "text beside a forced call"),
        (answer(("get_wether", PARIS)), "failed", "a tool that the request does not have"),
        (answer(("get_weather", PARIS[:-1])), "failed", "arguments are no JSON"),
        (answer(("get_weather", "[]")), "failed", "is no object"),
        (answer(("get_weather", '{"city": "Paris"}')), "failed", "lacks days"),
        (answer(("get_weather", '{"city": "Oslo", "days": 2}')), "failed", "it.city is no value of its enum"),
        (answer(("get_weather", '{"city": "Rome", "days": 2, "a": 1}')), "failed", "does not name"),
        (answer(("get_weather", PARIS), finish="stop"), "failed", "finish_reason is stop beside a call"),
        (answer(("get_weather", PARIS), finish="length"), "failed", "limit of tokens before the call was whole"),
        (answer(reasoning="hm", finish="length"), "not judged", "its reasoning took all tokens"),
        (answer(text="<|channel|>analysis", finish="length"), "not judged", "its reasoning took all tokens"),
    ],
)
def test_a_forced_call(given: Answer, result: str, reason: str) -> None:
    verdict = judge.forced_call(given, WEATHER)
    assert (verdict.result, reason in verdict.reason) == (result, True), verdict


def test_a_free_call_is_the_models_choice() -> None:
    assert judge.free_call(answer(text="It rains."), WEATHER).result is Result.NOT_JUDGED
    assert judge.free_call(answer(("get_weather", PARIS)), WEATHER) == judge.PASSED
    assert judge.free_call(answer(("get_weather", "{")), WEATHER).result is Result.FAILED
    assert judge.free_call(answer(("get_weather", "{"), finish="length"), WEATHER).result is Result.NOT_JUDGED


def test_two_calls_in_one_answer() -> None:
    one, other = ("get_weather", PARIS), ("get_weather", "{")
    assert judge.parallel_calls(answer(one, one), WEATHER) == judge.PASSED
    assert judge.parallel_calls(answer(one), WEATHER).result is Result.NOT_JUDGED
    assert judge.parallel_calls(answer(one, other), WEATHER).result is Result.FAILED
    assert judge.parallel_calls(answer(one, other, finish="length"), WEATHER).result is Result.NOT_JUDGED
    assert judge.parallel_calls(answer(other, one, finish="length"), WEATHER).result is Result.FAILED
    assert judge.parallel_calls(answer(), WEATHER).result is Result.FAILED


def test_reasoning_is_apart_or_left_in_the_text() -> None:
    assert judge.reasoning(answer(text="No.", reasoning="7 times 13"), {}) == judge.PASSED
    assert judge.reasoning(answer(text="No."), {}).result is Result.NOT_JUDGED
    assert judge.reasoning(answer(text="</think>No.", reasoning="7"), {}).result is Result.FAILED
    assert judge.no_reasoning(answer(text="No.", reasoning="7"), {}).result is Result.FAILED
    assert judge.no_reasoning(answer(text="</think>No."), {}).result is Result.FAILED
    assert judge.no_reasoning(answer(text="No."), {}) == judge.PASSED


def test_documents() -> None:
    made = {"city": "Paris", "is_capital": True, "days": [1, 3]}
    assert judge.structured(answer(text=json.dumps(made)), {}, schema=REPORT) == judge.PASSED
    for wrong in ({**made, "is_capital": 1}, {**made, "days": []}, {**made, "days": [True]}, {**made, "days": [1] * 3}):
        assert judge.structured(answer(text=json.dumps(wrong)), {}, schema=REPORT).result is Result.FAILED
    assert judge.misfit(TRIP_MADE, TRIP["plan_trip"]) == ""
    assert not json_schema.problems(TRIP_MADE, TRIP["plan_trip"])


def whole(message: dict[str, Any], finish: str = "stop") -> bytes:
    return json.dumps({"choices": [{"message": message, "finish_reason": finish}]}).encode()


def stream(*deltas: dict[str, Any], end: bytes = b"data: [DONE]\n\n") -> bytes:
    last = [{"choices": [{"delta": {}, "finish_reason": "tool_calls"}]}, {"choices": [], "usage": {"prompt_tokens": 9}}]
    events = [*({"choices": [{"delta": delta, "finish_reason": None}]} for delta in deltas), *last]
    return b"".join(b"data: %b\n\n" % json.dumps(event, ensure_ascii=False).encode() for event in events) + end


def test_a_stream_makes_the_same_answer_as_a_whole_one() -> None:
    arguments = json.dumps({"text": SPECIAL}, ensure_ascii=False)
    function = {"name": "write_note", "arguments": arguments}
    message = {"content": "a\u2028b", "reasoning": "r", "tool_calls": [{"function": function}]}
    begin = {"index": 0, "function": {"name": "write_note", "arguments": ""}}
    parts = [{"index": 0, "function": {"arguments": each}} for each in arguments]
    deltas: list[dict[str, Any]] = [
        {"reasoning_content": "r"},
        {"content": "a\u2028b"},
        *({"tool_calls": [part]} for part in [begin, *parts]),
    ]
    found = read_answer(stream(*deltas), is_stream=True)
    assert found == read_answer(whole(message, "tool_calls"), is_stream=False)
    assert json.loads(found.calls[0].arguments) == {"text": SPECIAL}


@pytest.mark.parametrize(
    ("body", "is_stream", "reason"),
    [
        (b"{", False, "has not the form of a chat completion"),
        (b'{"choices": []}', False, "has not the form of a chat completion"),
        (whole({"tool_calls": [{"function": {}}]}), False, "has not the form of a chat completion"),
        (stream(end=b""), True, "ends without [DONE]"),
        (b"", True, "ends without [DONE]"),
        (b'data: {"error": {"message": "secret"}}\n\n', True, "sent an error"),
        (b'data: {"choices": []}\n\ndata: [DONE]\n\n', True, "has no finish_reason"),
    ],
)
def test_an_answer_that_no_client_could_read(body: bytes, is_stream: bool, reason: str) -> None:
    with pytest.raises(BrokenAnswerError) as caught:
        read_answer(body, is_stream=is_stream)
    assert reason in str(caught.value)
    assert "secret" not in str(caught.value)


def test_counts() -> None:
    assert read_count(b'{"input_tokens": 12}') == 12
    with pytest.raises(BrokenAnswerError):
        read_count(b'{"tokens": 12}')


def test_rows_ask_what_they_say() -> None:
    assert len({row.name for row in ROWS}) == len(ROWS) == 12
    assert {row.name for row in ROWS if row.tools and row.is_sure} == {
        "tool_forced",
        "tool_named",
        "tool_parallel",
        "tool_nested",
        "tool_special",
    }
    named = next(row for row in ROWS if row.name == "tool_named")
    assert [each["function"]["name"] for each in named.body["tools"]] == [*BOTH]
