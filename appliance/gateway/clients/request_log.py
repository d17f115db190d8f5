"""The latest inference requests as numbers: tokens, times and endings, never text."""

from __future__ import annotations

import secrets
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any, Protocol

from appliance.gateway.wire.edges import Edges
from appliance.gateway.wire.usage import Usage, parse_usage
from appliance.values import dataclass

KEPT = 100
KEY_NAME = "appliance.key_name"
"""Key in the scope of a request: the name of the API key that it came with; empty for the appliance's own key."""
OWNER = "appliance.prompt_owner"
"""Key in the scope of a request: the tag of its API key, for prompts that the engine keeps; absent without a key."""


@dataclass(frozen=True, kw_only=True)
class FinishedRequest:
    """One request after its end. Times are in seconds; None is unknown."""

    id: str
    time: float  # of its arrival, since 1970
    model: str
    route: str
    key: str
    stream: bool
    tokens_in: int | None  # with those from the cache
    tokens_cached: int | None
    tokens_from_disk: int | None = None  # of the cached ones
    tokens_out: int | None
    waited_s: float  # before the engine began with it, as far as known
    ttft_s: float | None  # from its arrival to the first content
    seconds: float
    tokens_per_s: float | None  # of decode
    ending: str  # stop, length, tool_calls, client_left, error, or stopped with the appliance
    status: int
    slowed_by: tuple[str, ...] = ()
    parent: str = ""  # the client's `traceparent`

    def document(self) -> dict[str, Any]:
        """Return the row as pages see it."""
        return {name: value for name, value in asdict(self).items() if name != "parent"}


class Answer(Protocol):
    """The part of an engine's answer that a row is made from: `upstream.Response` is one."""

    status: int
    first_content: float | None

    @property
    def is_stream(self) -> bool: ...

    @property
    def edges(self) -> Edges: ...


class Watched(Protocol):
    """One request from its arrival on. Reads only where it begins and where it ends."""

    async def receipt(self, row: FinishedRequest) -> Mapping[str, Any]:
        """Return what made the answer, for a client. `row` is the request so far."""
        ...

    def end(self, row: FinishedRequest) -> tuple[str, ...]:
        """Return what slowed the request down; empty if it was not slow, or if nothing is known. Call it once."""
        ...


class Exchange:
    """One request while it runs. The engine's answer is noted by the code that asks for it."""

    def __init__(self, *, model: str, route: str, key: str, parent: str = "") -> None:
        self.id = secrets.token_hex(8)
        self.model = model
        self.route = route
        self.key = key
        self.parent = parent
        self.time = time.time()
        self.began = time.monotonic()
        self.held_s = 0.0  # time in which it waited for an engine that was away on purpose
        self.response: Answer | None = None
        self.ending: str | None = None  # set if it failed
        self.status = 0
        self.watched: Watched | None = None

    def fail(self, status: int, *, is_stopped: bool = False) -> None:
        """Note that the request ended with an error: `status`, whatever was sent before."""
        self.ending, self.status = "stopped" if is_stopped else "error", status

    def leave(self, status: int) -> None:
        """Note that the client left before the end of its answer."""
        self.ending, self.status = "client_left", status

    def finished(self) -> FinishedRequest:
        """Return the row for the log, as of now."""
        now = time.monotonic()
        response = self.response
        usage = parse_usage(response.edges) if response else Usage()
        if self.ending == "client_left" and usage.ending:
            self.ending, self.status = None, 0  # it left with the last event: the answer was whole by then
        status = self.status or (response.status if response else 0)
        first = response.first_content if response and response.is_stream else None
        ttft_s = None if first is None else first - self.began
        if ttft_s is None and self.ending is None and usage.prefill_s is not None and usage.decode_s is not None:
            # An answer in one piece: all that was neither waiting nor decode came before its first token.
            ttft_s = max(usage.prefill_s, now - self.began - usage.decode_s)
        waited_s = self.held_s
        if ttft_s is not None and usage.prefill_s is not None:
            waited_s = max(waited_s, ttft_s - usage.prefill_s)
        ended_well = "stop" if 0 < status < 400 else "error"
        return FinishedRequest(
            id=self.id,
            time=round(self.time, 3),
            model=self.model,
            route=self.route,
            key=self.key,
            parent=self.parent,
            stream=bool(response and response.is_stream),
            tokens_in=usage.tokens_in,
            tokens_cached=usage.tokens_cached,
            tokens_from_disk=usage.tokens_from_disk,
            tokens_out=usage.tokens_out,
            waited_s=round(waited_s, 3),
            ttft_s=None if ttft_s is None else round(ttft_s, 3),
            seconds=round(now - self.began, 3),
            tokens_per_s=_decode_speed(usage, first, now),
            ending=self.ending or (usage.ending if usage.ending and status < 400 else ended_well),
            status=status,
        )


def _decode_speed(usage: Usage, first: float | None, now: float) -> float | None:
    """Return tokens per second of decode; None if unknown. The first token belongs to prefill."""
    tokens = (usage.tokens_out or 0) - 1
    seconds = usage.decode_s if usage.decode_s is not None else (now - first if first is not None else 0.0)
    return round(tokens / seconds, 1) if tokens > 0 and seconds > 0 else None


class RequestLog:
    """The last `KEPT` requests, newest last. `count` is the number of all requests so far."""

    def __init__(self, kept: int = KEPT) -> None:
        self._rows: deque[FinishedRequest] = deque(maxlen=kept)
        self._listeners: list[Callable[[FinishedRequest], None]] = []
        self.count = 0

    def listen(self, listener: Callable[[FinishedRequest], None]) -> None:
        """Call `listener` with each request that ends from now on. It must return at once, and must not raise."""
        self._listeners.append(listener)

    def add(self, row: FinishedRequest) -> None:
        self._rows.append(row)
        self.count += 1
        for listener in self._listeners:
            listener(row)

    def since(self, count: int) -> Sequence[FinishedRequest]:
        """Return the kept rows that were added after `count` of them were seen, oldest first."""
        new = min(self.count - count, len(self._rows))
        return tuple(self._rows)[len(self._rows) - new :] if new > 0 else ()

    def ttft_s(self, quantile: float, model: str) -> float | None:
        """Return the time to first token that `quantile` (0 to 1) of the model's kept requests did not exceed; None
        without any."""
        times = sorted(row.ttft_s for row in self._rows if row.ttft_s is not None and row.model == model)
        return times[min(len(times) - 1, int(quantile * len(times)))] if times else None
