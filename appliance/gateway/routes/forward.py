"""Passes one request to the engine and its answer back, byte for byte: bodies are not parsed, streams are not
collected.

A request ends in one of four ways, whichever comes first: the answer is complete, the client leaves, the engine dies,
or the appliance stops. In every case the connection to the engine is closed before the request ends, which frees the
engine's slot.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar, cast
from urllib.parse import parse_qs

from appliance.console.progress import Progress
from appliance.engine_route import Dialect, EngineRoute
from appliance.gateway.clients import request_queue
from appliance.gateway.clients.connections import LEFT, WRITE_NOW
from appliance.gateway.clients.request_log import KEY_NAME, Exchange, RequestLog
from appliance.gateway.clients.traffic import Rate, Traffic
from appliance.gateway.engine.engine_errors import EngineErrors, in_anthropic_form
from appliance.gateway.engine.gate import Gate
from appliance.gateway.engine.insight import Insight
from appliance.gateway.engine.upstream import BrokenError, HungError, LackError, Response, UnreachableError
from appliance.gateway.engine.upstream_pool import UpstreamPool
from appliance.gateway.routes.metrics import CLIENT_LEFT, FAILED
from appliance.gateway.wire import api_error, events, headers, receipts
from appliance.gateway.wire.api_error import ApiError
from appliance.gateway.wire.mcp import refuse_mcp
from appliance.gateway.wire.model_name import with_model, without_fields
from appliance.gateway.wire.reasoning import with_template_words
from appliance.keep_alive import parse_keep_alive

if TYPE_CHECKING:
    from starlette.types import Receive, Scope, Send

T = TypeVar("T")
MakeReceipt = Callable[[], Awaitable[tuple[receipts.Receipt, tuple[int | None, int | None]]]]
"""Returns the receipt, and the tokens of prompt and answer if the engine told them."""

# Answers of known length up to this size are read completely before they are sent, so that an engine that dies
# meanwhile causes a 502 and not a truncated body. Longer ones (embeddings of a large batch) pass as they arrive.
WHOLE_REPLY_BYTES = 8 * 2**20
BODY_BYTES_MAX = 64 * 2**20  # limit of a request's body, which stays in memory while the engine answers
# Attempts to repeat alone a request that did not fit together with others: newer requests may crowd it out again.
ATTEMPTS_ALONE = 2
KEEP_ALIVE_FIELDS = frozenset({"keep_alive", "ttl"})


class CrowdedError(Exception):
    """The engine ended all running requests, since they do not fit into its context together; nothing of this request's
    answer was sent yet."""


class ClientLeft(Exception):  # noqa: N818 - not an error: no client is left to be told one
    """The client closed its connection before the answer was complete."""


class ResponseWriter:
    """Writes a response and remembers what was sent, which decides how an error can still be reported."""

    def __init__(self, send: Send, dialect: Dialect, write_now: Callable[[bytes], bool] | None = None) -> None:
        """`write_now` writes whole chunks of events without a task's turn, if the server can."""
        self._send = send
        self.write_now = write_now
        self._dialect = dialect
        self._last_chunk = b"\n\n"
        self.is_started = self.is_whole = False
        self._is_events = False

    async def start(self, response: Response, *, length: int | None = None) -> None:
        """Send status and headers. `length` is that of the body, if it is known."""
        head = headers.to_client(response.headers)
        if length is not None:
            head = [*((name, value) for name, value in head if name != b"content-length"), _length(length)]
        await self._start(response.status, head, is_events=response.is_stream)

    async def _start(self, status: int, head: headers.RawHeaders, *, is_events: bool) -> None:
        self.is_started, self._is_events = True, is_events
        await self._send({"type": "http.response.start", "status": status, "headers": head})

    async def engine_error(self, response: Response, body: bytes) -> None:
        """Send the engine's error unchanged, or in Anthropic's form if the client uses that API."""
        if self._dialect == "anthropic" and (told := in_anthropic_form(body, response.status)) is not None:
            await self.document(told.document("anthropic"), response.status)
        else:
            await self.start(response)
            await self.finish(body)

    async def comment(self, text: str) -> None:
        """Send a comment line, which every reader of events ignores. The first one starts the stream before the engine
        does."""
        if not self.is_started:
            await self._start(200, headers.OF_A_STREAM, is_events=True)
        await self.write(f": {' '.join(text.split())}\n\n".encode())

    async def document(self, document: dict[str, Any], status: int = 200) -> None:
        """Send an answer of our own as JSON; the server itself omits the body of a reply to HEAD."""
        body = json.dumps(document, separators=(",", ":")).encode()
        head = [(b"content-type", b"application/json"), _length(len(body))]
        await self._start(status, head, is_events=False)
        await self.finish(body)

    async def write(self, chunk: bytes) -> None:
        self._last_chunk = chunk
        await self._send({"type": "http.response.body", "body": chunk, "more_body": True})

    async def finish(self, chunk: bytes = b"") -> None:
        self.is_whole = True  # even if the client leaves while the last piece is sent
        await self._send({"type": "http.response.body", "body": chunk})

    async def refuse(self, error: ApiError) -> None:
        """Send the error as the answer, or as an event if a stream of events has begun. Any other begun body is left
        unfinished: the server then closes the connection, and the client sees an incomplete answer instead of a short
        one."""
        if not self.is_started:
            await error.send(self._send, self._dialect)
        elif self._is_events:
            gap = b"" if self._last_chunk.endswith(b"\n\n") else b"\n\n"
            await self.finish(gap + error.event(self._dialect))


