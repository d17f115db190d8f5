"""What clients get wrong is 400 in their API's form, and what they get right is answered: the real image, by two SDKs.

The demo model with a chat template that knows tools, since its own does not.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

import anthropic
import docker
import openai
import pytest
import requests

from tests.container.stages.containers import ROOT, Stage, started, volume

TEMPLATES = ROOT / "tests/data/templates"
SECRET = "kept-out-of-the-log"
DOT = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="
CHAT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/responses", "/v1/messages"
Body = dict[str, Any]


class Api:
    """The container's API, and its log."""

    def __init__(self, stage: Stage) -> None:
        self._stage = stage
        self.base = stage.base
        self.key = stage.key()

    def post(self, path: str, body: Body | bytes) -> requests.Response:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        return requests.post(self.base + path, data=data, headers={"x-api-key": self.key}, timeout=300)

    def ok(self, path: str, body: Body) -> Any:
        answer = self.post(path, body)
        assert answer.status_code == 200, answer.text
        return answer.json()

    def refusal(self, path: str, body: Body | bytes) -> str:
        """The message of a 400, after a look at its form."""
        answer = self.post(path, body)
        assert answer.status_code == 400, answer.text
        document = answer.json()
        assert document.get("type") == ("error" if path.startswith(MESSAGES) else None)
        assert document["error"]["type"] == "invalid_request_error"
        message: str = document["error"]["message"]
        assert "json.exception" not in message
        return message

    @property
    def log(self) -> str:
        return self._stage.logs()


@pytest.fixture(scope="module")
def api() -> Iterator[Api]:
    template = docker.types.Mount("/templates", str(TEMPLATES), type="bind", read_only=True)
    # One thread: two that wait for each other are much slower beside other tests.
    env = {"APPLIANCE_CHAT_TEMPLATE_FILE": "/templates/demo-with-tools.jinja", "APPLIANCE_THREADS": "1"}
    with volume() as name, started(name, env=env, mounts=[template]) as stage:
        stage.wait_ready()
        yield Api(stage)


@pytest.fixture
def openai_client(api: Api) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{api.base}/v1", api_key=api.key, max_retries=0, timeout=300) as client:
        yield client


@pytest.fixture
def anthropic_client(api: Api) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=api.base, api_key=api.key, max_retries=0, timeout=300) as client:
        yield client


def user(text: str = "Say hi", **more: Any) -> Body:
    return {"role": "user", "content": text, **more}


def chat(*messages: Body, **more: Any) -> Body:
    return {"messages": list(messages) or [user()], "max_tokens": 6, "temperature": 0, **more}


def messages(*given: Body, **more: Any) -> Body:
    return {"model": "m", "messages": list(given) or [user()], "max_tokens": 6, "temperature": 0, **more}


def responses(given: Any = "Say hi", **more: Any) -> Body:
    return {"model": "m", "input": given, "max_output_tokens": 6, "temperature": 0, **more}


def function(name: str = "f", parameters: Any = None, **more: Any) -> Body:
    """A tool of /v1/chat/completions."""
    return {"type": "function", "function": {"name": name, "parameters": parameters or SCHEMA, **more}}


def with_property(**schema: Any) -> Body:
    return {"type": "object", "properties": {"a": schema}, "required": ["a"]}


SCHEMA = with_property(type="integer")
URL = f"data:image/png;base64,{DOT}"
F, G = function("f"), function("g", {"type": "object", "properties": {}})


# What is no JSON

NO_JSON = {
    "cut": b'{"messages": [',
    "empty": b"",
    "nope": f'{{"{SECRET}" nope'.encode(),
    "nan": b'{"messages":[{"role":"user","content":"a"}],"temperature":NaN}',
    "overflow": b'{"messages":[{"role":"user","content":"a"}],"temperature":1e400}',
    "surrogate": f'{{"messages":[{{"role":"user","content":"{SECRET} \\ud800 x"}}],"max_tokens":3}}'.encode(),
    "utf8": f'{{"messages":[{{"role":"user","content":"{SECRET}'.encode() + b'\xff"}]}',
    "trailing": b'{"messages":[{"role":"user","content":"a"}]} x',
    "array": b"[]",
    "text": f'"{SECRET}"'.encode(),
    "null": b"null",
}


