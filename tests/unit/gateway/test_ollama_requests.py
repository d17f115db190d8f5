"""Requests of Ollama's API as requests to our own."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from appliance.gateway.wire.api_error import ApiError
from appliance.gateway.wire.ollama.requests import OUR_CHAT, OUR_TEXT, OUR_VECTORS, Asked, is_zero, translate
from appliance.gateway.wire.ollama_paths import CHAT, EMBED, EMBEDDINGS, GENERATE, WORK

HELLO = {"role": "user", "content": "hello"}
STREAMS = {"stream": True, "stream_options": {"include_usage": True}}


def asked(kind: str, **fields: Any) -> Asked:
    return translate(kind, json.dumps({"model": "m", **fields}).encode())


def chat(**fields: Any) -> dict[str, Any]:
    """Return the body of a chat that is not streamed."""
    return asked(CHAT, messages=[HELLO], stream=False, **fields).body


def refusal(kind: str, **fields: Any) -> str:
    with pytest.raises(ApiError) as caught:
        asked(kind, **fields)
    assert caught.value.status == 400
    return caught.value.detail


def status_of(kind: str, body: bytes) -> int:
    """Return the status of the refusal; 200 if there is none."""
    try:
        translate(kind, body).encoded("m")
    except ApiError as error:
        return error.status
    return 200


def test_a_chat_is_a_stream_unless_it_says_otherwise() -> None:
    found = asked(CHAT, messages=[HELLO])
    assert (found.path, found.is_stream, found.body) == (OUR_CHAT, True, {"messages": [HELLO], **STREAMS})
    assert asked(CHAT, messages=[HELLO], stream=None).is_stream
    assert chat() == {"messages": [HELLO]}


def test_the_models_name_comes_first_and_none_is_left_out() -> None:
    found = asked(CHAT, messages=[HELLO], stream=False)
    assert found.encoded("real") == b'{"model":"real","messages":[{"role":"user","content":"hello"}]}'
    assert b"model" not in found.encoded("")
    assert translate(CHAT, b'{"name": "older", "messages": []}').model == "older"


def test_options_of_sampling_get_our_names_and_those_of_loading_are_dropped() -> None:
    options = {
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 40.0,
        "seed": 7,
        "num_predict": 12,
        "stop": "END",
        "repeat_penalty": 1.1,
        "num_ctx": 999_999,
        "num_gpu": 1,
        "mirostat": 2,
    }
    assert chat(options=options) == {
        "messages": [HELLO],
        "temperature": 0.5,
        "top_p": 0.9,
        "repeat_penalty": 1.1,
        "repetition_penalty": 1.1,
        "seed": 7,
        "top_k": 40,
        "max_tokens": 12,
        "stop": ["END"],
    }


@pytest.mark.parametrize("most", [-1, -2, 0])
def test_no_limit_of_tokens_is_no_field(most: int) -> None:
    assert "max_tokens" not in chat(options={"num_predict": most})


def test_a_format_is_a_response_format() -> None:
    schema = {"type": "object", "properties": {"age": {"type": "integer"}}}
    assert chat(format="json")["response_format"] == {"type": "json_object"}
    assert chat(format=schema)["response_format"]["json_schema"]["schema"] == schema
    assert "response_format" not in chat(format="")


@pytest.mark.parametrize(
    ("think", "fields"),
    [
        (None, {}),
        (False, {"chat_template_kwargs": {"enable_thinking": False, "thinking": False}}),
        (True, {"chat_template_kwargs": {"enable_thinking": True, "thinking": True}}),
        (
            "low",
            {
                "reasoning_effort": "low",
                "chat_template_kwargs": {"enable_thinking": True, "thinking": True, "reasoning_effort": "low"},
            },
        ),
    ],
)
def test_thinking_is_a_matter_of_the_template(think: Any, fields: dict[str, Any]) -> None:
    assert chat(think=think) == {"messages": [HELLO], **fields}


@pytest.mark.parametrize(
    ("image", "url"),
    [
        ("iVBORw0KGgo=", "data:image/png;base64,iVBORw0KGgo="),
        ("/9j/4AAQ", "data:image/jpeg;base64,/9j/4AAQ"),
        ("UklGRhoA", "data:image/webp;base64,UklGRhoA"),
        ("data:image/gif;base64,R0lGOD", "data:image/gif;base64,R0lGOD"),
    ],
)
def test_an_image_is_a_part_of_its_message(image: str, url: str) -> None:
    picture = {"type": "image_url", "image_url": {"url": url}}
    message = asked(CHAT, messages=[{**HELLO, "images": [image]}]).body["messages"][0]
    assert message["content"] == [{"type": "text", "text": "hello"}, picture]
    assert asked(GENERATE, images=[image]).body["messages"] == [{"role": "user", "content": [picture]}]


def history(*results: dict[str, str]) -> list[dict[str, Any]]:
    """Return the messages of a conversation with three calls and their results."""
    calls = [{"function": {"name": name, "arguments": {"at": name}}} for name in ("one", "two", "two")]
    messages = [
        HELLO,
        {"role": "Assistant", "thinking": "hm", "tool_calls": calls},
        *({"role": "tool", "content": "x", **result} for result in results),
    ]
    found: list[dict[str, Any]] = asked(CHAT, messages=messages).body["messages"]
    return found


def test_calls_get_ids_and_their_arguments_become_texts() -> None:
    message = history()[1]
    assert (message["role"], message["content"], message["reasoning_content"]) == ("assistant", "", "hm")
    assert [call["function"]["arguments"] for call in message["tool_calls"]] == [
        '{"at":"one"}',
        '{"at":"two"}',
        '{"at":"two"}',
    ]
    assert [call["id"] for call in message["tool_calls"]] == ["call_1_0", "call_1_1", "call_1_2"]


@pytest.mark.parametrize(
    ("results", "answered"),
    [
        ([{}, {}, {}], ["call_1_0", "call_1_1", "call_1_2"]),
        ([{"tool_name": "two"}, {"tool_name": "one"}, {"tool_name": "two"}], ["call_1_1", "call_1_0", "call_1_2"]),
        ([{"tool_call_id": "call_1_2"}, {"tool_name": "two"}, {}], ["call_1_2", "call_1_1", "call_1_0"]),
        ([{"tool_call_id": "other"}], ["other"]),
    ],
)
def test_a_result_finds_its_call(results: list[dict[str, str]], answered: list[str]) -> None:
    assert [message["tool_call_id"] for message in history(*results)[2:]] == answered


def test_a_result_without_any_call_is_for_the_engine_to_judge() -> None:
    assert asked(CHAT, messages=[{"role": "tool", "content": "x"}]).body["messages"][0]["tool_call_id"]


def test_tools_pass_as_they_are() -> None:
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
    assert chat(tools=tools)["tools"] == tools


def test_generating_uses_the_chat_template_unless_it_is_raw() -> None:
    found = asked(GENERATE, prompt="why", system="be brief", stream=False, options={"seed": 1})
    messages = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "why"}]
    assert (found.path, found.body) == (OUR_CHAT, {"messages": messages, "seed": 1})
    raw = asked(GENERATE, prompt="[INST] why", raw=True, options={"seed": 1})
    assert (raw.path, raw.body) == (OUR_TEXT, {"prompt": "[INST] why", "seed": 1, **STREAMS})


def test_vectors() -> None:
    found = asked(EMBED, input=["a", "b"], dimensions=8, truncate=True)
    assert (found.path, found.is_stream) == (OUR_VECTORS, False)
    assert found.body == {"input": ["a", "b"], "encoding_format": "float", "dimensions": 8}
    assert asked(EMBEDDINGS, prompt="a").body == {"input": "a", "encoding_format": "float"}


@pytest.mark.parametrize(
    ("kind", "fields"),
    [
        (CHAT, {"messages": []}),
        (CHAT, {}),
        (GENERATE, {}),
        (GENERATE, {"prompt": "", "raw": True}),
        (EMBED, {"input": []}),
        (EMBEDDINGS, {}),
    ],
)
def test_without_a_prompt_the_model_is_only_loaded_or_unloaded(kind: str, fields: dict[str, Any]) -> None:
    assert asked(kind, **fields).path is None
    assert not asked(kind, keep_alive="5m", **fields).unloads
    assert asked(kind, keep_alive=0, **fields).unloads
    assert not asked(kind, keep_alive=None, **fields).unloads


def test_keep_alive_passes_untouched() -> None:
    assert chat(keep_alive="5m")["keep_alive"] == "5m"
    assert not asked(CHAT, messages=[HELLO], keep_alive=0).unloads


@pytest.mark.parametrize(("keep_alive", "zero"), [(0, True), (0.0, True), ("0", True), ("0s", True), ("-0.0m", True),
                                                   (-1, False), ("", False), ("s", False), ("1s", False), (None, False),
                                                   ("0.5h", False)])  # fmt: skip
def test_what_is_zero(keep_alive: Any, zero: bool) -> None:
    assert is_zero(keep_alive) is zero


@pytest.mark.parametrize(
    ("kind", "fields", "words"),
    [
        (GENERATE, {"prompt": "a", "suffix": "b"}, "`suffix` is not supported"),
        (GENERATE, {"prompt": "a", "template": "{{ .Prompt }}"}, "`template` is not supported"),
        (GENERATE, {"prompt": "a", "context": [1, 2]}, "`context` is not supported"),
        (GENERATE, {"prompt": "a", "raw": True, "system": "b"}, "raw mode does not support template, system"),
        (GENERATE, {"prompt": "a", "raw": True, "format": "json"}, "raw mode does not support format"),
        (GENERATE, {"prompt": "a", "raw": True, "images": ["b"]}, "raw mode does not support images"),
        (GENERATE, {"prompt": "a", "raw": True, "logprobs": True}, "raw mode does not support logprobs"),
        (GENERATE, {"prompt": 3}, "`prompt` must be a text"),
        (CHAT, {"messages": {"role": "user"}}, "`messages` must be a list"),
        (CHAT, {"messages": ["hello"]}, "message 0 is not an object"),
        (CHAT, {"messages": [HELLO, {"content": "x"}]}, "message 1 has no role"),
        (CHAT, {"messages": [{**HELLO, "images": [1]}]}, "`images` must be a list"),
        (CHAT, {"messages": [{"role": "assistant", "tool_calls": ["f"]}]}, "a tool call has no function"),
        (CHAT, {"messages": [HELLO], "stream": "yes"}, "`stream` must be true or false"),
        (CHAT, {"messages": [HELLO], "options": []}, "`options` must be an object"),
        (CHAT, {"messages": [HELLO], "options": {"temperature": "hot"}}, 'option "temperature" must be a number'),
        (CHAT, {"messages": [HELLO], "options": {"seed": 1.5}}, 'option "seed" must be a whole number'),
        (CHAT, {"messages": [HELLO], "options": {"top_k": True}}, 'option "top_k" must be a number'),
        (CHAT, {"messages": [HELLO], "options": {"stop": [1]}}, 'option "stop" must be a list of texts'),
        (CHAT, {"messages": [HELLO], "format": "yaml"}, "invalid format"),
        (CHAT, {"messages": [HELLO], "think": "deeply"}, "invalid think value: 'deeply'"),
        (CHAT, {"messages": [HELLO], "keep_alive": [1]}, "`keep_alive` must be"),
        (EMBED, {"input": [[1, 2]]}, "`input` must be a text or a list of texts"),
    ],
)
def test_what_has_no_translation_is_refused_in_words(kind: str, fields: dict[str, Any], words: str) -> None:
    assert refusal(kind, **fields).startswith(words)


@pytest.mark.parametrize(
    "body", [b"", b"{", b"[]", b"null", b"\xff", b'{"a": NaN}', b'{"a": 1e400}', b"[" * 100_000, b'{"a":' * 100_000]
)
def test_a_body_that_is_no_json_object_is_refused(body: bytes) -> None:
    for kind in WORK:
        with pytest.raises(ApiError) as caught:
            translate(kind, body)
        assert caught.value.status == 400


@pytest.mark.parametrize("depth", [300, 900, 960, 990, 995, 1000, 2000])
def test_a_schema_of_any_depth_is_translated_or_refused(depth: int) -> None:
    schema = b'{"properties":' * depth + b"{}" + b"}" * depth
    body = b'{"model":"m","messages":[{"role":"user","content":"a"}],"format":' + schema + b"}"
    assert status_of(CHAT, body) in (200, 400)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)
FIELDS = ("model", "name", "messages", "prompt", "input", "system", "suffix", "template", "context", "images", "tools",
          "options", "format", "think", "raw", "stream", "keep_alive", "logprobs", "top_logprobs", "dimensions",
          "truncate")  # fmt: skip
MESSAGE = st.dictionaries(
    st.sampled_from(("role", "content", "images", "tool_calls", "tool_name", "tool_call_id", "thinking")), JSON
)
OPTIONS = st.dictionaries(st.sampled_from(("temperature", "top_k", "seed", "stop", "num_predict", "num_ctx")), JSON)


@given(st.sampled_from(WORK), st.dictionaries(st.sampled_from(FIELDS), JSON | st.lists(MESSAGE) | OPTIONS))
def test_any_object_is_translated_into_json_or_refused_with_400(kind: str, fields: dict[str, Any]) -> None:
    sent = json.dumps(fields).encode()
    if (status := status_of(kind, sent)) != 200:
        assert status == 400
        return
    found = translate(kind, sent)
    body = json.loads(found.encoded("m"))
    assert body["model"] == "m"
    assert body.get("stream", False) is found.is_stream
    assert found.path is not None or set(body) <= {"model", "keep_alive"}
