"""Answers of an engine as they come: what is passed on without a parser, in which order, and uploads that end early."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from itertools import pairwise
from pathlib import Path

import httptools
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from appliance.gateway.engine import upstream
from appliance.gateway.engine.upstream import BrokenError, Response
from appliance.gateway.wire.chunks import content_of
from tests.builders import examples

HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
END = b"0\r\n\r\n"
CONTENT = st.binary(min_size=1, max_size=300)
ODD = st.sampled_from(
    [b"0x2\r\nab\r\n", b"+2\r\nab\r\n", b"02\r\nab\r\n", b"2;a=b\r\nab\r\n", b"2 \r\nab\r\n", b"A\r\n", END]
)


def framed(content: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(content), content)


class Parsed:
    """What the HTTP parser makes of a chunked body."""

    def __init__(self, body: bytes) -> None:
        self.content = b""
        self.is_whole = False
        self.parser = httptools.HttpResponseParser(self)
        self.parser.feed_data(HEAD + body)

    def on_body(self, body: bytes) -> None:
        self.content += body

    def on_message_complete(self) -> None:
        self.is_whole = True


@given(st.lists(CONTENT, min_size=1, max_size=4))
def test_whole_chunks_are_seen_as_the_parser_sees_them(contents: list[bytes]) -> None:
    frames = b"".join(map(framed, contents))
    assert content_of(frames) == b"".join(contents) == Parsed(frames).content


@given(st.lists(CONTENT.map(framed) | ODD, max_size=4), st.integers(0, 600), st.integers(0, 600))
def test_bytes_that_are_taken_for_whole_chunks_end_where_one_ends(parts: list[bytes], begin: int, end: int) -> None:
    piece = b"".join(parts)[begin:end]
    content = content_of(piece)
    if content:
        parsed = Parsed(piece + framed(b"next") + END)
        assert (parsed.content, parsed.is_whole) == (content + b"next", True)


@pytest.mark.parametrize(
    "piece", [END, framed(b"ab") + END, framed(b"ab")[:-1], b"3\r\nab\r\n", b"\r\n", b"5", b"2\r\nabXY"]
)
def test_everything_else_is_the_parsers(piece: bytes) -> None:
    assert content_of(piece) is None


@settings(max_examples=examples(200))
@given(st.lists(CONTENT, min_size=1, max_size=12), st.lists(st.integers(0, 2000), max_size=8), st.lists(st.booleans()))
def test_every_byte_passes_once_and_in_order(contents: list[bytes], cuts: list[int], takes: list[bool]) -> None:
    """However the stream is cut, and whichever chunks the client takes at once."""
    assert asyncio.run(_passed(contents, cuts, takes)) == b"".join(contents)


async def _passed(contents: Sequence[bytes], cuts: Sequence[int], takes: Sequence[bool]) -> bytes:
    response, passed, will_take = Response("POST"), bytearray(), iter(takes)

    def pass_on(frames: bytes, content: bytes) -> bool:
        assert content_of(frames) == content
        if not next(will_take, True):
            return False
        passed.extend(content)
        return True

    async def read() -> None:
        await response.until_head()
        response.pass_on = pass_on
        async for piece in response.chunks():
            passed.extend(piece)

    reading = asyncio.create_task(read())
    data = b"".join(map(framed, contents)) + END
    response.data_received(HEAD)
    for begin, end in pairwise(sorted({0, len(data), *(cut % len(data) for cut in cuts)})):
        for _ in range(3):
            await asyncio.sleep(0)
        response.data_received(data[begin:end])
    await reading
    return bytes(passed)


Serve = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


@asynccontextmanager
async def engine(serve: Serve) -> AsyncIterator[Path]:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "engine")
        async with await asyncio.start_unix_server(serve, path):
            yield path


async def test_a_body_of_many_buffers_arrives_whole() -> None:
    body, arrived = bytes(range(256)) * 20_000, bytearray()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        while len(arrived) < len(body):
            arrived.extend(await reader.read(100_000))
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok")
        await writer.drain()
        writer.close()

    async with engine(serve) as path, upstream.request(path, "POST", "/", (), body) as response:
        assert await response.read() == b"ok"
    assert bytes(arrived) == body


@pytest.mark.parametrize("closes", [True, False])
async def test_an_engine_that_answers_before_the_body_ends_is_heard(closes: bool) -> None:
    is_over = asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 413 Too Large\r\nContent-Length: 2\r\n\r\nno")
        await writer.drain()
        if not closes:
            await is_over.wait()
        writer.close()

    async with engine(serve) as path:
        async with upstream.request(path, "POST", "/", (), b"x" * 10**7) as response:
            assert (response.status, await response.read()) == (413, b"no")
        is_over.set()


async def test_an_engine_that_ends_in_the_middle_of_a_body_is_broken() -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.close()

    async with engine(serve) as path:
        with pytest.raises(BrokenError):
            async with upstream.request(path, "POST", "/", (), b"x" * 10**7):
                pytest.fail("nothing was answered")