def _note(exchange: Exchange, requests: RequestLog) -> None:
    """Add the row of a request that ended, also if a fault keeps its causes from being found."""
    row = exchange.finished()
    slowed_by: tuple[str, ...] = ()
    try:
        if exchange.watched is not None:
            slowed_by = exchange.watched.end(row)
    finally:
        requests.add(replace(row, slowed_by=slowed_by) if slowed_by else row)


def _length(count: int) -> tuple[bytes, bytes]:
    return b"content-length", b"%d" % count


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
        tell_every_s: float = request_queue.TELL_EVERY_S,
        model: Callable[[], str] = lambda: "",
        requests: RequestLog | None = None,
        insight: Insight | None = None,
        gate: Gate | None = None,
    ) -> None:
        """`model` returns the name that `requests` shows; requests that need no model are not noted there. `insight`
        makes receipts. `gate` loads the model if it is not loaded."""
        self._route = route
        self._gate = gate
        self._model = model
        self._requests = requests if route.needs_model else None
        # Only routes that stream generate tokens.
        self._insight = insight if route.can_stream and self._requests is not None else None
        self._errors = errors or EngineErrors()
        self._engines_name = engines_name  # the engine's name of the model, if it refuses every other name
        self._engine = engine
        self._traffic = traffic
        self._progress = progress
        self._tell_every_s = tell_every_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        parent = next((value for name, value in scope["headers"] if name == b"traceparent"), b"")
        exchange = Exchange(
            model=self._model(), route=scope["path"], key=scope.get(KEY_NAME, ""), parent=parent.decode("latin-1")
        )
        try:
            await self._answer(scope, receive, send, exchange)
        finally:
            if self._requests is not None:
                _note(exchange, self._requests)

    async def _answer(self, scope: Scope, receive: Receive, send: Send, exchange: Exchange) -> None:
        reply = ResponseWriter(send, self._route.dialect, scope.get(WRITE_NOW))
        try:
            with self._traffic.admitted() as must_end:
                try:
                    await self._exchange(scope, receive, reply, must_end, exchange)
                except ApiError as error:
                    if reply.is_started:
                        scope[FAILED] = str(error.status)  # the status that was sent does not show the failure
                    # Inside `admitted`, so that a stop waits until the client has its answer.
                    await reply.refuse(error)
                    exchange.fail(error.status, is_stopped=self._traffic.is_closed)
        except ApiError as error:
            await reply.refuse(error)
            exchange.fail(error.status, is_stopped=self._traffic.is_closed)
        except ClientLeft:
            if not reply.is_whole:
                exchange.leave(int(CLIENT_LEFT))
        except Exception as error:
            await self._fail(scope, reply, exchange, api_error.of_fault(error))
            raise  # a fault of our own, which the server logs

    async def _fail(self, scope: Scope, reply: ResponseWriter, exchange: Exchange, error: ApiError) -> None:
        """Note a fault of our own everywhere that a request is counted, and end a begun stream with it."""
        exchange.fail(error.status)
        if reply.is_started:
            scope[FAILED] = str(error.status)
            if not reply.is_whole:
                await reply.refuse(error)

    async def _exchange(
        self,
        scope: Scope,
        receive: Receive,
        reply: ResponseWriter,
        must_end: asyncio.Future[None],
        exchange: Exchange,
    ) -> None:
        progress = self._progress()
        waits = self._gate is not None and self._gate.waits
        if not (waits or progress.is_ready or progress.is_held):
            raise api_error.not_ready(progress)
        reading = read_body(receive, declared_length(scope))
        body = await unless_over(reading, must_end=must_end)
        if self._route.fault is not None and (why := self._route.fault(body)) is not None:
            raise ApiError(400, "invalid_request", why)
        if self._route.can_stream:
            refuse_mcp(body)
        if self._route.dialect == "anthropic":
            body = with_template_words(body)
        serving = self._through_gate(scope, body, reply, exchange)
        await unless_over(serving, must_end=must_end, left=scope.get(LEFT))

    async def _through_gate(self, scope: Scope, body: bytes, reply: ResponseWriter, exchange: Exchange) -> None:
        if self._gate is None or not self._gate.waits:
            self._watch(body, exchange)
            await self._serve(scope, keep_alive_in(body)[0], reply, exchange)
            return
        if _refuses_loading(scope) and not self._gate.is_loaded:
            raise api_error.not_loaded(self._model())
        body, keep_alive_s = keep_alive_in(body)
        is_stream = self._route.can_stream and request_queue.asks_for_stream(body)
        began = time.monotonic()
        async with self._gate.held(reply.comment if is_stream else None, keep_alive_s) as waited_for:
            load_s = time.monotonic() - began if waited_for else 0.0
            exchange.held_s += load_s
            self._watch(body, exchange, load_s=load_s, loaded=waited_for)
            await self._serve(scope, body, reply, exchange)

    def _watch(self, body: bytes, exchange: Exchange, *, load_s: float = 0.0, loaded: str = "") -> None:
        if self._insight is not None and self._insight.receipts != "off":
            exchange.watched = self._insight.watch(body, self._traffic, load_s=load_s, loaded=loaded)

    async def _serve(self, scope: Scope, body: bytes, reply: ResponseWriter, exchange: Exchange) -> None:
        progress = self._progress()
        if not (progress.is_ready or progress.is_held):
            raise api_error.not_ready(progress)  # the state may have changed while the body came
        await self._until_back(body, reply, exchange)
        if (name := self._engines_name()) is not None:
            body = with_model(body, content_type_of(scope), name)
        await self._forward(scope, body, reply, exchange)

    async def _until_back(self, body: bytes, reply: ResponseWriter, exchange: Exchange) -> None:
        """Wait while the engine is away on purpose."""
        if not self._progress().is_held:
            return
        is_stream = self._route.can_stream and request_queue.asks_for_stream(body)
        tell = reply.comment if is_stream else None
        began = time.monotonic()
        await request_queue.until_back(self._progress, self._traffic, tell, every_s=self._tell_every_s)
        exchange.held_s += time.monotonic() - began

    def _receipt(self, scope: Scope, exchange: Exchange) -> MakeReceipt | None:
        """Return what makes the receipt of this request, or None if the client gets none."""
        watched, wanted = exchange.watched, self._insight.receipts if self._insight else "off"
        if watched is None or not (wanted == "always" or (wanted == "asked" and receipts.is_asked(scope["headers"]))):
            return None

        async def make() -> tuple[receipts.Receipt, tuple[int | None, int | None]]:
            row = exchange.finished()
            return await watched.receipt(row), (row.tokens_in, row.tokens_out)

        return make

    async def _forward(self, scope: Scope, body: bytes, reply: ResponseWriter, exchange: Exchange) -> None:
        try:
            await self._ask(scope, body, reply, exchange)
        except CrowdedError:
            await self._ask_alone(scope, body, reply, exchange)

    async def _ask_alone(self, scope: Scope, body: bytes, reply: ResponseWriter, exchange: Exchange) -> None:
        async with self._engine.one_by_one:
            for _ in range(ATTEMPTS_ALONE):
                await self._until_back(body, reply, exchange)
                was_free, before = self._engine.is_free, self._engine.sent
                try:
                    return await self._ask(scope, body, reply, exchange)
                except CrowdedError:
                    if was_free and self._engine.sent == before + 1:  # no other request ran
                        raise api_error.crowds_itself() from None
        raise api_error.context_full()

    async def _ask(self, scope: Scope, body: bytes, reply: ResponseWriter, exchange: Exchange) -> None:
        """Send the request once. Raises ApiError, and CrowdedError if the request may be repeated."""
        try:
            asked = self._engine.asked(scope, self._route.upstream, body, needs_model=self._route.needs_model)
            async with asked as response:
                exchange.response = response
                receipt = self._receipt(scope, exchange)
                if not await relay(response, reply, self._traffic.rate, self._errors, self._route.crowded, receipt):
                    scope[FAILED] = "502"
                    exchange.fail(502)
        except LackError as error:
            raise api_error.lacking() from error
        except UnreachableError as error:
            raise api_error.engine_died(503, "the engine cannot be reached; try again in a moment") from error
        except HungError as error:
            detail = f"the engine hung while it worked on this request: {error}; it is being restarted"
            raise api_error.engine_died(502, detail) from error
        except BrokenError as error:
            raise api_error.engine_died(502, "the engine ended while it worked on this request") from error