@pytest.mark.parametrize("name", NO_JSON)
@pytest.mark.parametrize(
    "path", [CHAT, RESPONSES, MESSAGES, "/v1/completions", "/tokenize", "/v1/messages/count_tokens", "/apply-template"]
)
def test_no_json(api: Api, path: str, name: str) -> None:
    assert "JSON" in api.refusal(path, NO_JSON[name])


def test_where_the_json_ends(api: Api) -> None:
    assert "line 1, column 15" in api.refusal(CHAT, b'{"messages": [')


# What the client got wrong

BAD: dict[str, tuple[str, Body]] = {
    "no messages": (CHAT, {"messages": []}),
    "messages missing": (CHAT, {"max_tokens": 4}),
    "messages a text": (CHAT, {"messages": SECRET}),
    "message a text": (CHAT, {"messages": [SECRET]}),
    "no role": (CHAT, {"messages": [{"content": SECRET}]}),
    "role null": (CHAT, {"messages": [{"role": None, "content": SECRET}]}),
    "no content": (CHAT, {"messages": [{"role": "user"}]}),
    "content a number": (CHAT, {"messages": [{"role": "user", "content": 5}]}),
    "part without type": (CHAT, {"messages": [{"role": "user", "content": [{"text": SECRET}]}]}),
    "built-in tool": (CHAT, chat(tools=[{"type": "web_search", "note": SECRET}])),
    "flat tool": (CHAT, chat(tools=[{"name": "get", "parameters": {"type": "object", "properties": {}}}])),
    "flat tool with type": (CHAT, chat(tools=[{"type": "function", "name": "get", "parameters": SCHEMA}])),
    "tools an object": (CHAT, chat(tools={"a": SECRET})),
    "tool a text": (CHAT, chat(tools=[SECRET])),
    "tool without name": (CHAT, chat(tools=[{"type": "function", "function": {"description": SECRET}}])),
    "parameters a text": (CHAT, chat(tools=[function("f", SECRET)])),
    "image": (CHAT, chat({"role": "user", "content": [{"type": "image_url", "image_url": {"url": URL}}]})),
    "audio": (CHAT, chat({"role": "user", "content": [{"type": "input_audio", "input_audio": {"data": DOT}}]})),
    "video": (CHAT, chat({"role": "user", "content": [{"type": "video_url", "video_url": {"url": URL}}]})),
    "file": (CHAT, chat({"role": "user", "content": [{"type": "file", "file": {"file_id": SECRET}}]})),
    "stop a number": (CHAT, chat(stop=5)),
    "stop of numbers": (CHAT, chat(stop=[5])),
    "tool_choice a number": (CHAT, chat(tools=[F], tool_choice=5)),
    "tool_choice a word": (CHAT, chat(tools=[F], tool_choice="sometimes")),
    "tool_choice of nothing": (CHAT, chat(tools=[F], tool_choice={"type": "function"})),
    "tool_choice unknown": (CHAT, chat(tools=[F], tool_choice={"type": "function", "function": {"name": "h"}})),
    "tool_choice unknown, no tools": (CHAT, chat(tool_choice={"type": "function", "function": {"name": "h"}})),
    "required, no tools": (CHAT, chat(tool_choice="required")),
    "required, empty tools": (CHAT, chat(tools=[], tool_choice="required")),
    "call without function": (CHAT, chat(user(), {"role": "assistant", "tool_calls": [{"type": "function"}]})),
    "count": ("/v1/chat/completions/input_tokens", {"messages": []}),
    "template": ("/apply-template", {"messages": [{"content": SECRET}]}),
    "token out of the vocabulary": ("/detokenize", {"tokens": [10**9]}),
    "content a number, tokenized": ("/tokenize", {"content": 5}),
    "response_format a text": (CHAT, chat(response_format="json")),
    "part without text": (CHAT, chat({"role": "user", "content": [{"type": "text"}]})),
    "max_tokens a text": (CHAT, chat(max_tokens=SECRET)),
    "prompt an object": ("/v1/completions", {"prompt": {"a": SECRET}}),
    "no prompt": ("/v1/completions", {"max_tokens": 4}),
    "anthropic: messages missing": (MESSAGES, {"model": "m", "max_tokens": 6}),
    "anthropic: no messages": (MESSAGES, {"model": "m", "max_tokens": 6, "messages": []}),
    "anthropic: messages a text": (MESSAGES, {"model": "m", "max_tokens": 6, "messages": SECRET}),
    "anthropic: no role": (MESSAGES, messages({"content": SECRET})),
    "anthropic: no role, parts": (MESSAGES, messages({"content": [{"type": "text", "text": SECRET}]})),
    "anthropic: image": (
        MESSAGES,
        messages(
            {
                "role": "user",
                "content": [
                    {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": DOT}},
                ],
            }
        ),
    ),
    "anthropic: document": (MESSAGES, messages({"role": "user", "content": [{"type": "document", "source": {}}]})),
    "anthropic: any, no tools": (MESSAGES, messages(tool_choice={"type": "any"})),
    "anthropic: unknown tool": (
        MESSAGES,
        messages(tools=[{"name": "f", "input_schema": SCHEMA}], tool_choice={"type": "tool", "name": "h"}),
    ),
    "anthropic: tools a text": (MESSAGES, messages(tools=SECRET)),
    "anthropic: tool a text": (MESSAGES, messages(tools=[SECRET])),
    "anthropic: content a number": (MESSAGES, messages({"role": "user", "content": 5})),
    "anthropic: unknown choice": (
        MESSAGES,
        messages(tools=[{"name": "f", "input_schema": SCHEMA}], tool_choice={"type": "maybe"}),
    ),
    "anthropic: count": ("/v1/messages/count_tokens", {"model": "m"}),
    "responses: input missing": (RESPONSES, {"model": "m"}),
    "responses: no input": (RESPONSES, responses([])),
    "responses: input a number": (RESPONSES, responses(5)),
    "responses: item a text": (RESPONSES, responses([SECRET])),
    "responses: unknown item": (RESPONSES, responses([user(), {"type": "something_else", "text": SECRET}])),
    "responses: item of a store": (RESPONSES, responses([user(), {"type": "item_reference", "id": "msg_1"}])),
    "responses: tools an object": (RESPONSES, responses(tools={"a": SECRET})),
    "responses: tool a text": (RESPONSES, responses(tools=[SECRET])),
    "responses: content a number": (RESPONSES, responses([{"role": "user", "content": 5}])),
    "responses: image": (
        RESPONSES,
        responses([{"role": "user", "content": [{"type": "input_image", "image_url": URL}]}]),
    ),
    "responses: unknown format": (RESPONSES, responses(text={"format": {"type": "xml"}})),
    "responses: unknown tool": (
        RESPONSES,
        responses(
            tools=[{"type": "function", "name": "f", "parameters": SCHEMA}],
            tool_choice={"type": "function", "name": "h"},
        ),
    ),
    "responses: required, no tools": (RESPONSES, responses(tool_choice="required")),
    "responses: stored": (RESPONSES, responses(previous_response_id="resp_1")),
}


@pytest.mark.parametrize("name", BAD)
def test_bad(api: Api, name: str) -> None:
    path, body = BAD[name]
    assert SECRET not in api.refusal(path, body)


@pytest.mark.parametrize("name", [name for name in BAD if "message a text" not in name][:8])
def test_bad_in_a_stream(api: Api, name: str) -> None:
    path, body = BAD[name]
    api.refusal(path, {**body, "stream": True})


def test_bad_stays_out_of_the_log(api: Api) -> None:
    for path, body in BAD.values():
        api.post(path, body)
    for data in NO_JSON.values():
        api.post(CHAT, data)
    assert SECRET not in api.log
    assert "last read" not in api.log


# Schemas

UNREADABLE = {
    "type": with_property(type="integr"),
    "$ref": with_property(**{"$ref": "https://example.org/schema.json"}),
    "pattern": with_property(type="string", pattern="^(a$"),
    "enum": with_property(enum=[]),
    "minLength": with_property(type="string", minLength=-1),
    "anyOf": with_property(anyOf=[]),
}
UNENFORCED = {
    "not": with_property(type="string", **{"not": {"const": "x"}}),
    "multipleOf": with_property(type="integer", multipleOf=5),
    "uniqueItems": with_property(type="array", items={"type": "integer"}, uniqueItems=True),
    "patternProperties": {"type": "object", "patternProperties": {"^a": {"type": "string"}}},
    "minProperties": {"type": "object", "minProperties": 2},
    "if": {**SCHEMA, "if": {"properties": {"a": {"const": 1}}}, "then": {"required": ["b"]}},
    "pattern": with_property(type="string", pattern="^(?=.*[0-9]).+$"),
    "allOf": {**SCHEMA, "allOf": [{"required": ["b"]}]},
}


@pytest.mark.parametrize("keyword", UNREADABLE)
@pytest.mark.parametrize("choice", ["auto", "required", {"type": "function", "function": {"name": "f"}}])
def test_a_schema_that_cannot_be_read(api: Api, keyword: str, choice: Any) -> None:
    body = chat(tools=[function("f", UNREADABLE[keyword])], tool_choice=choice)
    assert keyword.lower() in api.refusal(CHAT, body).lower()


@pytest.mark.parametrize("keyword", UNENFORCED)
def test_a_schema_that_cannot_be_held(api: Api, keyword: str) -> None:
    """Refused if it is to be held: by a forced call, or by `strict`. Else a hint, as to OpenAI."""
    schema = UNENFORCED[keyword]
    forced = chat(tools=[function("f", schema)], tool_choice="required")
    assert keyword in api.refusal(CHAT, forced)
    assert keyword in api.refusal(CHAT, chat(tools=[function("f", schema, strict=True)]))
    assert keyword in api.refusal(CHAT, chat(response_format=json_format(schema, strict=True)))
    input_schema = messages(tools=[{"name": "f", "input_schema": schema}], tool_choice={"type": "any"})
    assert keyword in api.refusal(MESSAGES, input_schema)
    api.ok(CHAT, chat(tools=[function("f", schema)]))


def test_what_is_held_passes(api: Api) -> None:
    held = {
        "type": "object",
        "properties": {
            "a": {"type": "string", "pattern": "^[a-z]{2}$"},
            "b": {"type": ["integer", "null"], "minimum": 0},
            "c": {"type": "array", "items": {"$ref": "#/$defs/d"}, "maxItems": 2, "uniqueItems": False},
            "e": {"type": "object", "propertyNames": {"type": "string"}, "additionalProperties": {"type": "integer"}},
        },
        "required": ["a", "b"],
        "additionalProperties": False,
        "$defs": {"d": {"enum": ["x", 1]}},
    }
    body = chat(tools=[function("f", held, strict=True)], tool_choice="required", max_tokens=60)
    api.ok(CHAT, body)


def json_format(schema: Body, **more: Any) -> Body:
    return {"type": "json_schema", "json_schema": {"name": "x", "schema": schema, **more}}


# What the client got right

HISTORY_CALL = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}


