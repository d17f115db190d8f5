"""An OpenAI endpoint as a client sees it: its URL, its key, and the models that it serves."""

from __future__ import annotations

import http.client
from collections.abc import Mapping
from dataclasses import field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from appliance.documents import load
from appliance.errors import ConfigError, EngineNotReadyError, UsageError
from appliance.host.docker.http import NoAnswerError, exchange, said_in
from appliance.settings import process_environment
from appliance.values import dataclass

KEY_VARIABLE = "OPENAI_API_KEY"
TIMEOUT_S = 10.0
# field names differ between servers; some have it in `meta`
_CONTEXT_FIELDS = ("context_length", "max_model_len", "context_window")


@dataclass(frozen=True, kw_only=True)
class Endpoint:
    """`base` ends with the version, as in http://127.0.0.1:11435/v1; `key_source` says where the key comes from."""

    base: str
    key: str | None = field(default=None, repr=False)
    key_source: str = "none was given"

    @property
    def root(self) -> str:
        """The URL without the version: clients of Anthropic's API append it themselves."""
        return self.base.removesuffix("/v1")

    @property
    def headers(self) -> dict[str, str]:
        return {"Authorization": f"Bearer {self.key}"} if self.key else {}


@dataclass(frozen=True, kw_only=True)
class ServedModel:
    id: str
    context: int | None  # None: the endpoint does not report it


def parse_url(text: str) -> str:
    """Return the base URL of an endpoint from what people copy: with or without /v1, or a whole route. Raises
    UsageError."""
    try:
        parts = urlsplit(text.strip())
        is_address = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # an invalid port, or an incomplete IPv6 address
        is_address = False
    if not is_address or parts.query or parts.fragment:
        message = f"not the URL of an endpoint: {text}"
        raise UsageError(message, hint="as in http://127.0.0.1:11435/v1")
    if parts.username or parts.password:
        message = f"a URL with a password would appear in logs: {parts.scheme}://…@{parts.hostname}"
        raise UsageError(message, hint=f"give the key with --key-file FILE or the variable {KEY_VARIABLE}")
    path = parts.path.rstrip("/")
    for route in ("/chat/completions", "/models", "/completions"):
        path = path.removesuffix(route)
    return f"{parts.scheme}://{parts.netloc}{path or '/v1'}"


def read_key_file(path: Path) -> str:
    """Return the key in the file. Raises ConfigError for a file that cannot be read, is empty, or has more than one
    word."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeError) as error:
        message = f"the key file cannot be read: {path}: {error}"
        raise ConfigError(message, hint="--key-file takes a file that contains only the key") from error
    return _key_in(text, f"the key file {path}")


def _key_in(text: str, source: str) -> str:
    key = text.strip()
    if not key or len(key.split()) != 1 or not key.isascii() or not key.isprintable():
        what = "is empty" if not key else "does not contain exactly one key"
        message = f"{source} {what}"
        raise ConfigError(message, hint="`docker exec NAME appliance key` prints the key of an appliance")
    return key


def given_endpoint(url: str, key_file: str | None, environment: Mapping[str, str]) -> Endpoint:
    base = parse_url(url)
    if key_file:
        return Endpoint(base=base, key=read_key_file(Path(key_file)), key_source=f"from {key_file}")
    if environment.get(KEY_VARIABLE):
        source = f"the variable {KEY_VARIABLE}"
        return Endpoint(base=base, key=_key_in(environment[KEY_VARIABLE], source), key_source=f"from {source}")
    return Endpoint(base=base)


def local_endpoint(name: str | None) -> Endpoint:
    """Return the endpoint of the appliance on this machine. Raises ConfigError if there is none, or several."""
    try:
        # Imported here: docker-py costs 0.2 s, and a call with a URL does not need it.
        from appliance.host.docker import containers
        from appliance.host.docker.daemon import connected
    except ModuleNotFoundError as error:
        message = f"no URL was given, and asking Docker for one needs a Python package: {error.name}"
        hint = "give the URL, as in http://127.0.0.1:11435/v1, with the key in OPENAI_API_KEY; or pip install docker"
        raise ConfigError(message, hint=hint) from error
    with connected(process_environment()) as client:
        found = containers.choose(containers.all_of_ours(client), name)
        gateway = containers.gateway(client, found)
    return Endpoint(base=gateway.url, key=gateway.key or None, key_source=f"from the volume of {found.name}")


def query_models(endpoint: Endpoint) -> tuple[ServedModel, ...]:
    """Return the models that the endpoint lists; empty if it has no such route. Raises ConfigError if it cannot be
    used."""
    status, body = _get(endpoint, "/models")
    if status in (404, 405, 501):
        return ()
    raise_if_refused(endpoint, status, body)
    try:
        return tuple(ServedModel(id=str(row["id"]), context=_context_of(row)) for row in load(body)["data"])
    except (ValueError, KeyError, TypeError) as error:
        message = f"not an OpenAI endpoint: {endpoint.base}/models answered {said_in(body)!r}"
        raise ConfigError(message, hint="the URL ends with /v1 for most servers") from error


def choose_model(endpoint: Endpoint, wanted: str | None, served: tuple[ServedModel, ...]) -> ServedModel:
    """Return the wanted model, or the only one. A name that is not listed is accepted, since aliases are often not
    listed. Raises ConfigError if there is none, or a choice."""
    if wanted:
        return next((model for model in served if model.id == wanted), ServedModel(id=wanted, context=None))
    if len(served) == 1:
        return served[0]
    if not served:
        message = f"the endpoint lists no models: {endpoint.base}/models"
        raise ConfigError(message, hint="name one with --model NAME")
    message = f"the endpoint serves several models: {', '.join(model.id for model in served[:10])}"
    raise ConfigError(message, hint="choose one with --model NAME")


def raise_if_refused(endpoint: Endpoint, status: int, body: bytes) -> None:
    """Raise ConfigError for a refused key or a wrong URL, EngineNotReadyError for a server that is busy or broken. Does
    nothing for a status below 400."""
    if status < 400:
        return
    said = said_in(body)
    if status in (401, 403):
        message = f"the endpoint refuses the key: {endpoint.base}: {status} {said} (key: {endpoint.key_source})"
        raise ConfigError(
            message,
            hint=f"give it with --key-file FILE or {KEY_VARIABLE}; an appliance's: `docker exec NAME appliance key`",
        )
    message = f"the endpoint answers {status}: {endpoint.base}: {said}"
    if status in (429, 502, 503, 504):
        raise EngineNotReadyError(message, hint="wait until it is ready: `appliance status`")
    raise ConfigError(message, hint="check the URL; it ends with /v1 for most servers")


def _context_of(row: Mapping[str, Any]) -> int | None:
    meta = row.get("meta")
    found = [row.get(name) for name in _CONTEXT_FIELDS] + [meta.get("n_ctx") if isinstance(meta, dict) else None]
    return next((value for value in found if isinstance(value, int) and value > 0), None)


def _get(endpoint: Endpoint, route: str) -> tuple[int, bytes]:
    parts = urlsplit(endpoint.base + route)
    kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
    connection = kind(parts.hostname or "", parts.port, timeout=TIMEOUT_S)
    try:
        return exchange(connection, "GET", parts.path, endpoint.headers)
    except NoAnswerError as error:
        message = f"no answer from {endpoint.base}: {error}"
        raise ConfigError(
            message, hint="check that it runs and that this is its address: `appliance status`"
        ) from error
    finally:
        connection.close()
