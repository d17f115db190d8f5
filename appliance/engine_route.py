"""A route of an engine that a client may reach. Each engine lists its own: what is not listed cannot be reached.

A request is matched by its whole decoded path, and the engine is asked for `upstream`, a constant: nothing of a
client's path ever reaches the engine, so `//slots`, `%2e%2e/props` or a trailing slash can only be a 404.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

Dialect = Literal["openai", "anthropic"]
"""How an error inside a stream is written so that the SDK of that API sees it."""


@dataclass(frozen=True, kw_only=True)
class EngineRoute:
    path: str
    upstream: str
    methods: tuple[str, ...] = ("POST",)
    dialect: Dialect = "openai"
    not_for_rerankers: bool = False  # the engine would answer all the same, and with nonsense
    only_for_embedders: bool = False  # at a model that gives text the engine has no such route
    can_stream: bool = False  # with `"stream": true` the engine answers with server-sent events
    fault: Callable[[bytes], str | None] | None = None  # what is wrong with a body that the engine would not refuse
    needs_model: bool = True  # False: the engine answers without it, also one that makes no token any more
    crowded: bytes = b""  # of its error, where requests that ran together did not fit into the context; empty: none


@dataclass(frozen=True, kw_only=True)
class LoadGauges:
    """Names in /metrics of how busy a model is, for balancers that look for those of one kind of server."""

    waiting: str = "appliance_requests_waiting"
    running: str = "appliance_requests_running"
    kv_use: str = "appliance_kv_cache_use"


@dataclass(frozen=True, kw_only=True)
class ErrorRule:
    """An engine's own error that a client is told in our words: the engine's name a flag, a file or a log that the
    client does not have, or give a status that makes SDKs repeat a request which can never be answered.

    `says` is a regular expression, searched in the error's message; with `of_status` it counts for answers of that
    status only. `detail` is our sentence: what failed and what to do; `{name}` stands for a group of `says`. `source`
    is the place in the pinned engine that writes the message.
    """

    says: str
    of_status: int | None = None
    status: int
    code: str
    detail: str
    source: str
