"""The rows of the suite: what is asked, how it is judged, and what helps if it fails.

Values are enumerated wherever a row needs no judgement, so that random weights end the answer as well.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import field
from functools import partial
from typing import Any

from appliance.abilities import judge
from appliance.abilities.answer import Answer
from appliance.abilities.judge import Schemas, Verdict
from appliance.values import dataclass

Body = Mapping[str, Any]
Judge = Callable[[Answer, Schemas], Verdict]

SPECIAL = 'He said "no" \\ {"a": [1]} <b>&amp; \ttab\nline: é 日本 😀'
_CITY = {"type": "string", "enum": ["Paris", "Rome"]}
_DAYS = {"type": "integer", "enum": [1, 2, 3]}


def _object(**properties: Mapping[str, Any]) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": [*properties], "additionalProperties": False}


def _array(items: Mapping[str, Any], least: int, most: int) -> dict[str, Any]:
    return {"type": "array", "items": items, "minItems": least, "maxItems": most}


WEATHER: Schemas = {"get_weather": _object(city=_CITY, days=_DAYS)}
CLOCK: Schemas = {"get_time": _object(city=_CITY)}
TRIP: Schemas = {
    "plan_trip": _object(
        stops=_array(_object(city=_CITY, nights=_DAYS, seats=_array({"enum": ["aisle", "window"]}, 1, 2)), 1, 2),
        by={**_object(kind={"type": "string", "enum": ["train", "plane"]}, first_class={"type": "boolean"})},
    )
}
NOTE: Schemas = {"write_note": _object(text={"type": "string", "enum": [SPECIAL]})}
REPORT = _object(city=_CITY, is_capital={"type": "boolean"}, days=_array(_DAYS, 1, 2))

_WORD = "37"
_OFF: Body = {
    "chat_template_kwargs": {"enable_thinking": False, "thinking": False},
    "reasoning_budget_tokens": 0,  # where the engine knows it, templates without a switch end their reasoning at once
}
_ON: Body = {"chat_template_kwargs": {"enable_thinking": True, "thinking": True}, "reasoning_budget_tokens": 48}


def _tools(schemas: Schemas) -> list[dict[str, Any]]:
    words = {"get_weather": "Get the weather of a city", "get_time": "Get the time in a city"}
    return [
        {"type": "function", "function": {"name": name, "description": words.get(name, name), "parameters": schema}}
        for name, schema in schemas.items()
    ]


def _said(text: str) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": text}]}


def _formatted() -> dict[str, Any]:
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "report", "schema": REPORT}}}


def _history(result: str) -> dict[str, Any]:
    """Return a conversation in Anthropic's form, which the route that counts tokens takes."""
    tools = [{"name": name, "description": name, "input_schema": schema} for name, schema in NOTE.items()]
    used = {"type": "tool_use", "id": "call00001", "name": "write_note", "input": {"text": SPECIAL}}
    made = {"type": "tool_result", "tool_use_id": "call00001", "content": result}
    messages = [
        {"role": "user", "content": "Write the note."},
        {"role": "assistant", "content": [used]},
        {"role": "user", "content": [made]},
    ]
    return {"messages": messages, "tools": tools, "max_tokens": 1}


def _after_call(result: str) -> dict[str, Any]:
    call = {"name": "write_note", "arguments": json.dumps({"text": SPECIAL})}
    return {
        "messages": [
            {"role": "user", "content": "Write the note, then tell me the number that the tool returns."},
            {
                "role": "assistant",
                "content": "",
                "tool_calls": [{"id": "call00001", "type": "function", "function": call}],
            },
            {"role": "tool", "tool_call_id": "call00001", "content": result},
        ],
        "tools": _tools(NOTE),
    }


@dataclass(frozen=True, kw_only=True)
class Row:
    """One ability. `body` is a request of the chat route. Without `judge` the row has two prompts to count, the second
    of which is longer by the result of a tool."""

    name: str
    words: str
    body: Body
    judge: Judge | None
    then: str
    tools: Schemas
    needs_reasoning: bool = False
    is_sure: bool = False  # True if random weights pass as well: a grammar makes the answer
    longer: Body = field(default_factory=dict)


