"""An engine's own errors in our words, by the rules of its door (`ErrorRule`). Right answers are never looked at: only
the bodies of answers with a status of 400 or more, and error events of a stream."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from typing import Any

from appliance.engine_route import ErrorRule
from appliance.gateway.wire import api_error
from appliance.gateway.wire.api_error import ApiError

BODY_BYTES_MAX = 64 * 2**10  # a longer one repeats what the client sent, and passes


class EngineErrors:
    """The rules of one engine."""

    def __init__(self, rules: Iterable[ErrorRule] = ()) -> None:
        self._rules = tuple((re.compile(rule.says), rule) for rule in rules)

    def as_ours(self, body: bytes, status: int = 500) -> ApiError | None:
        """Our error in place of the engine's, or None if no rule covers it. `body` is the whole body of its answer, or
        the data of its event, whose status is 500. The first rule that fits decides."""
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
    """The sentence of an engine's error: `error.message` of OpenAI and Anthropic, `detail` of FastAPI, `message` at the
    top, or the text itself."""
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
    """The engine's own error for a client of Anthropic's API; None if it has that form already."""
    try:
        if json.loads(body)["type"] == "error":
            return None
    except (ValueError, LookupError, TypeError, RecursionError):
        pass
    return ApiError(status, str(status), message_in(body))