def _refuses_loading(scope: Scope) -> bool:
    """True for `?autoload=false`, with which clients ask only a model that is loaded."""
    return b"autoload" in scope["query_string"] and parse_qs(scope["query_string"]).get(b"autoload", [b""])[-1] in (
        b"false",
        b"0",
    )


def keep_alive_in(body: bytes) -> tuple[bytes, float | None]:
    """Return the body without Ollama's `keep_alive` and LM Studio's `ttl`, which no engine knows, and the seconds that
    they ask for. Raises ApiError (400)."""
    body, found = without_fields(body, KEEP_ALIVE_FIELDS)
    each = [seconds_to_keep(name, value) for name, value in found.items() if value is not None]
    return body, each[-1] if each else None


def seconds_to_keep(name: str, value: object) -> float:
    """Return the seconds that a client's `keep_alive` or `ttl` asks for. Raises ApiError (400)."""
    try:
        return parse_keep_alive(value)
    except ValueError as problem:
        raise ApiError(400, "invalid_request", f"{name} {problem}: {str(value)[:80]!r}") from None


async def relay(
    response: Response,
    reply: ResponseWriter,
    rate: Rate,
    errors: EngineErrors,
    crowded: bytes = b"",
    receipt: MakeReceipt | None = None,
) -> bool:
    """Pass the engine's answer on as it arrives. `write` waits while the client is slow, and nothing more is read
    meanwhile.

    Returns False for a stream that ended with an error in the client's dialect, else True. Raises ApiError for an error
    that must be written in another form or that a rule of `errors` matches, and CrowdedError for an error that contains
    `crowded`. `receipt`, if the client gets one, is called at the answer's end.
    """
    if response.status >= 400 and response.method != "HEAD":
        await _relay_error(response, reply, errors, crowded)
        return True
    if reply.is_started and not response.is_stream:
        # The client got the beginning of a stream while it waited, but the engine answers with one document.
        raise api_error.of_engine(response.status, await response.read())
    length = None if reply.is_started else response.content_length
    if response.method != "HEAD" and length is not None and length <= WHOLE_REPLY_BYTES:
        body = await response.read()
        if receipt is not None:
            body = receipts.in_document(body, (await receipt())[0])
        await reply.start(response, length=None if receipt is None else len(body))
        await reply.finish(body)
        return True
    if not reply.is_started:
        await reply.start(response)
    if response.is_stream:
        return await _relay_events(response, reply, rate, errors, crowded, receipt)
    async for chunk in response.chunks():
        await reply.write(chunk)
    await reply.finish()
    return True