def _row(
    name: str,
    words: str,
    body: Body,
    *,
    judge: Judge,
    then: str,
    tokens: int = 400,
    tools: Schemas | None = None,
    needs_reasoning: bool = False,
) -> Row:
    """Make a row. Reasoning is off unless the body says otherwise."""
    offered = {"tools": _tools(tools)} if tools else {}
    whole = {"max_tokens": tokens, **_OFF, **offered, **body}
    return Row(
        name=name,
        words=words,
        body=whole,
        judge=judge,
        then=then,
        tools=tools or {},
        needs_reasoning=needs_reasoning,
        is_sure=("tool_choice" in body and body["tool_choice"] != "auto") or "response_format" in body,
    )


_FORCED: Body = {"tool_choice": "required", "parallel_tool_calls": False}
_ASK_WEATHER = _said("What is the weather in Paris for the next 2 days? Use the tool.")
BOTH = {**WEATHER, **CLOCK}
_NAMED: Body = {"parallel_tool_calls": False, "tool_choice": {"type": "function", "function": {"name": "get_time"}}}
_OTHER_TEMPLATE = "name another template with --chat-template-file"

ROWS = (
    _row(
        "tool_free",
        "the model decides to call a tool",
        {**_ASK_WEATHER, "tool_choice": "auto"},
        judge=judge.free_call,
        tools=WEATHER,
        tokens=192,
        then='ask with tool_choice "required": such a call is made by a grammar',
    ),
    _row(
        "tool_forced",
        "tool_choice required",
        {**_ASK_WEATHER, **_FORCED},
        judge=judge.forced_call,
        tools=WEATHER,
        then=f"send the tool's schema as response_format instead, or {_OTHER_TEMPLATE}",
    ),
    _row(
        "tool_named",
        "tool_choice with one of two tools",
        {**_ASK_WEATHER, "tools": _tools(BOTH), **_NAMED},
        judge=judge.forced_call,
        tools=CLOCK,
        then='send that tool alone with tool_choice "required"',
    ),
    _row(
        "tool_parallel",
        "two calls in one answer",
        {
            **_said("What is the weather in Paris, and what in Rome, for 2 days? Call the tool for both."),
            **_FORCED,
            "parallel_tool_calls": True,
        },
        judge=judge.parallel_calls,
        tools=WEATHER,
        then="send parallel_tool_calls false: one call is made in each answer",
    ),
    _row(
        "tool_nested",
        "arguments with objects and lists in each other",
        {**_said("Plan a trip by train to Paris for 2 nights, with a window seat."), **_FORCED},
        judge=judge.forced_call,
        tools=TRIP,
        then="give tools flat arguments",
    ),
    _row(
        "tool_special",
        "quotes, backslashes, lines, tabs, other scripts in arguments",
        {**_said("Write the note."), **_FORCED},
        judge=judge.forced_call,
        tools=NOTE,
        then="send such text through response_format, which is JSON",
    ),
    Row(
        name="tool_history",
        words="calls with special characters and their results reach the prompt",
        body=_history("ok"),
        longer=_history("ok, " + "and it was kept, " * 12),
        judge=None,
        tools=NOTE,
        then=f"send results as messages of the user, or {_OTHER_TEMPLATE}",
    ),
    _row(
        "tool_results",
        "the model uses the result of a tool",
        _after_call(json.dumps({"number": int(_WORD)})),
        judge=partial(judge.uses_result, word=_WORD),
        tools=NOTE,
        tokens=96,
        then="",
    ),
    _row(
        "reasoning",
        "reasoning is told apart from the answer",
        {**_said("Is 91 a prime number?"), **_ON},
        judge=judge.reasoning,
        needs_reasoning=True,
        tokens=96,
        then=f"turn reasoning off with --thinking off, or {_OTHER_TEMPLATE}",
    ),
    _row(
        "reasoning_off",
        "a request can turn reasoning off",
        _said("Is 91 a prime number?"),
        judge=judge.no_reasoning,
        needs_reasoning=True,
        tokens=48,
        then="limit max_tokens: this model reasons in every answer",
    ),
    _row(
        "structured",
        "the answer fits a JSON schema",
        {**_said("Report on Paris as JSON, for 2 days."), **_formatted()},
        judge=partial(judge.structured, schema=REPORT),
        then="check documents in the client",
    ),
    _row(
        "structured_reasoning",
        "the answer fits a JSON schema after reasoning",
        {**_said("Report on Paris as JSON, for 2 days."), **_formatted(), **_ON},
        judge=partial(judge.structured, schema=REPORT),
        needs_reasoning=True,
        then="turn reasoning off in requests for documents",
    ),
)
