"""One request to the engine and its answer back, byte for byte: no body is parsed, no stream is gathered.

A request ends in one of four ways, whichever comes first: the answer is whole, the client leaves, the engine dies, or
the appliance stops. In every case the connection to the engine is closed before the request is over, which is what
frees the engine's slot.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Any, TypeVar

from appliance.console.progress import Progress
from appliance.engine_route import Dialect, EngineRoute
from appliance.gateway.clients import request_queue as hold
from appliance.gateway.clients.traffic import Rate, Traffic
from appliance.gateway.engine.engine_errors import EngineErrors, in_anthropic_form
from appliance.gateway.engine.upstream import BrokenError, HungError, LackError, Response, UnreachableError
from appliance.gateway.engine.upstream_pool import UpstreamPool
from appliance.gateway.routes.metrics import FAILED
from appliance.gateway.wire import api_error, events, headers
from appliance.gateway.wire.api_error import ApiError
from appliance.gateway.wire.model_name import with_model
from appliance.race import first_of

if TYPE_CHECKING:
    from starlette.types import Receive, Scope, Send

T = TypeVar("T")

# An answer of known length up to here is read whole first, so that an engine that dies in the middle of it becomes a
# 502 and not a torn body. Longer ones (embeddings of a large batch) pass as they arrive.
WHOLE_REPLY_BYTES = 8 * 2**20
BODY_BYTES_MAX = 64 * 2**20  # of a request: each is held in memory while the engine answers
# Of a request that did not fit beside others, one after the other: others that came since may crowd it out again.
ATTEMPTS_ALONE = 2


class CrowdedError(Exception):
    """The engine ended all requests that ran, since they do not fit into its context together; nothing of this one's
    answer was sent."""


class ClientLeft(Exception):  # noqa: N818 - not an error: nobody is there any more to be told one
    """The client closed its connection before the answer was whole."""


class ResponseWriter:
    """What the client has been sent so far, and therefore how an error can still be told."""

    def __init__(self, send: Send, dialect: Dialect) -> None:
        self._send = send
        self._dialect = dialect
        self._last_chunk = b"\n\n"
        self.is_started = False
        self._is_events = False

    async def start(self, response: Response) -> None:
        await self._start(response.status, headers.to_client(response.headers), is_events=response.is_stream)

    async def _start(self, status: int, head: headers.RawHeaders, *, is_events: bool) -> None:
        self.is_started, self._is_events = True, is_events
        await self._send({"type": "http.response.start", "status": status, "headers": head})

    async def engine_error(self, response: Response, body: bytes) -> None:
        """The engine's own error as it is, or in the words of Anthropic's API if the client speaks that one."""
        if self._dialect == "anthropic" and (told := in_anthropic_form(body, response.status)) is not None:
            await self.document(told.document("anthropic"), response.status)
        else:
            await self.start(response)
            await self.finish(body)

    async def comment(self, text: str) -> None:
        """A line that every reader of events passes over. The first one begins the stream before the engine does."""
        if not self.is_started:
            await self._start(200, headers.OF_A_STREAM, is_events=True)
        await self.write(f": {' '.join(text.split())}\n\n".encode())

    async def document(self, document: dict[str, Any], status: int = 200) -> None:
        """An answer of our own; the server itself leaves the body out of a reply to HEAD."""
        body = json.dumps(document, separators=(",", ":")).encode()
        head = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
        await self._start(status, head, is_events=False)
        await self.finish(body)

    async def write(self, chunk: bytes) -> None:
        self._last_chunk = chunk
        await self._send({"type": "http.response.body", "body": chunk, "more_body": True})

    async def finish(self, chunk: bytes = b"") -> None:
        await self._send({"type": "http.response.body", "body": chunk})

    async def refuse(self, error: ApiError) -> None:
        """An answer, or an event of its own in a stream of events. A body that cannot hold one is left unfinished:
        the server then closes the connection, and the client sees a torn answer instead of a short one."""
        if not self.is_started:
            await error.send(self._send, self._dialect)
        elif self._is_events:
            gap = b"" if self._last_chunk.endswith(b"\n\n") else b"\n\n"
            await self.finish(gap + error.event(self._dialect))


class EngineEndpoint:
    """The ASGI application of one route of the engine."""

    def __init__(
        self,
        route: EngineRoute,
        *,
        engine: UpstreamPool,
        traffic: Traffic,
        progress: Callable[[], Progress],
        errors: EngineErrors | None = None,
        engines_name: Callable[[], str | None] = lambda: None,
        tell_every_s: float = hold.TELL_EVERY_S,
    ) -> None:
        self._route = route
        self._errors = errors or EngineErrors()
        self._engines_name = engines_name  # of the model, for an engine that refuses every other
        self._engine = engine
        self._traffic = traffic
        self._progress = progress
        self._tell_every_s = tell_every_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        reply = ResponseWriter(send, self._route.dialect)
        try:
            with self._traffic.admitted() as must_end:
                try:
                    await self._exchange(scope, receive, reply, must_end)
                except ApiError as error:
                    if reply.is_started:
                        scope[FAILED] = str(error.status)  # the status that went out says nothing of it
                    # Inside `admitted`: a stop waits until the client has been told.
                    await reply.refuse(error)
        except ApiError as error:
            await reply.refuse(error)
        except ClientLeft:
            return

    async def _exchange(
        self, scope: Scope, receive: Receive, reply: ResponseWriter, must_end: asyncio.Future[None]
    ) -> None:
        progress = self._progress()
        if not (progress.is_ready or progress.is_held):
            raise api_error.not_ready(progress)
        reading = read_body(receive, declared_length(scope))
        body = await unless_over(reading, must_end=must_end)
        if self._route.fault is not None and (why := self._route.fault(body)) is not None:
            raise ApiError(400, "invalid_request", why)
        await unless_over(self._serve(scope, body, reply), until_client_left(receive), must_end=must_end)

    async def _serve(self, scope: Scope, body: bytes, reply: ResponseWriter) -> None:
        progress = self._progress()
        if not (progress.is_ready or progress.is_held):
            raise api_error.not_ready(progress)  # it was otherwise when the body began to come
        if progress.is_held:
            is_stream = self._route.can_stream and hold.asks_for_stream(body)
            tell = reply.comment if is_stream else None
            await hold.until_back(self._progress, self._traffic, tell, every_s=self._tell_every_s)
        if (name := self._engines_name()) is not None:
            body = with_model(body, content_type_of(scope), name)
        await self._forward(scope, body, reply)

    async def _forward(self, scope: Scope, body: bytes, reply: ResponseWriter) -> None:
        try:
            await self._ask(scope, body, reply)
        except CrowdedError:
            await self._ask_alone(scope, body, reply)

    async def _ask_alone(self, scope: Scope, body: bytes, reply: ResponseWriter) -> None:
        async with self._engine.one_by_one:
            for _ in range(ATTEMPTS_ALONE):
                was_free, before = self._engine.is_free, self._engine.sent
                try:
                    return await self._ask(scope, body, reply)
                except CrowdedError:
                    if was_free and self._engine.sent == before + 1:  # nobody else was there
                        raise api_error.crowds_itself() from None
        raise api_error.context_full()

    async def _ask(self, scope: Scope, body: bytes, reply: ResponseWriter) -> None:
        """Raises ApiError, and CrowdedError where it may be asked again."""
        try:
            asked = self._engine.asked(scope, self._route.upstream, body, needs_model=self._route.needs_model)
            async with asked as response:
                if not await relay(response, reply, self._traffic.rate, self._errors, self._route.crowded):
                    scope[FAILED] = "502"
        except LackError as error:
            raise api_error.lacking() from error
        except UnreachableError as error:
            raise api_error.engine_died(503, "the engine cannot be reached; try again in a moment") from error
        except HungError as error:
            detail = f"the engine hung while it worked on this request: {error}; it is being restarted"
            raise api_error.engine_died(502, detail) from error
        except BrokenError as error:
            raise api_error.engine_died(502, "the engine ended while it worked on this request") from error


async def relay(
    response: Response, reply: ResponseWriter, rate: Rate, errors: EngineErrors, crowded: bytes = b""
) -> bool:
    """Chunks pass as they arrive. `write` waits while the client is slow, and then nothing more is read.

    False for a stream that ended with an error in the client's dialect; ApiError for one that has to be told anew, and
    for an error of the engine that a rule of `errors` covers; CrowdedError for an answer that is an error with
    `crowded` in it.
    """
    if response.status >= 400 and response.method != "HEAD":
        await _relay_error(response, reply, errors, crowded)
        return True
    if reply.is_started and not response.is_stream:
        # The client was promised events while it waited, and the engine answers with one document.
        raise api_error.of_engine(response.status, await response.read())
    length = None if reply.is_started else response.content_length
    if response.method != "HEAD" and length is not None and length <= WHOLE_REPLY_BYTES:
        body = await response.read()
        await reply.start(response)
        await reply.finish(body)
        return True
    if not reply.is_started:
        await reply.start(response)
    if response.is_stream:
        return await _relay_events(response, reply, rate, errors, crowded)
    async for chunk in response.chunks():
        await reply.write(chunk)
    await reply.finish()
    return True


async def _relay_error(response: Response, reply: ResponseWriter, errors: EngineErrors, crowded: bytes) -> None:
    """Raises ApiError where the client was promised events, or a rule covers the error."""
    body = await _read_unless_crowded(response, crowded)
    if (ours := errors.as_ours(body, response.status)) is not None:
        raise ours
    if reply.is_started:
        raise api_error.of_engine(response.status, body)
    if not body:
        raise api_error.without_words(response.status)
    await reply.engine_error(response, body)


async def _read_unless_crowded(response: Response, crowded: bytes) -> bytes:
    body = await response.read()
    if response.status >= 500 and crowded and crowded in body:
        raise CrowdedError
    return body


async def _relay_events(
    response: Response, reply: ResponseWriter, rate: Rate, errors: EngineErrors, crowded: bytes
) -> bool:
    """What an engine sends after an error looks like a proper end, and is left out."""
    watch = events.ErrorWatch()
    async for chunk in response.chunks():
        rate.add(chunk)
        passed, error = watch.feed(chunk)
        if passed:
            await reply.write(passed)
        if error is not None and crowded and crowded in error:
            raise api_error.context_full()
        if error is not None and (ours := errors.as_ours(events.data_of(error))) is not None:
            raise ours
        if error is not None and events.is_named(error):
            await reply.finish(error)
            return False
        if error is not None:
            raise api_error.of_engine(502, events.data_of(error))
    await reply.finish(watch.rest())
    return True


async def read_body(receive: Receive, declared_bytes: int) -> bytes:
    """The whole body: the engine needs all of it to begin. Raises ApiError (413) as soon as it is too much."""
    if declared_bytes > BODY_BYTES_MAX:
        raise api_error.body_too_large(BODY_BYTES_MAX)
    body = bytearray()
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientLeft
        body += message.get("body", b"")
        if len(body) > BODY_BYTES_MAX:
            raise api_error.body_too_large(BODY_BYTES_MAX)
        if not message.get("more_body", False):
            return bytes(body)


async def until_client_left(receive: Receive) -> None:
    """Raises ClientLeft when the connection is gone; never returns."""
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientLeft


async def unless_over(
    work: Coroutine[Any, Any, T], *watchers: Coroutine[Any, Any, None], must_end: asyncio.Future[None]
) -> T:
    """The result of `work`, unless a watcher raises or `must_end` is done before; whatever is left is cancelled and
    has ended when this returns."""
    # Shielded: others wait for it as well.
    working, *watching, _ = await first_of(work, *watchers, asyncio.shield(must_end))
    for future in (working, *watching):
        if not future.cancelled():
            # The first of them that came to an end by itself, `work` before the watchers.
            future.result()
    if working.cancelled():
        raise api_error.shutting_down()
    result: T = working.result()
    return result


def content_type_of(scope: Scope) -> bytes:
    """Empty without one."""
    return next((bytes(value) for name, value in scope["headers"] if name == b"content-type"), b"")


def declared_length(scope: Scope) -> int:
    """Content-Length as announced, 0 without one: a chunked body is counted while it is read."""
    for name, value in scope["headers"]:
        if name == b"content-length" and value.isdigit():
            return int(value)
    return 0