def called(**function: Any) -> Body:
    return {**HISTORY_CALL, "function": {**HISTORY_CALL["function"], **function}}  # type: ignore[dict-item]


RESULT = {"role": "tool", "tool_call_id": "c1", "content": "2"}
LONG = {"type": "ephemeral", "ttl": "1h"}
REASONING = {"type": "reasoning", "id": "rs_1", "summary": []}
SAID = {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "x"}]}

GOOD: dict[str, tuple[str, Body]] = {
    "null fields of a tool": (
        CHAT,
        chat(
            tools=[
                {"type": "function", "function": dict.fromkeys(["description", "parameters", "strict"]) | {"name": "f"}}
            ]
        ),
    ),
    "null fields of a request": (
        CHAT,
        chat(**dict.fromkeys(["tools", "tool_choice", "stop", "response_format", "seed", "n", "logprobs", "user"])),
    ),
    "what the SDK writes of an answer": (
        CHAT,
        chat(
            user(),
            {"role": "assistant", "content": "x"}
            | dict.fromkeys(
                ["refusal", "annotations", "audio", "function_call", "tool_calls", "reasoning_content", "name"]
            ),
            user(),
        ),
    ),
    "a call of its own": (
        CHAT,
        chat(user(), {"role": "assistant", "content": None, "tool_calls": [HISTORY_CALL]}, RESULT),
    ),
    "a call without arguments": (
        CHAT,
        chat(user(), {"role": "assistant", "tool_calls": [called(arguments="")]}, RESULT),
    ),
    "a call with null arguments": (
        CHAT,
        chat(user(), {"role": "assistant", "tool_calls": [called(arguments=None)]}, RESULT),
    ),
    "a call that was cut": (
        CHAT,
        chat(user(), {"role": "assistant", "tool_calls": [called(arguments='{"a": ')]}, RESULT),
    ),
    "a call with a null id": (
        CHAT,
        chat(user(), {"role": "assistant", "tool_calls": [{**HISTORY_CALL, "id": None}]}, RESULT),
    ),
    "a refusal": (CHAT, chat(user(), {"role": "assistant", "content": [{"type": "refusal", "refusal": "no"}]}, user())),
    "parts": (CHAT, chat({"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]})),
    "auto without tools": (CHAT, chat(tool_choice="auto")),
    "none": (CHAT, chat(tools=[F], tool_choice="none")),
    "anthropic: text": (MESSAGES, messages(user("a"), {"role": "assistant", "content": "b"}, user("c"))),
    "anthropic: parts, kept for an hour": (
        MESSAGES,
        messages(
            {"role": "user", "content": [{"type": "text", "text": "a", "cache_control": LONG}]},
            system=[{"type": "text", "text": "s", "cache_control": LONG}, {"type": "text", "text": "t"}],
            tools=[{"name": "f", "description": None, "input_schema": SCHEMA, "cache_control": LONG}],
        ),
    ),
    "anthropic: a result, kept": (
        MESSAGES,
        messages(
            user(),
            {"role": "assistant", "content": [{"type": "tool_use", "id": "t1", "name": "f", "input": {"a": 1}}]},
            {
                "role": "user",
                "content": [
                    {
                        "type": "tool_result",
                        "tool_use_id": "t1",
                        "content": [{"type": "text", "text": "2", "cache_control": LONG}],
                        "cache_control": LONG,
                    },
                    {"type": "text", "text": "go on"},
                ],
            },
        ),
    ),
    "anthropic: thoughts": (
        MESSAGES,
        messages(
            user(),
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "hm", "signature": "s"},
                    {"type": "redacted_thinking", "data": "x"},
                    {"type": "text", "text": "a"},
                ],
            },
            user(),
        ),
    ),
    "anthropic: none": (
        MESSAGES,
        messages(tools=[{"name": "f", "input_schema": SCHEMA}], tool_choice={"type": "none"}),
    ),
    "responses: thoughts without content": (
        RESPONSES,
        responses([user("hi"), {**REASONING, "encrypted_content": None}, SAID, user("hi")]),
    ),
    "responses: null summary": (RESPONSES, responses([{**REASONING, "summary": None}, user("hi")])),
    "responses: thoughts in a summary": (
        RESPONSES,
        responses([user(), {**REASONING, "summary": [{"type": "summary_text", "text": "t"}]}, SAID, user()]),
    ),
    "responses: sealed thoughts": (
        RESPONSES,
        responses([user(), {**REASONING, "encrypted_content": "gAAA", "content": []}, SAID, user()]),
    ),
    "responses: thoughts": (
        RESPONSES,
        responses([user(), {**REASONING, "content": [{"type": "reasoning_text", "text": "t"}]}, SAID, user()]),
    ),
    "responses: null tools": (RESPONSES, responses("hi", tools=None)),
    "responses: null fields": (
        RESPONSES,
        responses(
            "hi", **dict.fromkeys(["instructions", "reasoning", "text", "tool_choice", "metadata", "truncation"])
        ),
    ),
    "responses: null effort": (RESPONSES, responses("hi", reasoning={"effort": None, "summary": "auto"})),
    "responses: an answer as a text": (RESPONSES, responses([user(), {"role": "assistant", "content": "x"}, user()])),
    "responses: a refusal": (
        RESPONSES,
        responses([user(), {**SAID, "content": [{"type": "refusal", "refusal": "no"}]}, user()]),
    ),
    "responses: developer after instructions": (
        RESPONSES,
        responses([{"type": "message", "role": "developer", "content": "d"}, user()], instructions="i"),
    ),
    "responses: developer between turns": (
        RESPONSES,
        responses([user(), SAID, {"type": "message", "role": "developer", "content": "d"}, user()], instructions="i"),
    ),
    "responses: Codex's tools": (
        RESPONSES,
        responses(
            "hi",
            tools=[
                {"type": "function", "name": "shell", "description": "d", "strict": False, "parameters": SCHEMA},
                {
                    "type": "custom",
                    "name": "apply_patch",
                    "format": {"type": "grammar", "syntax": "lark", "definition": "x"},
                },
                {"type": "web_search"},
            ],
            tool_choice="auto",
            parallel_tool_calls=False,
            reasoning={"summary": "auto"},
            include=["reasoning.encrypted_content"],
            store=False,
            prompt_cache_key="k",
        ),
    ),
    "responses: calls and results": (
        RESPONSES,
        responses(
            [
                user(),
                {
                    "type": "function_call",
                    "name": "f",
                    "arguments": "{}",
                    "call_id": "c1",
                    "id": "fc_1",
                    "status": "completed",
                },
                {"type": "function_call_output", "call_id": "c1", "output": "2"},
                {
                    "type": "custom_tool_call",
                    "call_id": "c2",
                    "name": "apply_patch",
                    "input": "*** Begin Patch",
                    "status": "completed",
                },
                {"type": "custom_tool_call_output", "call_id": "c2", "output": [{"type": "input_text", "text": "ok"}]},
                {
                    "type": "web_search_call",
                    "id": "ws_1",
                    "status": "completed",
                    "action": {"type": "search", "query": "q"},
                },
                user(),
            ]
        ),
    ),
}


