"""An event loop whose sleeps take no time: its clock jumps to the next timer."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Callable
from typing import Any


class SimulatedTime(asyncio.SelectorEventLoop):
    """For coroutines that wait for nothing but timers. What would run in a thread runs at once."""

    def __init__(self) -> None:
        self._jumps = _Jumps()
        super().__init__(self._jumps)

    def time(self) -> float:
        return self._jumps.seconds

    def run_in_executor(self, executor: Any, func: Callable[..., Any], *args: Any) -> asyncio.Future[Any]:  # noqa: ANN401
        del executor
        future = self.create_future()
        future.set_result(func(*args))
        return future


class _Jumps(selectors.SelectSelector):
    seconds = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        self.seconds += max(0.0, timeout or 0.0)
        return super().select(0)
