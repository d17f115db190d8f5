"""All errors that come from the gateway and not from the engine, in the form of the client's API.

The body has only the keys of OpenAI's or Ollama's errors, or those of Anthropic's and the code. The header
`x-appliance-error` therefore marks the error as ours.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from appliance.console.progress import Phase, Progress
from appliance.engine_route import Dialect, ErrorRule
from appliance.gateway.wire.ollama_paths import is_ollama
from appliance.system.lack import is_lack

if TYPE_CHECKING:
    from starlette.types import Send

RETRY_SOON_S = 2
RETRY_LATER_S = 10
RETRY_MOST_S = 600
ANTHROPIC = "/v1/messages"
# Anthropic's type of an error, by status (https://docs.anthropic.com/en/api/errors); every other status: `api_error`.
_ANTHROPIC_KINDS = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}


def dialect_of(path: str) -> Dialect:
    """Return the API whose clients use this path, whether or not the path is known."""
    if path == ANTHROPIC or path.startswith((f"{ANTHROPIC}/", f"{ANTHROPIC}?")):
        return "anthropic"
    return "ollama" if is_ollama(path.partition("?")[0]) else "openai"


class ApiError(Exception):
    """Raised if a request cannot continue. `detail` is the sentence for the client and contains nothing secret."""

    def __init__(
        self,
        status: int,
        code: str,
        detail: str,
        *,
        kind: str = "invalid_request_error",
        headers: tuple[tuple[bytes, bytes], ...] = (),
    ) -> None:
        super().__init__(detail)
        self.status = status
        self.code = code
        self.detail = detail
        self.kind = kind
        self.headers = headers

    def document(self, dialect: Dialect = "openai") -> dict[str, Any]:
        if dialect == "anthropic":
            default = "invalid_request_error" if self.status < 500 else "api_error"
            kind = _ANTHROPIC_KINDS.get(self.status, default)
            return {"type": "error", "error": {"type": kind, "message": self.detail, "code": self.code}}
        if dialect == "ollama":
            return {"error": self.detail}
        return {"error": {"message": self.detail, "type": self.kind, "param": None, "code": self.code}}

    def body(self, dialect: Dialect = "openai") -> bytes:
        return _compact(self.document(dialect))

    def event(self, dialect: Dialect) -> bytes:
        """Return one server-sent event. Anthropic's SDK ignores error events that are not named `error`."""
        name = b"event: error\n" if dialect == "anthropic" else b""
        return name + b"data: " + _compact(self.document(dialect)) + b"\n\n"

    async def send(self, send: Send, dialect: Dialect = "openai") -> None:
        """Send the whole response; nothing may have been sent before."""
        body = self.body(dialect)
        headers = [
            (b"content-type", b"application/json"),
            (b"content-length", str(len(body)).encode()),
            (b"x-appliance-error", self.code.encode()),
            *self.headers,
        ]
        await send({"type": "http.response.start", "status": self.status, "headers": headers})
        await send({"type": "http.response.body", "body": body})


def invalid_key() -> ApiError:
    return ApiError(
        401,
        "invalid_api_key",
        "a valid API key is required: send it as `Authorization: Bearer KEY` or `x-api-key: KEY`; "
        "`docker exec NAME appliance key` shows it",
        headers=((b"www-authenticate", b"Bearer"),),
    )


def keys_unknown() -> ApiError:
    """Return the error for a key while the named keys cannot be read yet: clients take a 401 as final."""
    detail = "the named keys cannot be read yet, since the volume does not answer; try again in a moment"
    return ApiError(503, "keys_unknown", detail, kind="service_unavailable", headers=(_retry(RETRY_SOON_S),))


def unknown_model(name: str, known: Iterable[str]) -> ApiError:
    return ApiError(404, "model_not_found", f"the model `{name[:200]}` does not exist: {_named(known)}")


def no_model(known: Iterable[str]) -> ApiError:
    return ApiError(400, "model_required", f"the request names no model in a JSON field `model`: {_named(known)}")


def not_loaded(name: str) -> ApiError:
    detail = f"the model `{name[:200]}` is not loaded, and the request forbids to load it (autoload=false)"
    return ApiError(400, "model_not_loaded", detail)


def load_waits(detail: str, seconds: float) -> ApiError:
    """Return the error for a request that waited too long for its model. `seconds` is when to ask again."""
    wait_s = math.ceil(min(max(seconds, RETRY_SOON_S), RETRY_MOST_S))
    return ApiError(503, "model_loading", detail, kind="service_unavailable", headers=(_retry(wait_s),))


def load_failed(name: str, detail: str, exit_code: int) -> ApiError:
    """Return the error for a model that could not be loaded. A retry cannot help if model or settings are at fault."""
    status = 503 if exit_code in (1, 32, 41, 42, 43, 45, 50) else 400
    kind = "service_unavailable" if status == 503 else "invalid_request_error"
    headers = (_retry(RETRY_LATER_S),) if status == 503 else ()
    return ApiError(
        status, "model_not_loaded", f"the model `{name[:200]}` cannot be loaded: {detail}", kind=kind, headers=headers
    )


