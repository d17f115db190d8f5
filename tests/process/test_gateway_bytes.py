"""Every byte of many streams at once: an engine that sends in any pieces, clients that read at any speed."""

from __future__ import annotations

import asyncio
import json
import random
import socket
from contextlib import suppress

import pytest

from tests.fakes.numbered_engine import NAMED_ERROR, Stream, stream
from tests.process.stages.gateway import KEY, Stage, on_stage

AT_ONCE = 24


def request(seed: int, version: str = "1.1") -> bytes:
    body = json.dumps({"seed": seed, "stream": True}).encode()
    head = f"POST /v1/chat/completions HTTP/{version}\r\nHost: a\r\nAuthorization: Bearer {KEY}\r\n"
    return f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body


class Client:
    """Reads answers in pieces of random sizes at random times; it sometimes stops for a while."""

    def __init__(self, port: int, rng: random.Random) -> None:
        self._rng = rng
        self._port = port
        self._held = b""
        self._pace = rng.choice((0.0, 0.0, 0.0, 0.0005))

    async def send(self, data: bytes) -> None:
        self._socket = socket.socket()
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, self._rng.choice((8_192, 65_536, 10**6)))
        # Loopback's segments are larger than a small buffer: the kernel would send one every 0.2 s then.
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG, 1_000)
        self._socket.setblocking(False)
        loop = asyncio.get_running_loop()
        await loop.sock_connect(self._socket, ("127.0.0.1", self._port))
        at = 0
        while at < len(data):  # requests come in pieces too
            size = self._rng.choice((10, 100, 10_000))
            await loop.sock_sendall(self._socket, data[at : at + size])
            at += size

    async def _more(self) -> bytes:
        if self._rng.random() < 0.01:
            await asyncio.sleep(self._rng.choice((0.01, 0.2)))
        await asyncio.sleep(self._pace)
        size = self._rng.choice((1_000, 20_000, 10**6))
        return await asyncio.get_running_loop().sock_recv(self._socket, size)

    async def read_some(self, pieces: int) -> None:
        """Read so many pieces, unless the answer is over before."""
        with suppress(TimeoutError):
            async with asyncio.timeout(1.0):
                for _ in range(pieces):
                    await self._more()

    async def _until(self, mark: bytes) -> bytes:
        while mark not in self._held:
            data = await self._more()
            assert data, f"ended before {mark!r}: {self._held[-200:]!r}"
            self._held += data
        found, _, self._held = self._held.partition(mark)
        return found

    async def in_chunks(self) -> bytes:
        """Return the body of the next answer."""
        head = await self._until(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 200 "), head
        assert b"transfer-encoding: chunked" in head
        body = []
        while size := int(await self._until(b"\r\n"), 16):
            while len(self._held) < size + 2:
                data = await self._more()
                assert data, "ended within a chunk"
                self._held += data
            assert self._held[size : size + 2] == b"\r\n"
            body.append(self._held[:size])
            self._held = self._held[size + 2 :]
        assert await self._until(b"\r\n") == b""
        return b"".join(body)

    async def until_closed(self) -> bytes:
        """Return the body of an answer that ends with the connection."""
        head = await self._until(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 200 "), head
        assert b"chunked" not in head
        while data := await self._more():
            self._held += data
        return self._held

    def close(self) -> None:
        self._socket.close()


def check(body: bytes, expected: Stream) -> None:
    """Every byte of the engine's comes once and in its order; after it, the end that is due."""
    assert body[: len(expected.body)] == expected.body
    rest = body[len(expected.body) :]
    if expected.end == "whole":
        assert rest == b""
    elif expected.end == "named error":
        assert rest == NAMED_ERROR
    else:
        error = json.loads(rest.removeprefix(b"\n\n").removeprefix(b"data: "))["error"]
        assert error["message"]
        assert b"[DONE]" not in rest


async def one(stage: Stage, seed: int) -> None:
    rng = random.Random(-seed - 1)
    client = Client(stage.port, rng)
    way = rng.choice(("alone", "alone", "pipelined", "old", "leaves"))
    try:
        if way == "old":
            await client.send(request(seed, "1.0"))
            check(await client.until_closed(), stream(seed))
        elif way == "leaves":
            await client.send(request(seed))
            await client.read_some(rng.randrange(20))
        else:
            seeds = [seed] if way == "alone" else [seed, seed + 4, seed + 8]
            await client.send(b"".join(map(request, seeds)))
            for each in seeds:
                check(await client.in_chunks(), stream(each))
    finally:
        client.close()


@pytest.mark.parametrize("first", [0, 1000])
def test_each_client_gets_every_byte_once_and_in_order(first: int) -> None:
    async def all_of_them(stage: Stage) -> None:
        async with asyncio.timeout(300):
            await asyncio.gather(*(one(stage, first + seed) for seed in range(AT_ONCE)))

    with on_stage("numbered_engine.py") as stage:
        asyncio.run(all_of_them(stage))