@pytest.mark.parametrize("name", GOOD)
def test_good(api: Api, name: str) -> None:
    path, body = GOOD[name]
    api.ok(path, body)


@pytest.mark.parametrize("stop", ["", [""], ["", "x-never-said"], None, []])
def test_an_empty_stop_counts_for_nothing(api: Api, stop: Any) -> None:
    plain, stopped = api.ok(CHAT, chat()), api.ok(CHAT, chat(stop=stop))
    assert stopped["choices"][0] == plain["choices"][0]
    assert stopped["usage"]["completion_tokens"] == 6
    prompt = {"prompt": "Say hi", "max_tokens": 6, "temperature": 0}
    plain, stopped = api.ok("/v1/completions", prompt), api.ok("/v1/completions", {**prompt, "stop": stop})
    assert stopped["choices"][0]["text"] == plain["choices"][0]["text"]
    plain, stopped = api.ok(MESSAGES, messages()), api.ok(MESSAGES, messages(stop_sequences=stop))
    assert stopped["content"] == plain["content"]


@pytest.mark.parametrize(
    "spelling",
    ["a text", [{"type": "text", "text": "a text"}], [{"type": "text", "text": "a text", "cache_control": LONG}]],
)
def test_a_text_and_its_parts_are_one_prompt(api: Api, spelling: Any) -> None:
    body = {"model": "m", "messages": [{"role": "user", "content": spelling}], "system": spelling}
    plain = {"model": "m", "messages": [user("a text")], "system": "a text"}
    assert api.ok("/v1/messages/count_tokens", body) == api.ok("/v1/messages/count_tokens", plain)


