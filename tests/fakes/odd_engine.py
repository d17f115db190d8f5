"""An engine that answers in ways that a healthy one does not: slow, torn, compressed, talkative.

    odd_engine.py SOCKET

What it does with a POST is said by the request's body, `{"act": NAME}`, one of ACTS. `GET /fake/ledger` tells how many
clients left in the middle and how many bytes the last flood could send. Only the standard library is used.
"""

from __future__ import annotations

import asyncio
import gzip
import json
import sys
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

EVENTS = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"


@dataclass
class Ledger:
    working: int = 0
    disconnects: int = 0
    flooded_bytes: int = 0
    crowding: int = 0
    pairs: int = 0
    side_by_side: int = 0
    most_side_by_side: int = 0


LEDGER = Ledger()
TWO_CAME = asyncio.Event()
Act = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)


def whole(body: bytes, *headers: bytes) -> bytes:
    head = [b"HTTP/1.1 200 OK", b"Content-Length: %d" % len(body), *headers]
    return b"\r\n".join(head) + b"\r\n\r\n" + body


async def slow(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """No byte for a minute, as in a long prefill; ends when the client leaves."""
    try:
        async with asyncio.timeout(60):
            await reader.read()
        LEDGER.disconnects += 1
    except TimeoutError:
        writer.write(whole(b"{}"))


async def refused_without_a_word(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.write(b"HTTP/1.1 415 Unsupported Media Type\r\nContent-Length: 0\r\n\r\n")


async def refused(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Refuse with 400 in llama-server's form, which is the same for all APIs."""
    error = {"code": 400, "message": "'messages' must not be empty", "type": "invalid_request_error"}
    body = json.dumps({"error": error}).encode()
    writer.write(b"HTTP/1.1 400 Bad Request\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body))


async def torn_reply(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.write(whole(b'{"choices":[]}', b"Content-Type: application/json")[:-4])


async def torn_event(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.write(EVENTS + chunk(b'data: {"choices":[]}\n\n') + chunk(b'data: {"cho'))


async def torn_bytes(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """A chunked body that is no stream of events."""
    head = b"HTTP/1.1 200 OK\r\nContent-Type: audio/wav\r\nTransfer-Encoding: chunked\r\n\r\n"
    writer.write(head + chunk(b"RIFF"))


async def flood(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """64 MiB of events as fast as they are taken."""
    writer.write(EVENTS)
    LEDGER.flooded_bytes = 0
    try:
        for _sent in range(1024):
            writer.write(chunk(b"data: " + b"x" * 65_528 + b"\n\n"))
            await writer.drain()
            LEDGER.flooded_bytes += 65_536
    except ConnectionError:
        LEDGER.disconnects += 1
        return
    writer.write(chunk(b""))


async def headers(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Everything that must not pass, and two that must."""
    sent = (
        b"Content-Type: application/json",
        b"Server: llama.cpp",
        b"Set-Cookie: a=b",
        b"Access-Control-Allow-Origin: https://evil.example",
        b"Access-Control-Allow-Credentials: true",
        b"Connection: close, X-Private",
        b"X-Private: 1",
        b"Keep-Alive: timeout=5",
        b"X-Custom: kept",
    )
    writer.write(whole(b"{}", *sent))


async def compressed(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Compressed although `identity` was asked for."""
    body = gzip.compress(b'{"squeezed":true}', mtime=0)
    writer.write(whole(body, b"Content-Type: application/json", b"Content-Encoding: gzip"))


async def big(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """16 MiB of known length."""
    writer.write(whole(b"[" + b"1," * (8 * 2**20 - 1) + b"]"))
    await writer.drain()


async def redirect(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.write(b"HTTP/1.1 302 Found\r\nLocation: /slots\r\nContent-Length: 0\r\n\r\n")


async def api_error(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """An error as llama-server gives it, with its number for a code."""
    error = b'{"error":{"code":400,"message":"the prompt is too long","type":"exceed_context_size_error","n_ctx":512}}'
    head = b"HTTP/1.1 400 Bad Request\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(error)
    writer.write(head + error)


# As llama-server and vLLM write them: an answer, and an event of OpenAI's or Anthropic's form.
UNTOLD = b'{"error":{"code":501,"message":"This server does not support embeddings. Start it with `--embeddings`"}}'
DEAD = b"EngineCore encountered an issue. See stack trace (above) for the root cause."


async def flag_named(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """In chunks, so that its length is not known."""
    head = b"HTTP/1.1 501 Not Implemented\r\nContent-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n"
    writer.write(head + chunk(UNTOLD) + chunk(b""))


async def flag_streamed(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.write(EVENTS + chunk(b'data: {"choices":[]}\n\n') + chunk(b"data: " + UNTOLD + b"\n\n") + chunk(b""))


async def flag_in_event(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    event = b'event: error\ndata: {"type":"error","error":{"type":"InternalServerError","message":"%s"}}\n\n' % DEAD
    writer.write(EVENTS + chunk(event) + chunk(b""))


async def flag_in_text(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Answer with text of the model that looks like an error but is none."""
    writer.write(whole(b'{"content":"%s"}' % DEAD, b"Content-Type: application/json"))


CROWDED = b'{"error":{"code":500,"message":"Context size has been exceeded.","type":"server_error"}}'


async def full(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Answer as llama-server does to all running requests when their shared context is full."""
    LEDGER.crowding += 1
    end_crowded(writer)


def end_crowded(writer: asyncio.StreamWriter) -> None:
    head = b"HTTP/1.1 500 Internal Server Error\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"
    writer.write(head % len(CROWDED) + CROWDED)


async def full_later(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.write(EVENTS + chunk(b'data: {"choices":[]}\n\n') + chunk(b"data: " + CROWDED + b"\n\n") + chunk(b""))


async def crowded(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """The first two run together and are ended; who comes later is answered, after a while."""
    if LEDGER.pairs < 2:
        LEDGER.pairs += 1
        if LEDGER.pairs == 2:
            TWO_CAME.set()
        await TWO_CAME.wait()
        end_crowded(writer)
        return
    LEDGER.side_by_side += 1
    LEDGER.most_side_by_side = max(LEDGER.most_side_by_side, LEDGER.side_by_side)
    await asyncio.sleep(0.1)
    LEDGER.side_by_side -= 1
    writer.write(whole(b"{}"))


async def nothing(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Closes without a byte."""


ACTS: dict[str, Act] = {
    "slow": slow,
    "torn_reply": torn_reply,
    "torn_event": torn_event,
    "torn_bytes": torn_bytes,
    "flood": flood,
    "headers": headers,
    "compressed": compressed,
    "big": big,
    "redirect": redirect,
    "refusal": api_error,
    "refused": refused,
    "refused_without_a_word": refused_without_a_word,
    "flag_named": flag_named,
    "flag_streamed": flag_streamed,
    "flag_in_event": flag_in_event,
    "flag_in_text": flag_in_text,
    "full": full,
    "full_later": full_later,
    "crowded": crowded,
    "nothing": nothing,
}


async def serve_one(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        head = (await reader.readuntil(b"\r\n\r\n")).lower()
        if head.startswith(b"get /fake/ledger"):
            writer.write(whole(json.dumps(vars(LEDGER)).encode()))
            return
        length = int(head.partition(b"content-length:")[2].split(b"\r\n")[0] or 0)
        act = ACTS[json.loads(await reader.readexactly(length))["act"]]
        LEDGER.working += 1
        await act(reader, writer)
    except asyncio.IncompleteReadError:
        return  # connected and said nothing: a look whether it listens
    finally:
        writer.close()


async def serve(socket_path: str) -> None:
    server = await asyncio.start_unix_server(serve_one, socket_path)
    await server.serve_forever()


def main(arguments: list[str]) -> None:
    asyncio.run(serve(arguments[0]))


if __name__ == "__main__":
    main(sys.argv[1:])
