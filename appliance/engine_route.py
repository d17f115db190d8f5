"""A route of an engine that a client may reach. Each engine lists its routes; every other path of the engine is a 404.

A request is matched by its whole decoded path, and the engine is asked for `upstream`, a constant. Nothing of a
client's path ever reaches the engine, so `//slots`, `%2e%2e/props` or a trailing slash can only be a 404.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

Dialect = Literal["openai", "anthropic", "ollama"]
"""The API whose format errors inside a stream use, so that the SDK of that API recognizes them."""


@dataclass(frozen=True, kw_only=True)
class EngineRoute:
    path: str
    upstream: str
    methods: tuple[str, ...] = ("POST",)
    dialect: Dialect = "openai"
    not_for_rerankers: bool = False  # True: refused for rerankers, for which the engine would answer with nonsense
    only_for_embedders: bool = False  # True: refused for text models, for which the engine has no such route
    can_stream: bool = False  # with `"stream": true` the engine answers with server-sent events
    # describes a fault of the body that the engine would not refuse; None: no fault
    fault: Callable[[bytes], str | None] | None = None
    needs_model: bool = True  # False: works without the model, also if the engine can produce no tokens any more
    # text in the engine's error if parallel requests exceeded the context together; empty: the engine has none
    crowded: bytes = b""


@dataclass(frozen=True, kw_only=True)
class MetricAlias:
    """Second name of one of our metrics in /metrics, for load balancers and boards made for another server.

    Both names are as Prometheus shows them, with `_total`. `labels` renames labels, `values` replaces values of the
    renamed labels; series that become equal are added up.
    """

    name: str
    ours: str
    labels: tuple[tuple[str, str], ...] = ()
    values: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True, kw_only=True)
class ErrorRule:
    """Replacement for an engine's error message that would not help a client: it names a flag, a file or a log that the
    client does not have, or its status makes SDKs repeat a request that can never be answered.

    `says` is a regular expression, searched in the error's message; with `of_status` it applies to answers of that
    status only. `detail` is the replacement: what failed and what to do; `{name}` stands for a group of `says`.
    `source` is the place in the pinned engine that writes the message.
    """

    says: str
    of_status: int | None = None
    status: int
    code: str
    detail: str
    source: str
