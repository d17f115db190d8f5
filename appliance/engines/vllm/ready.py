"""Whether the engine answers: healthy is not enough, since one may be that and die of its first request."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

from appliance.command import Readiness

TIMEOUT_S = 600.0  # kernels may be compiled at the first request; the supervisor's stall timer watches that they are


def one_token(socket_path: Path, name: str, *, is_embedding: bool) -> Readiness:
    """One token of a word, or its vector, through the socket. By hand: an HTTP library costs a quarter of a second to
    import."""
    path, body = "/v1/completions", {"model": name, "prompt": "a", "max_tokens": 1, "temperature": 0}
    if is_embedding:
        path, body = "/v1/embeddings", {"model": name, "input": "a"}
    request = _request("POST", path, json.dumps(body).encode())

    async def ask() -> bool:
        if await _status(socket_path, _request("GET", "/health", b""), timeout_s=5.0) != 200:
            return False
        return await _status(socket_path, request, timeout_s=TIMEOUT_S) == 200

    return ask


def _request(method: str, path: str, body: bytes) -> bytes:
    head = f"{method} {path} HTTP/1.1\r\nHost: engine\r\nConnection: close\r\n"
    if body:
        head += f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n"
    return head.encode() + b"\r\n" + body


async def _status(socket_path: Path, request: bytes, *, timeout_s: float) -> int | None:
    """None where nobody answers; the whole answer is read, so that the engine has sent all of it."""
    writer = None
    try:
        async with asyncio.timeout(timeout_s):
            reader, writer = await asyncio.open_unix_connection(str(socket_path))
            writer.write(request)
            line = await reader.readline()
            await reader.read()
    except (OSError, TimeoutError):
        return None
    finally:
        if writer is not None:
            writer.close()
    words = line.split(b" ", 2)
    return int(words[1]) if len(words) > 1 and words[1].isdigit() else None
