"""What the appliance knows of the machine beside its engine, as the gateway's metrics and pages ask for it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol


class Insight(Protocol):
    """Answers from memory and at once, but for `refresh`. None is unknown."""

    def watts(self) -> float | None:
        """Return the mean power over the last seconds."""
        ...

    def joules(self) -> float | None:
        """Return the energy since the start."""
        ...

    def losses(self) -> Sequence[str]:
        """Return the kinds of silent losses."""
        ...

    async def refresh(self) -> None:
        """Read the energy, at most once a second; returns after a fifth of a second at the latest."""
        ...
