"""Whether a loaded model has the machine for itself. Figures of a shared machine would be too slow to keep."""

from __future__ import annotations

import asyncio


class Sharing:
    """Two events, one of which is set: tasks wait for either."""

    def __init__(self) -> None:
        self.beside: tuple[str, ...] = ()  # names of other models that are loaded and always stay
        self.is_shared = asyncio.Event()
        self.is_alone = asyncio.Event()
        self.is_alone.set()

    def note(self, *, is_shared: bool, beside: tuple[str, ...]) -> None:
        """Note whether another model, which may be sent away, is loaded or wanted, and which ones always stay."""
        self.beside = beside
        now, before = (self.is_shared, self.is_alone) if is_shared else (self.is_alone, self.is_shared)
        now.set()
        before.clear()
