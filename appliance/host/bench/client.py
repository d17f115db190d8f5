"""Sends one streamed chat request at a time and measures it with our own clock."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

import aiohttp

from appliance.host.bench.figures import Sample
from appliance.host.bench.stream import BrokenAnswerError, Piece, read_answer
from appliance.host.docker.endpoint import Endpoint, raise_if_refused
from appliance.host.docker.http import said_in

# Servers differ in how they limit an answer's length: the first form that is not refused is kept. Without `ignore_eos`
# a model may end early; the actual number of tokens is counted in any case.
_FORMS: tuple[Mapping[str, Any], ...] = (
    {"max_tokens": 0, "ignore_eos": True},
    {"max_tokens": 0},
    {"max_completion_tokens": 0},
)
_TOO_LONG = ("context_length", "context length", "exceed_context", "context size", "context window", "maximum context",
             "prompt is too long", "input is too long")  # fmt: skip
# A server may close an idle connection just when the next request is sent: that is not a failure of the request.
_CLOSED = (aiohttp.ServerDisconnectedError, aiohttp.ClientOSError)
_STALE = Sample(started_s=0.0, ended_s=0.0, failure="the connection was closed before an answer")
# shorter than the 5 s or more after which servers close idle connections: a request at that moment would fail
_KEPT_S = 2.0


class Client:
    def __init__(self, session: aiohttp.ClientSession, endpoint: Endpoint, model: str) -> None:
        self._session = session
        self._endpoint = endpoint
        self._model = model
        self._forms = list(_FORMS)

    async def ask(self, prompt: str, tokens: int) -> Sample:
        """Send one request. Raises ConfigError if the key is refused; every other failure is in the sample."""
        sample = await self._ask_in_form(prompt, tokens, may_be_stale=True)
        return await self._ask_in_form(prompt, tokens, may_be_stale=False) if sample is _STALE else sample

    async def _ask_in_form(self, prompt: str, tokens: int, *, may_be_stale: bool) -> Sample:
        while (sample := await self._ask(prompt, tokens, may_be_stale=may_be_stale)) is None:
            del self._forms[0]  # this form was refused, and no request was answered in it yet
        return sample

    async def _ask(self, prompt: str, tokens: int, *, may_be_stale: bool) -> Sample | None:
        """Send one request in the current form. None: ask again in the next form. `_STALE`: ask again on another
        connection."""
        pieces: list[Piece] = []
        began = time.perf_counter()
        try:
            async with self._session.post("chat/completions", json=self._body(prompt, tokens)) as reply:
                if reply.status != 200:
                    return self._refused(reply.status, await reply.read(), began)
                self._forms = self._forms[:1]
                async for data in reply.content.iter_any():
                    pieces.append(Piece(at_s=time.perf_counter() - began, data=data))
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            is_stale = isinstance(error, _CLOSED) and not isinstance(error, aiohttp.ClientConnectorError)
            return _STALE if may_be_stale and is_stale and not pieces else _failed(began, _named(error))
        try:
            ended = began + pieces[-1].at_s if pieces else began
            return Sample(started_s=began, ended_s=ended, answer=read_answer(pieces))
        except BrokenAnswerError as error:
            return _failed(began, str(error))

    def _body(self, prompt: str, tokens: int) -> dict[str, Any]:
        limits = {name: value or tokens for name, value in self._forms[0].items()}
        return {
            "model": self._model,
            "messages": [{"role": "user", "content": prompt}],
            # greedy decoding of a small model falls into loops, which make speculative decoding look too fast
            "temperature": 0.7,
            "stream": True,
            "stream_options": {"include_usage": True},
            **limits,
        }

    def _refused(self, status: int, body: bytes, began: float) -> Sample | None:
        """Return the failed sample; None: ask again in the next form."""
        if status in (401, 403):
            raise_if_refused(self._endpoint, status, body)
        said = said_in(body)
        if status in (400, 413, 422) and any(words in body.decode(errors="replace").lower() for words in _TOO_LONG):
            return Sample(started_s=began, ended_s=time.perf_counter(), too_long=said)
        if status in (400, 422) and len(self._forms) > 1:
            return None
        return _failed(began, f"HTTP {status}: {said}")


def _failed(began: float, reason: str) -> Sample:
    return Sample(started_s=began, ended_s=time.perf_counter(), failure=reason)


def _named(error: Exception) -> str:
    """Return a uniform reason, without addresses and counts that would make each failure a kind of its own."""
    kinds = (
        (TimeoutError, "no data within the timeout"),
        (aiohttp.ClientConnectorError, "no connection"),
        (aiohttp.ServerDisconnectedError, "the connection was closed before an answer"),
        (aiohttp.ClientPayloadError, "the connection broke in mid-answer"),
        (aiohttp.ClientOSError, "the connection was closed before an answer"),
    )
    return next((words for kind, words in kinds if isinstance(error, kind)), f"{type(error).__name__}: {error}")


@asynccontextmanager
async def connect(endpoint: Endpoint, model: str, timeout_s: float) -> AsyncIterator[Client]:
    """Yield a client. `timeout_s` is the longest time without a byte; the whole answer may take longer."""
    async with aiohttp.ClientSession(
        base_url=f"{endpoint.base}/",
        headers=endpoint.headers,
        timeout=aiohttp.ClientTimeout(total=None, connect=30.0, sock_read=timeout_s),
        connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=_KEPT_S),
    ) as session:
        yield Client(session, endpoint, model)