async def _relay_error(response: Response, reply: ResponseWriter, errors: EngineErrors, crowded: bytes) -> None:
    """Pass the engine's error on. Raises ApiError if a stream has already begun, or if a rule matches the error."""
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
    response: Response,
    reply: ResponseWriter,
    rate: Rate,
    errors: EngineErrors,
    crowded: bytes,
    receipt: MakeReceipt | None,
) -> bool:
    """Pass a stream on up to the first error. What an engine sends after an error looks like a proper end, and is
    dropped."""
    watch = events.ErrorWatch()
    filled = None if receipt is None else receipts.ReceiptEvents()
    last = b""  # the end of the body in one piece with what ends it
    write_now = reply.write_now

    def pass_on(frames: bytes, content: bytes) -> bool:
        if write_now is None or not watch.passes(content) or not (filled is None or filled.passes(content)):
            return False
        if not write_now(frames):
            return False
        rate.add(content)
        return True

    async for chunk in response.chunks():
        response.pass_on = pass_on  # from the second piece on: the first goes through everything that notes it
        rate.add(chunk)
        passed, error = watch.feed(chunk)
        if filled is not None and receipt is not None:
            passed = filled.feed(passed)
            if filled.is_at_end:
                passed += filled.end(*await receipt())
            if error is not None:
                passed += filled.rest()
        if response.is_read and error is None:
            last = passed
        elif passed:
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
    rest = watch.rest()
    await reply.finish(last + (rest if filled is None else filled.feed(rest) + filled.rest()))
    return True


