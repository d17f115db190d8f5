"""What the appliance knows of the machine beside its engine: for metrics, pages and receipts of answers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from appliance.gateway.clients.request_log import Watched
from appliance.gateway.clients.traffic import Traffic


class Insight(Protocol):
    """Answers from memory and at once, but for `refresh`. None is unknown."""

    @property
    def receipts(self) -> str:
        """Which answers have a receipt: `asked`, `always` or `off`."""
        ...

    def watch(self, body: bytes, traffic: Traffic, *, load_s: float = 0.0, loaded: str = "") -> Watched | None:
        """Watch an inference request whose body has come; None if nothing serves. It has waited `load_s` until its
        model was there; `loaded` says what was done meanwhile."""
        ...

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
