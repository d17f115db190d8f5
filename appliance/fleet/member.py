"""A model as the fleet sees it, and what it tells of its plans."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from appliance.fleet.admit import Places, Variant
from appliance.values import dataclass


@dataclass(frozen=True, kw_only=True)
class Weighed:
    """The ways to load a model, the best first, and the memory that is free now beside all that is loaded, MiB."""

    variants: tuple[Variant, ...]
    free: Places


class Member(Protocol):
    """One model. The fleet is the only caller of `load` and `unload`, and calls one of them at a time."""

    @property
    def name(self) -> str: ...

    @property
    def is_pinned(self) -> bool:
        """True if it is loaded at the start and never sent away for another."""
        ...

    @property
    def keep_alive_s(self) -> float:
        """How long it stays loaded without requests."""
        ...

    @property
    def holds(self) -> Places:
        """What it holds while it is loaded: the highest of what was planned, allocated and seen, MiB."""
        ...

    @property
    def reload_s(self) -> float:
        """How long loading it takes: measured, else estimated from its size."""
        ...

    @property
    def cache_s(self) -> float:
        """Seconds that its last prompt costs again after an unload: of prefill, or of reading it from disk."""
        ...

    @property
    def progress(self) -> str:
        """What it does now, in words."""
        ...

    async def prepare(self) -> None:
        """Find the model, and fetch it if it is not here. May take hours. Raises FatalError."""

    async def weigh(self, returnable: Mapping[str, Places]) -> Weighed:
        """Plan with the memory that is free now beside all that is loaded. `returnable` is what could be had back, by
        the names of the models that hold it. Raises FatalError."""

    async def load(self) -> None:
        """Load it into the memory that is free; returns when it answers. Raises FatalError; nothing is left then."""

    async def unload(self) -> None:
        """Stop its engine; returns when it is gone."""
