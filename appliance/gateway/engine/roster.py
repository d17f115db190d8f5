"""The models behind one gateway. More may come while it runs: files that were put on the volume."""

from __future__ import annotations

from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from typing import overload

from appliance.errors import ConfigError
from appliance.gateway.engine.backend import Backend


class Roster(Sequence[Backend]):
    """Backends in their order. The first one answers what names no model.

    With `is_strict` a request has to name a model that is here; otherwise every unknown name means the first one.
    `on_look`, if set, looks for models that have come, and adds them; it is awaited when clients ask what is here.
    """

    def __init__(self, backends: Iterable[Backend], *, is_strict: bool = False) -> None:
        self._backends = list(backends)
        self.is_strict = is_strict
        self.on_look: Callable[[], Awaitable[None]] | None = None
        names = Counter(backend.name for backend in self._backends)
        if same := [name for name, count in names.items() if count > 1]:
            message = f"several models have the same name: {', '.join(same)}"
            raise ConfigError(message, hint="give each an alias of its own")

    def __len__(self) -> int:
        return len(self._backends)

    def __iter__(self) -> Iterator[Backend]:
        return iter(tuple(self._backends))

    @overload
    def __getitem__(self, index: int) -> Backend: ...

    @overload
    def __getitem__(self, index: slice) -> Sequence[Backend]: ...

    def __getitem__(self, index: int | slice) -> Backend | Sequence[Backend]:
        return self._backends[index]

    @property
    def first(self) -> Backend:
        return self._backends[0]

    async def look(self) -> None:
        """Look for models that have come."""
        if self.on_look is not None:
            await self.on_look()

    def add(self, backend: Backend) -> None:
        """Add a model whose name no other has."""
        if any(backend.name == each.name for each in self._backends):
            message = f"a model of this name is here already: {backend.name}"
            raise ValueError(message)
        self._backends.append(backend)
        if self.first.traffic.is_closed:
            backend.traffic.close()

    def named(self, name: str) -> Backend | None:
        """Return the model with exactly this name."""
        return next((backend for backend in self._backends if backend.name == name), None)


def roster_of(backends: Sequence[Backend]) -> Roster:
    """Return the backends as a roster. Of several, a request has to name one."""
    return backends if isinstance(backends, Roster) else Roster(backends, is_strict=len(backends) > 1)