async def read_body(receive: Receive, declared_bytes: int, most: int = BODY_BYTES_MAX) -> bytes:
    """Return the whole body, which the engine needs to begin. Raises ApiError (413) as soon as it has more than `most`
    bytes, and ClientLeft."""
    if declared_bytes > most:
        raise api_error.body_too_large(most)
    body = bytearray()
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientLeft
        body += message.get("body", b"")
        if len(body) > most:
            raise api_error.body_too_large(most)
        if not message.get("more_body", False):
            return bytes(body)


async def unless_over(
    work: Coroutine[Any, Any, T], *, must_end: asyncio.Future[None], left: asyncio.Future[None] | None = None
) -> T:
    """Return the result of `work`, unless the client has left or `must_end` is done first, which cancels it. Raises
    ClientLeft or ApiError then. `left` None: nobody tells, or nobody has to know.

    Works in the caller's task, as `asyncio.timeout` does: tasks of their own would make every request slower.
    """
    task = cast("asyncio.Task[Any]", asyncio.current_task())
    over: list[asyncio.Future[None]] = []
    is_working = True

    def end(future: asyncio.Future[None]) -> None:
        # A callback that is scheduled already comes even if it is removed. One cancel is enough: the work cleans up.
        if is_working and not over:
            over.append(future)
            task.cancel()

    ends = [must_end] if left is None else [must_end, left]
    for each in ends:
        each.add_done_callback(end)
    try:
        return await work
    except asyncio.CancelledError:
        if task.cancelling() > len(over):
            raise  # the task itself is cancelled
    finally:
        is_working = False
        for each in ends:
            each.remove_done_callback(end)
        for _ in over:
            task.uncancel()
    if left in over:
        raise ClientLeft
    raise api_error.shutting_down()


def content_type_of(scope: Scope) -> bytes:
    """Return the content type; empty if there is none."""
    return next((bytes(value) for name, value in scope["headers"] if name == b"content-type"), b"")


def declared_length(scope: Scope) -> int:
    """Return Content-Length; 0 if there is none: a chunked body is counted while it is read."""
    for name, value in scope["headers"]:
        if name == b"content-length" and value.isdigit():
            return int(value)
    return 0