def _named(models: Iterable[str]) -> str:
    return f"here are {', '.join(f'`{name}`' for name in models)}"


def body_too_large(limit_bytes: int) -> ApiError:
    limit = f"{limit_bytes // 2**20} MiB" if limit_bytes >= 2**20 else f"{limit_bytes // 2**10} KiB"
    return ApiError(413, "request_too_large", f"the request body is over the limit of {limit}")


def header_too_large(limit_bytes: int) -> ApiError:
    detail = f"the request's header is over the limit of {limit_bytes // 2**10} KiB"
    return ApiError(431, "header_too_large", detail)


def too_slow() -> ApiError:
    return ApiError(
        408, "request_timeout", "the request did not arrive in time: send its header and body without pauses"
    )


def too_busy() -> ApiError:
    detail = "too many requests run at the same time; try again in a moment"
    return ApiError(503, "too_many_requests", detail, kind="service_unavailable", headers=(_retry(RETRY_SOON_S),))


def lacking() -> ApiError:
    """Return the error for a lack of resources in this process or machine; the log has the details."""
    detail = "the appliance has no open files, memory or processes left for this request; try again in a moment"
    return ApiError(503, "out_of_resources", detail, kind="service_unavailable", headers=(_retry(RETRY_SOON_S),))


def internal_error() -> ApiError:
    return ApiError(500, "internal_error", "the gateway failed on this request", kind="server_error")


def of_fault(error: Exception) -> ApiError:
    """Return the error for an exception that nothing expected; it tells nothing of the exception."""
    return lacking() if is_lack(error) else internal_error()


def shutting_down() -> ApiError:
    return ApiError(503, "shutting_down", "the appliance is stopping", kind="service_unavailable")


def engine_died(status: int, detail: str) -> ApiError:
    """Return the error for a lost engine: 502 if it ended during a request, 503 if it could not be reached at all."""
    return ApiError(status, "engine_died", detail, kind="service_unavailable", headers=(_retry(RETRY_SOON_S),))


def context_full() -> ApiError:
    """Return the error for requests that do not fit together and may be answered alone."""
    detail = "requests that run at the same time do not fit into the model's context together; try again in a moment"
    return ApiError(503, "context_full", detail, kind="service_unavailable", headers=(_retry(RETRY_SOON_S),))


def crowds_itself() -> ApiError:
    """Return the error for one request of several prompts or answers that does not fit even without other requests."""
    detail = (
        "the prompts or answers of this request do not fit into the model's context together; ask for them one by one"
    )
    return ApiError(400, "context_length_exceeded", detail)


def by_rule(rule: ErrorRule, groups: Mapping[str, str]) -> ApiError:
    """Return the error of a rule; `groups` fill the placeholders of its sentence."""
    detail = rule.detail.format_map(groups)
    if rule.status < 500:
        return ApiError(rule.status, rule.code, detail)
    return ApiError(rule.status, rule.code, detail, kind="service_unavailable", headers=(_retry(RETRY_SOON_S),))


def of_engine(status: int, body: bytes) -> ApiError:
    """Return the engine's own error for a client that already got a status and can be told only by an event."""
    try:
        error = json.loads(body)["error"]
        message, kind, code = str(error["message"]), str(error["type"]), str(error.get("code", status))
    except (ValueError, LookupError, TypeError, RecursionError):
        detail = f"the engine answered with status {status} and without a stream"
        return ApiError(502, "engine_died", detail, kind="service_unavailable")
    return ApiError(status, code, message, kind=kind)


def without_words(status: int) -> ApiError:
    """Return the error for an engine's error without a body."""
    detail = f"the engine refused this request with status {status} and gave no reason"
    return ApiError(status, "engine_refused", detail, kind="server_error" if status >= 500 else "invalid_request_error")


def not_ready(progress: Progress) -> ApiError:
    if progress.phase is Phase.STOPPING:
        return shutting_down()
    if progress.phase is Phase.FAILED:
        # no Retry-After: waiting would not help
        return ApiError(503, "engine_died", progress.sentence(), kind="service_unavailable")
    headers = (_retry(_wait_s(progress)),)
    return ApiError(503, "model_loading", progress.sentence(), kind="service_unavailable", headers=headers)


def _wait_s(progress: Progress) -> int:
    """Return after how many seconds a retry makes sense; ten minutes at most, even if the start takes an hour."""
    if progress.seconds_left is not None:
        return math.ceil(min(max(progress.seconds_left, RETRY_SOON_S), RETRY_MOST_S))
    return RETRY_LATER_S if progress.phase in (Phase.TUNING, Phase.FETCHING, Phase.QUANTIZING) else RETRY_SOON_S


def _retry(seconds: int) -> tuple[bytes, bytes]:
    return b"retry-after", str(seconds).encode()


def _compact(document: dict[str, Any]) -> bytes:
    return json.dumps(document, separators=(",", ":")).encode()
