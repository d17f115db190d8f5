"""Judgement of answers. A reason is a sentence that quotes nothing of the model. Pure."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple

from appliance.abilities.answer import Answer
from appliance.abilities.record import Result

# What models of the usual families write around their reasoning; in a text they are left over.
_MARKS = re.compile(r"</?think(?:ing)?>|\[/?THINK\]|<\|channel\|>|<\|START_THINKING\|>|<seed:think>|◁/?think▷")
LEFT_OVER = "the marks of reasoning are left in the text"
_KINDS: Mapping[str, type] = {"object": dict, "array": list, "string": str, "boolean": bool, "integer": int}


class Verdict(NamedTuple):
    result: Result
    reason: str = ""


PASSED = Verdict(Result.PASSED)


def failed(reason: str) -> Verdict:
    return Verdict(Result.FAILED, reason)


def not_judged(reason: str) -> Verdict:
    return Verdict(Result.NOT_JUDGED, reason)


Schemas = Mapping[str, Mapping[str, Any]]  # of a tool's arguments, by its name


def misfit(value: object, schema: Mapping[str, Any], path: str = "it") -> str:
    """Return how a value breaks the part of JSON Schema that the suite uses, in words; empty if it fits."""
    if "enum" in schema and value not in schema["enum"]:
        return f"{path} is no value of its enum"
    kind = _KINDS.get(schema.get("type", ""))
    if kind is not None and (not isinstance(value, kind) or (kind is int and isinstance(value, bool))):
        return f"{path} is no {schema['type']}"
    if isinstance(value, list):
        if not schema.get("minItems", 0) <= len(value) <= schema.get("maxItems", len(value)):
            return f"{path} has {len(value)} items"
        each = (misfit(item, schema["items"], f"{path}[{at}]") for at, item in enumerate(value))
        return next(filter(None, each), "")
    if isinstance(value, dict) and "properties" in schema:
        known = schema["properties"]
        if lacks := [name for name in schema["required"] if name not in value]:
            return f"{path} lacks {lacks[0]}"
        if value.keys() - known.keys():
            return f"{path} has a field that its schema does not name"
        return next(filter(None, (misfit(value[name], known[name], f"{path}.{name}") for name in value)), "")
    return ""


def in_json(text: str, schema: Mapping[str, Any], what: str) -> str:
    """Return what is wrong with a JSON text that must fit a schema; empty if nothing is."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return f"{what} are no JSON" if what.endswith("s") else f"{what} is no JSON"
    return f"{what}: {wrong}" if (wrong := misfit(value, schema)) else ""


def wrong_call(answer: Answer, tools: Schemas) -> str:
    """Return what is wrong with the answer's calls; empty if all are valid, or if there are none."""
    for call in answer.calls:
        if call.name not in tools:
            return "it calls a tool that the request does not have"
        if wrong := in_json(call.arguments, tools[call.name], "the call's arguments"):
            return wrong
    if answer.calls and answer.finish != "tool_calls":
        return f"finish_reason is {answer.finish} beside a call"
    return ""


def cut(answer: Answer, lacks: str) -> Verdict:
    """Judge an answer that reached its limit of tokens."""
    if answer.reasoning or _MARKS.search(answer.text):
        return not_judged("its reasoning took all tokens of the answer")
    return failed(f"it reached its limit of tokens before {lacks}")


def free_call(answer: Answer, tools: Schemas) -> Verdict:
    if not answer.calls:
        return not_judged("the model chose no call")
    if answer.is_cut:
        return not_judged("the model's call was not at its end when its tokens were used up")
    return failed(wrong) if (wrong := wrong_call(answer, tools)) else PASSED


def forced_call(answer: Answer, tools: Schemas) -> Verdict:
    if answer.is_cut:
        return cut(answer, "the call was whole")
    if not answer.calls:
        return failed("it has no call, though one was forced")
    if answer.text.strip():
        return failed("it has text beside a forced call")
    return failed(wrong) if (wrong := wrong_call(answer, tools)) else PASSED


def parallel_calls(answer: Answer, tools: Schemas) -> Verdict:
    if answer.is_cut and len(answer.calls) > 1:  # a model that goes on calling: all but the last are whole
        whole = replace(answer, calls=answer.calls[:-1], finish="tool_calls")
        return failed(wrong) if (wrong := wrong_call(whole, tools)) else not_judged("the model went on calling")
    verdict = forced_call(answer, tools)
    if verdict == PASSED and len(answer.calls) == 1:
        return not_judged("the model chose one call")
    return verdict


def uses_result(answer: Answer, _: Schemas, *, word: str) -> Verdict:
    return PASSED if word in answer.text else not_judged("the model's answer does not name the tool's result")


def reasoning(answer: Answer, _: Schemas) -> Verdict:
    if _MARKS.search(answer.text):
        return failed(LEFT_OVER)
    return PASSED if answer.reasoning.strip() else not_judged("the model did not reason")


def no_reasoning(answer: Answer, _: Schemas) -> Verdict:
    if answer.reasoning.strip():
        return failed("it reasons, though reasoning was turned off")
    return failed(LEFT_OVER) if _MARKS.search(answer.text) else PASSED


def structured(answer: Answer, _: Schemas, *, schema: Mapping[str, Any]) -> Verdict:
    if answer.is_cut:
        return cut(answer, "the document was whole")
    return failed(wrong) if (wrong := in_json(answer.text, schema, "the text")) else PASSED
