"""A route of an engine that a client may reach. Each engine lists its own: what is not listed cannot be reached.

A request is matched by its whole decoded path, and the engine is asked for `upstream`, a constant: nothing of a
client's path ever reaches the engine, so `//slots`, `%2e%2e/props` or a trailing slash can only be a 404.
"""

from __future__ import annotations

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
    needs_model: bool = True  # False: the engine answers without it, also one that makes no token any more
    crowded: bytes = b""  # of its error, where requests that ran together did not fit into the context; empty: none


@dataclass(frozen=True, kw_only=True)
class LoadGauges:
    """Names in /metrics of how busy a model is, for balancers that look for those of one kind of server."""

    waiting: str = "appliance_requests_waiting"
    running: str = "appliance_requests_running"
    kv_use: str = "appliance_kv_cache_use"
