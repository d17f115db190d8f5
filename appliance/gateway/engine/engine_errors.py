"""Replaces an engine's own errors by the rules of its door (`ErrorRule`). Only bodies of answers with a status of 400
or more and error events of streams are read."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from typing import Any

from appliance.engine_route import ErrorRule
from appliance.gateway.wire import api_error
from appliance.gateway.wire.api_error import ApiError

BODY_BYTES_MAX = 64 * 2**10  # a longer body repeats what the client sent, and is passed on unchanged


class EngineErrors:
    """The error rules of one engine."""

    def __init__(self, rules: Iterable[ErrorRule] = ()) -> None:
        self._rules = tuple((re.compile(rule.says), rule) for rule in rules)

    def as_ours(self, body: bytes, status: int = 500) -> ApiError | None:
        """Return our error in place of the engine's; None if no rule matches. The first matching rule decides. `body`
        is the whole body of an answer, or the data of an event, whose status is 500."""
        if len(body) > BODY_BYTES_MAX:
            return None
        message = message_in(body)
        for pattern, rule in self._rules:
            if rule.of_status not in (None, status):
                continue
            if found := pattern.search(message):
                return api_error.by_rule(rule, found.groupdict(default=""))
        return None


def message_in(body: bytes) -> str:
    """Return the sentence of an engine's error: `error.message` of OpenAI and Anthropic, `detail` of FastAPI, `message`
    at the top level, or the text itself."""
    text = body.decode("utf-8", "replace")
    try:
        document: Any = json.loads(text)
    except (ValueError, RecursionError):
        return text
    if not isinstance(document, dict):
        return text
    error = document.get("error", document)
    if not isinstance(error, dict):
        return str(error)
    return next((error[key] for key in ("message", "detail") if isinstance(error.get(key), str)), text)


def in_anthropic_form(body: bytes, status: int) -> ApiError | None:
    """Return the engine's error in the form of Anthropic's API; None if it has that form already."""
    try:
        if json.loads(body)["type"] == "error":
            return None
    except (ValueError, LookupError, TypeError, RecursionError):
        pass
    return ApiError(status, str(status), message_in(body))
