"""The management API of one-api and its forks: nearly every failure is HTTP 200 with `"success": false`."""

from __future__ import annotations

import http.client
import json
import time
from collections.abc import Mapping
from http.cookies import SimpleCookie
from typing import Any

from appliance.documents import load
from appliance.errors import EngineNotReadyError
from appliance.host.docker.http import NoAnswerError, said, said_in
from appliance.values import dataclass

ASK_S = 15.0
BUSY_TRIES = 4  # attempts of a request that is answered with 429, an answer without body or waiting time
BUSY_S = 1.0


class RefusedError(Exception):
    """The answer has `success: false`, an error status, or another form than this API's."""


@dataclass(frozen=True, kw_only=True)
class Answer:
    data: Any
    message: str
    cookies: Mapping[str, str]


@dataclass(frozen=True, kw_only=True)
class Api:
    """The API with the headers that authenticate; the repr does not show them."""

    host: str
    port: int
    headers: Mapping[str, str]

    def __repr__(self) -> str:
        return f"Api({self.url})"

    @property
    def url(self) -> str:
        return f"http://{f'[{self.host}]' if ':' in self.host else self.host}:{self.port}"

    def with_headers(self, **headers: str) -> Api:
        """Return the API with these headers instead of the earlier ones. `_` stands for `-`."""
        return Api(
            host=self.host, port=self.port, headers={name.replace("_", "-"): text for name, text in headers.items()}
        )

    def ask(self, method: str, path: str, body: object = None) -> Answer:
        """Send a request. Raises RefusedError with the server's message, NoAnswerError if there is no answer,
        EngineNotReadyError if it keeps answering 429."""
        for left in range(BUSY_TRIES - 1, -1, -1):
            status, cookies, data = self._exchange(method, path, body)
            if status != http.HTTPStatus.TOO_MANY_REQUESTS:
                return _answer(f"{method} {path}", status, cookies, data)
            if left:
                time.sleep(BUSY_S)
        message = f"too many requests from this address: {self.url}{path} keeps answering 429"
        raise EngineNotReadyError(message, hint="one-api allows 20 logins in 20 minutes: wait, then start again")

    def models(self, token: str) -> tuple[str, ...]:
        """Return the models that a client with this relay token is offered. Raises RefusedError and NoAnswerError."""
        relay = self.with_headers(Authorization=f"Bearer {token}")
        status, _, data = relay._exchange("GET", "/v1/models", None)
        try:
            return tuple(str(row["id"]) for row in load(data)["data"])
        except (ValueError, KeyError, TypeError) as error:
            message = f"GET /v1/models: HTTP {status}: {said_in(data)}"
            raise RefusedError(message) from error

    def _exchange(self, method: str, path: str, body: object) -> tuple[int, Mapping[str, str], bytes]:
        connection = http.client.HTTPConnection(self.host, self.port, timeout=ASK_S)
        try:
            content = {"Content-Type": "application/json"} if body is not None else {}
            data = None if body is None else json.dumps(body)
            connection.request(method, path, data, {**content, **self.headers})
            response = connection.getresponse()
            cookies = SimpleCookie("; ".join(response.headers.get_all("Set-Cookie", [])))
            return response.status, {name: each.value for name, each in cookies.items()}, response.read()
        except (OSError, http.client.HTTPException) as error:
            message = f"{type(error).__name__}: {error}"
            raise NoAnswerError(message) from error
        finally:
            connection.close()


def _answer(what: str, status: int, cookies: Mapping[str, str], data: bytes) -> Answer:
    try:
        document = load(data)
    except ValueError as error:
        message = f"{what}: HTTP {status}: {said_in(data)}"
        raise RefusedError(message) from error
    if status >= 400 or document.get("success") is not True:
        message = f"{what}: {said(document) or f'HTTP {status} without a reason'}"
        raise RefusedError(message)
    return Answer(data=document.get("data"), message=str(document.get("message") or ""), cookies=cookies)
