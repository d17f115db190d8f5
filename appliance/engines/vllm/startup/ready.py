"""Readiness of the engine: it must answer a first request, since a healthy engine may still die of it."""

from __future__ import annotations

import asyncio
import json
import time
from pathlib import Path

from appliance.command import Readiness
from appliance.errors import EngineNotReadyError
from appliance.system.lack import is_lack

HEALTH_TIMEOUT_S = 5.0
AGAIN_S = 1.0  # asking costs the Python server CPU time, which the stall timer would take for work


def one_token(socket_path: Path, name: str, *, is_embedding: bool) -> Readiness:
    """Return a check that the engine generates one token, or one vector for embedding models. It writes HTTP by hand,
    since importing an HTTP library takes 0.25 s."""
    path, body = "/v1/completions", {"model": name, "prompt": "a", "max_tokens": 1, "temperature": 0}
    if is_embedding:
        path, body = "/v1/embeddings", {"model": name, "input": "a"}
    return _FirstToken(socket_path, path, json.dumps(body).encode()).is_ready


def health(socket_path: Path) -> Readiness:
    """Return a check that the server answers at all. Any status counts: the server ends by itself if one of its
    processes has ended."""
    request = _request("GET", "/health", b"")

    async def ask() -> bool:
        try:
            return await answer_of(socket_path, request) is not None
        except ValueError:  # the answer is not HTTP
            return False

    return ask


class _FirstToken:
    """The first request. It is sent once and waited for without a limit: kernels may be compiled for it for minutes,
    and a second request would wait just as long. The supervisor's stall timer ends an engine that hangs."""

    def __init__(self, socket_path: Path, path: str, body: bytes) -> None:
        self._socket_path = socket_path
        self._path = path
        self._request = _request("POST", path, body)
        self._asking: asyncio.Task[tuple[int, bytes] | None] | None = None
        self._not_before = 0.0

    async def is_ready(self) -> bool:
        """True once the request was answered. Raises EngineNotReadyError if the engine refuses it: it would refuse
        every other request too."""
        if self._asking is None:
            if time.monotonic() < self._not_before or not await self._is_healthy():
                return False
            self._asking = asyncio.create_task(answer_of(self._socket_path, self._request))
        done, _ = await asyncio.wait({self._asking}, timeout=HEALTH_TIMEOUT_S / 5)
        if not done:
            return False
        asked, self._asking = self._asking, None
        answer = asked.result()
        self._not_before = time.monotonic() + AGAIN_S
        if answer is not None and 400 <= answer[0] < 500:
            said = answer[1][:300].decode(errors="replace")
            message = f"engine refused its first request, {self._path}: {answer[0]}: {said}"
            raise EngineNotReadyError(
                message, hint="the appliance does not match this image's engine; rebuild the image"
            )
        return answer is not None and answer[0] == 200

    async def _is_healthy(self) -> bool:
        answer = None
        try:
            async with asyncio.timeout(HEALTH_TIMEOUT_S * 0.8):  # less than the supervisor waits for `is_ready`
                answer = await answer_of(self._socket_path, _request("GET", "/health", b""))
        except TimeoutError:
            return False
        return answer is not None and answer[0] == 200


def _request(method: str, path: str, body: bytes) -> bytes:
    head = f"{method} {path} HTTP/1.1\r\nHost: engine\r\nConnection: close\r\n"
    if body:
        head += f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n"
    return head.encode() + b"\r\n" + body


async def answer_of(socket_path: Path, request: bytes) -> tuple[int, bytes] | None:
    """Return status and body of a complete answer, or None if the server does not answer. Raises OSError if this
    process lacks a resource such as file descriptors: that says nothing about the engine."""
    writer = None
    try:
        reader, writer = await asyncio.open_unix_connection(str(socket_path))
        writer.write(request)
        line, rest = await reader.readline(), await reader.read()
    except OSError as error:
        if is_lack(error):
            raise
        return None
    finally:
        if writer is not None:
            writer.close()
    words = line.split(b" ", 2)
    return (int(words[1]), rest.partition(b"\r\n\r\n")[2]) if len(words) > 1 and words[1].isdigit() else None
