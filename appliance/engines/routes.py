"""Building blocks of the engines' route tables."""

from __future__ import annotations

from collections.abc import Callable

from appliance.engine_route import Dialect, EngineRoute

BARE = ("",)  # for clients whose base URL lacks /v1


def post(
    path: str,
    *,
    also: tuple[str, ...] = (),
    dialect: Dialect = "openai",
    can_stream: bool = False,
    not_for_rerankers: bool = False,
    only_for_embedders: bool = False,
    fault: Callable[[bytes], str | None] | None = None,
    needs_model: bool = True,
    crowded: bytes = b"",
) -> tuple[EngineRoute, ...]:
    """Return the route `path`, and one route for each prefix in `also`, which replaces /v1."""
    spellings = (path, *(beginning + path.removeprefix("/v1") for beginning in also))
    return tuple(
        EngineRoute(
            path=spelling,
            upstream=path,
            dialect=dialect,
            can_stream=can_stream,
            not_for_rerankers=not_for_rerankers,
            only_for_embedders=only_for_embedders,
            fault=fault,
            needs_model=needs_model,
            crowded=crowded,
        )
        for spelling in spellings
    )
