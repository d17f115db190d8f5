"""The way of a request to a model of the fleet."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import TYPE_CHECKING

from appliance.errors import FatalError
from appliance.fleet.fleet import Fleet, FleetEndedError, LoadWaitError

if TYPE_CHECKING:
    from appliance.gateway.engine.gate import Tell


class SlotGate:
    """See `appliance.gateway.engine.gate.Gate`."""

    def __init__(self, name: str, fleet: Fleet, wait_s: float, *, is_first: bool) -> None:
        self._name = name
        self._fleet = fleet
        self._wait_s = wait_s
        self._is_first = is_first

    @property
    def is_loaded(self) -> bool:
        return self._fleet.is_loaded(self._name)

    @property
    def waits(self) -> bool:
        return not self._is_first or self._fleet.was_loaded(self._name)

    @asynccontextmanager
    async def held(self, tell: Tell | None, keep_alive_s: float | None) -> AsyncIterator[str]:
        from appliance.gateway.wire.api_error import load_failed, load_waits, shutting_down  # here: no start needs it

        async with AsyncExitStack() as stack:
            try:
                waited_for = await stack.enter_async_context(
                    self._fleet.held(self._name, tell=tell, keep_alive_s=keep_alive_s, wait_s=self._wait_s)
                )
            except LoadWaitError as error:
                raise load_waits(str(error), error.about_s) from None
            except FleetEndedError:
                raise shutting_down() from None
            except FatalError as error:
                told = f"{error.message}; {error.hint}" if error.hint else error.message
                raise load_failed(self._name, told, error.exit_code) from error
            yield waited_for