@pytest.mark.parametrize(
    "given",
    [
        [{"role": "system", "content": "s"}, user()],
        [user(), {"role": "system", "content": [{"type": "text", "text": "s", "cache_control": LONG}]}],
        [user(), {"role": "assistant", "content": "a"}, {"role": "system", "content": "s"}, user()],
    ],
)
def test_system_among_anthropic_messages(api: Api, given: list[Body]) -> None:
    """Claude Code sends it. It is read, wherever it stands."""
    api.ok(MESSAGES, messages(*given, system="first"))
    without = [message for message in given if message["role"] != "system"]
    more, fewer = (api.ok("/v1/messages/count_tokens", {"model": "m", "messages": each}) for each in (given, without))
    assert more["input_tokens"] > fewer["input_tokens"]


@pytest.mark.parametrize(
    "form",
    [
        {"type": "json_schema", "name": "x", "strict": True, "schema": {**SCHEMA, "additionalProperties": False}},
        {"type": "json_schema", "name": "x", "schema": SCHEMA},
    ],
)
def test_responses_of_a_schema(api: Api, form: Body) -> None:
    answer = api.ok(RESPONSES, responses(max_output_tokens=64, text={"format": form}))
    document = json.loads(answer["output"][-1]["content"][0]["text"])
    assert isinstance(document["a"], int)


