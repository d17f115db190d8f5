"""What a request says of reasoning, in the words that chat templates know. docs/api.md has the table of all dialects.

Both engines read OpenAI's fields themselves. Of Anthropic's they read at most the budget, so the rest becomes
`chat_template_kwargs`, which both take on that route.
"""

from __future__ import annotations

import json
from typing import Any

from appliance.documents import fields_in

_THINKS = {"enabled": True, "adaptive": True, "disabled": False}


def switch(*, is_on: bool) -> dict[str, bool]:
    """Return the switch for reasoning by both names that chat templates have for it."""
    return {"enable_thinking": is_on, "thinking": is_on}


def with_template_words(body: bytes) -> bytes:
    """Return a request of Anthropic's dialect with its `thinking` and `output_config.effort` as `chat_template_kwargs`.

    Every other byte stays. A request that says nothing of them, or that has `chat_template_kwargs`, is unchanged; so is
    one that is no JSON object, which the engine refuses.
    """
    if b'"thinking"' not in body and b'"output_config"' not in body:
        return body
    asked = fields_in(body, "thinking", "output_config", "chat_template_kwargs")
    words = _words(asked.get("thinking"), asked.get("output_config"))
    if not words or asked["chat_template_kwargs"] is not None:
        return body
    begin = body.index(b"{") + 1
    return b'%b"chat_template_kwargs":%b,%b' % (body[:begin], json.dumps(words).encode(), body[begin:])


def _words(thinking: object, output_config: object) -> dict[str, Any]:
    kind = thinking.get("type") if isinstance(thinking, dict) else None
    effort = output_config.get("effort") if isinstance(output_config, dict) else None
    is_on = _THINKS.get(kind) if isinstance(kind, str) else None
    return {
        **({} if is_on is None else switch(is_on=is_on)),
        **({"reasoning_effort": effort} if isinstance(effort, str) else {}),
    }
