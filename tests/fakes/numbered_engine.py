"""An engine whose streams are numbered: pieces of random sizes at random times, torn and joined at random places.

    numbered_engine.py SOCKET

A POST's body `{"seed": N}` chooses the stream. `stream(N)` returns the bytes that a client has to get, so that a test
can compare every one. Only the standard library is used.
"""

from __future__ import annotations

import asyncio
import json
import random
import sys
from dataclasses import dataclass

HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
ERROR = b'data: {"error":{"message":"out of memory","type":"server_error","code":500}}\n\n'
NAMED_ERROR = b'event: error\ndata: {"type":"error","error":{"type":"api_error","message":"out of memory"}}\n\n'
# What looks like the beginning of an error, and is none.
ALIKE = (
    b'data: {"err":1}\n\n',
    b"event: errands\ndata: 1\n\n",
    b'data: {"error_count":0}\n\n',
    b"data: event: error\n\n",
)
ENDS = ("whole", "dies", "error", "named error")
SIZES = (0, 1, 7, 40, 300, 5_000, 70_000, 300_000)


@dataclass(frozen=True)
class Stream:
    """One stream: `body` without what ends it, which is `end`; `cuts` are the sizes of its chunks."""

    body: bytes
    end: str
    cuts: tuple[int, ...]


def stream(seed: int) -> Stream:
    rng = random.Random(seed)
    end = ENDS[seed % len(ENDS)] if seed % 2 else "whole"
    events = []
    for number in range(rng.randrange(20, 200)):
        filler = b"x" * rng.choices(SIZES, (20, 20, 20, 20, 10, 5, 1, 0.3))[0]
        events.append(b'data: {"n":%d,"text":"%s"}\n\n' % (number, filler))
        if rng.random() < 0.1:
            events.append(rng.choice(ALIKE))
        if rng.random() < 0.05:
            events.append(b": still here\n\n")
    is_whole = rng.random() < 0.5  # each chunk has whole events, as those of engines mostly have
    cuts = [len(event) for event in events] if is_whole else _cut(rng, sum(map(len, events)))
    return Stream(body=b"".join(events), end=end, cuts=tuple(cuts))


def _cut(rng: random.Random, size: int) -> list[int]:
    cuts = []
    while size:
        cuts.append(min(size, rng.choice((1, 2, 5, 30, 200, 3_000, 100_000))))
        size -= cuts[-1]
    return cuts


def framed(found: Stream, rng: random.Random) -> bytes:
    """Return the answer in chunks, with its end."""
    pieces, at = [], 0
    for size in found.cuts:
        pieces.append(found.body[at : at + size])
        at += size
    if found.end in ("error", "named error"):
        error = ERROR if found.end == "error" else NAMED_ERROR
        at = rng.randrange(1, len(error))
        pieces += [error[:at], error[at:], b"data: [DONE]\n\n"]
    chunks = b"".join(b"%x\r\n%b\r\n" % (len(piece), piece) for piece in pieces)
    return HEAD + chunks + (b"" if found.end == "dies" else b"0\r\n\r\n")


async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        head = (await reader.readuntil(b"\r\n\r\n")).lower()
        length = int(head.partition(b"content-length:")[2].split(b"\r\n")[0] or 0)
        seed = json.loads(await reader.readexactly(length))["seed"]
        rng = random.Random(seed + 1)
        data, at = framed(stream(seed), rng), 0
        while at < len(data):  # several chunks in one packet, and a chunk over several
            size = rng.choices((1, 20, 150, 1_000, 20_000, 10**6), (5, 30, 40, 20, 4, 1))[0]
            writer.write(data[at : at + size])
            at += size
            await writer.drain()
            await asyncio.sleep(rng.choice((0, 0, 0, 0.0002, 0.002)))
    except (asyncio.IncompleteReadError, ConnectionError):
        return  # a look whether it listens, or a client that left
    finally:
        writer.close()


async def serve(socket_path: str) -> None:
    server = await asyncio.start_unix_server(answer, socket_path)
    await server.serve_forever()


def main(arguments: list[str]) -> None:
    asyncio.run(serve(arguments[0]))


if __name__ == "__main__":
    main(sys.argv[1:])