def test_responses_of_any_json(api: Api) -> None:
    answer = api.ok(RESPONSES, responses(max_output_tokens=200, text={"format": {"type": "json_object"}}))
    assert answer["output"][-1]["content"][0]["text"].lstrip().startswith("{")


# Forced calls, by the SDKs

CHOICES = ["required", {"type": "function", "function": {"name": "f"}}]
QUESTION: Any = [{"role": "user", "content": "Say hi"}]


def check(name: str | None, arguments: str, choice: Any) -> None:
    assert name == "f" or (name == "g" and (choice == "required" or choice["type"] == "any"))
    document = json.loads(arguments or "{}")
    assert isinstance(document["a"], int) if name == "f" else document == {}


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("choice", CHOICES)
def test_forced_chat(openai_client: openai.OpenAI, choice: Any, seed: int) -> None:
    asked: Any = {
        "model": "m",
        "messages": QUESTION,
        "max_tokens": 300,
        "seed": seed,
        "tools": [F, G],
        "tool_choice": choice,
        "parallel_tool_calls": False,  # a model of this size may well go on calling
    }
    [answer] = openai_client.chat.completions.create(**asked).choices
    assert answer.finish_reason == "tool_calls"
    assert not answer.message.content
    assert answer.message.tool_calls
    [call] = answer.message.tool_calls
    assert call.type == "function"
    check(call.function.name, call.function.arguments, choice)

    names: dict[int, str] = {}
    arguments: dict[int, str] = {}
    for chunk in openai_client.chat.completions.create(**asked, stream=True):
        for call in chunk.choices[0].delta.tool_calls or [] if chunk.choices else []:
            names[call.index] = names.get(call.index, "") + (call.function.name or "")
            arguments[call.index] = arguments.get(call.index, "") + (call.function.arguments or "")
    [name] = names.values()
    check(name, arguments[0], choice)


