"""Check of request bodies that vLLM itself would accept wrongly or fail on. It runs before vLLM sees a body.

Python's json accepts NaN, Infinity and half of a surrogate pair. The first two are not valid JSON. The third ends in a
500, since vLLM's error quotes it and cannot be encoded (entrypoints/serve/exception_handling/handlers/validation.py).
vLLM does not refuse a chat without messages either (entrypoints/openai/chat_completion/protocol.py).
"""

from __future__ import annotations

from appliance import documents


def fault(body: bytes) -> str | None:
    """Return what is wrong as a sentence for the client, or None. It quotes nothing from the body. 1 MiB takes 1 ms."""
    if documents.has_too_many_values(body):
        return f"the request body has more than {documents.VALUES_MAX:,} values"
    try:
        document = documents.foreign(body)
    except ValueError as error:
        return f"the request body is not valid JSON: {error}"
    if not isinstance(document, dict):
        return "the request body must be a JSON object"
    return "`messages` must not be empty" if document.get("messages") == [] else None
