"""Whether the engine answers: healthy is not enough, since one may be that and die of its first request."""

from __future__ import annotations

import asyncio
import json
import time
from pathlib import Path

from appliance.command import Readiness
from appliance.errors import EngineNotReadyError
from appliance.system.lack import is_lack

HEALTH_TIMEOUT_S = 5.0
AGAIN_S = 1.0  # a server of Python: asked more often it would look as if it were at work


def one_token(socket_path: Path, name: str, *, is_embedding: bool) -> Readiness:
    """One token of a word, or its vector, through the socket. By hand: an HTTP library costs a quarter of a second to
    import."""
    path, body = "/v1/completions", {"model": name, "prompt": "a", "max_tokens": 1, "temperature": 0}
    if is_embedding:
        path, body = "/v1/embeddings", {"model": name, "input": "a"}
    return _FirstToken(socket_path, path, json.dumps(body).encode()).is_ready


def health(socket_path: Path) -> Readiness:
    """Whether its server answers at all, whatever it says: it knows of its own processes that ended, and ends then."""
    request = _request("GET", "/health", b"")

    async def ask() -> bool:
        try:
            return await answer_of(socket_path, request) is not None
        except ValueError:  # no HTTP
            return False

    return ask


class _FirstToken:
    """Asks once and waits as long as it takes: kernels may be compiled for the first request, for minutes, and one that
    is given up and sent anew would have to wait for that again. The supervisor's stall timer watches meanwhile."""

    def __init__(self, socket_path: Path, path: str, body: bytes) -> None:
        self._socket_path = socket_path
        self._path = path
        self._request = _request("POST", path, body)
        self._asking: asyncio.Task[tuple[int, bytes] | None] | None = None
        self._not_before = 0.0

    async def is_ready(self) -> bool:
        """Raises EngineNotReadyError where the engine refuses the request: no other would be answered."""
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
            raise EngineNotReadyError(message, hint="image and appliance do not belong together; rebuild the image")
        return answer is not None and answer[0] == 200

    async def _is_healthy(self) -> bool:
        answer = None
        try:
            async with asyncio.timeout(HEALTH_TIMEOUT_S * 0.8):  # less than whoever asks us waits
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
    """Status and body, once the engine has sent all of it; None where nobody answers. Raises OSError for a lack of
    ours, which says nothing of the engine."""
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