@pytest.mark.parametrize("choice", ["required", {"type": "function", "name": "f"}])
def test_forced_responses(openai_client: openai.OpenAI, choice: Any) -> None:
    tools = [{"type": "function", **each["function"]} for each in (F, G)]
    asked: Any = {"model": "m", "input": "Say hi", "max_output_tokens": 300, "tools": tools, "tool_choice": choice}
    asked["parallel_tool_calls"] = False
    calls = [item for item in openai_client.responses.create(**asked).output if item.type == "function_call"]
    assert calls
    for call in calls:
        check(call.name, call.arguments, choice)

    done = [
        event for event in openai_client.responses.create(**asked, stream=True) if event.type == "response.completed"
    ]
    [streamed, *_] = [item for item in done[-1].response.output if item.type == "function_call"]
    check(streamed.name, streamed.arguments, choice)


@pytest.mark.parametrize("choice", [{"type": "any", "disable_parallel_tool_use": True}, {"type": "tool", "name": "f"}])
def test_forced_messages(anthropic_client: anthropic.Anthropic, choice: Any) -> None:
    tools = [{"name": each["function"]["name"], "input_schema": each["function"]["parameters"]} for each in (F, G)]
    asked: Any = {"model": "m", "messages": QUESTION, "max_tokens": 300, "tools": tools, "tool_choice": choice}
    answer = anthropic_client.messages.create(**asked)
    with anthropic_client.messages.stream(**asked) as stream:
        streamed = stream.get_final_message()
    for each in (answer, streamed):
        assert each.stop_reason == "tool_use"
        call: Any = each.content[0]
        assert call.type == "tool_use"
        check(call.name, json.dumps(call.input), choice)


def test_a_named_function_is_one_call(api: Api) -> None:
    body = chat(tools=[F, G], tool_choice={"type": "function", "function": {"name": "g"}}, max_tokens=300)
    calls = api.ok(CHAT, body)["choices"][0]["message"]["tool_calls"]
    assert [call["function"]["name"] for call in calls] == ["g"]


def test_a_forced_call_has_no_response_format(api: Api) -> None:
    format_ = json_format(with_property(type="string"))
    body = chat(tools=[F], tool_choice="required", response_format=format_, max_tokens=300)
    [call, *_] = api.ok(CHAT, body)["choices"][0]["message"]["tool_calls"]
    check("f", call["function"]["arguments"], "required")


# What the SDKs make of a refusal


def test_the_sdks_do_not_repeat_a_refusal(api: Api, openai_client: openai.OpenAI, anthropic_client: Any) -> None:
    picture: Any = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": URL}}]}]
    with pytest.raises(openai.BadRequestError):
        openai_client.chat.completions.create(model="m", messages=picture)
    source: Mapping[str, Any] = {"type": "base64", "media_type": "image/png", "data": DOT}
    with pytest.raises(anthropic.BadRequestError):
        anthropic_client.messages.create(
            model="m", max_tokens=4, messages=[{"role": "user", "content": [{"type": "image", "source": source}]}]
        )
    stranger = anthropic.Anthropic(base_url=api.base, api_key="sk-wrong", max_retries=0)
    with stranger, pytest.raises(anthropic.AuthenticationError):
        stranger.messages.create(model="m", max_tokens=4, messages=QUESTION)
