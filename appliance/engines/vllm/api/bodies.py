"""What is wrong with a request that vLLM itself would take, or fail on: asked of each body before vLLM sees it.

Python's json reads NaN, Infinity and half of a surrogate pair. The first two are no numbers of JSON; the third ends in
a 500: the error that quotes it cannot be encoded (entrypoints/serve/exception_handling/handlers/validation.py).
Nothing there refuses a chat of no messages either (entrypoints/openai/chat_completion/protocol.py).
"""

from __future__ import annotations

from appliance import documents


def fault(body: bytes) -> str | None:
    """A sentence for the client, which quotes nothing of the body. None if nothing is wrong. 1 MiB takes 1 ms."""
    if documents.has_too_many_values(body):
        return f"the request body has more than {documents.VALUES_MAX:,} values"
    try:
        document = documents.foreign(body)
    except ValueError as error:
        return f"the request body is not valid JSON: {error}"
    if not isinstance(document, dict):
        return "the request body must be a JSON object"
    return "`messages` must not be empty" if document.get("messages") == [] else None
