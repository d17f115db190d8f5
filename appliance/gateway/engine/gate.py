"""What brings a model up for a request. The fleet implements it; without one, the only model is always on."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from typing import Any, Protocol

Tell = Callable[[str], Awaitable[None]]
"""Sends the client of a stream a comment while it waits."""


class Gate(Protocol):
    """The way to one model."""

    def held(self, tell: Tell | None, keep_alive_s: float | None) -> AbstractAsyncContextManager[str]:
        """Wait until the model is loaded, and keep it loaded while the block runs. The block gets what was waited for,
        in words; empty if the model was loaded already.

        `tell` is None for a request without a stream, which waits only for a limited time. `keep_alive_s`, if a client
        gave it, replaces how long the model stays loaded without requests. Raises ApiError if the model cannot be
        loaded, or not in time. Cancelled, the wish to load it is withdrawn."""
        ...

    @property
    def is_loaded(self) -> bool:
        """True if the model answers now."""
        ...

    @property
    def waits(self) -> bool:
        """True if requests for the model wait until it is loaded; False during the start of the first one."""
        ...


class FleetDoor(Protocol):
    """What clients ask of all models together."""

    @property
    def volume_problem(self) -> str:
        """A sentence if the volume does not answer; else empty."""
        ...

    def document(self) -> dict[str, Any]:
        """Return which models are loaded, what they hold, and what was done for whom."""
        ...

    async def load(self, name: str) -> None:
        """Begin to load the model; returns at once. Raises ApiError."""
        ...

    async def unload(self, name: str) -> None:
        """Unload the model after its running answers; returns at once. Raises ApiError."""
        ...
