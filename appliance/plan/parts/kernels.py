"""Which build of an engine's CPU kernels serves, where it has several."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from appliance.plan.parts.choice import Choice


@dataclass(frozen=True, kw_only=True)
class RuledOut:
    """Variants that failed on this CPU in this build: what was seen of each. `where` is the file that keeps it, with
    those that were `checked` and compute rightly."""

    seen: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    where: str = ""
    checked: frozenset[str] = frozenset()


@dataclass(frozen=True, kw_only=True)
class Kernels:
    """`isa` is what the kernels that serve are compiled for: it decides which weights they copy. Without `variant` the
    engine takes its own choice, and the CPU's flags stand for it. The `runner_up` is the next fastest by what it is
    compiled for, where nobody asked for one: measuring may find it the faster, once it `is_checked`."""

    variant: str | None
    isa: tuple[str, ...]
    choice: Choice | None = None
    runner_up: Kernels | None = None
    is_checked: bool = False

    @property
    def variants(self) -> tuple[str | None, ...]:
        """By name, whether checked or not."""
        return (self.variant, *((self.runner_up.variant,) if self.runner_up else ()))

    @property
    def candidate(self) -> Kernels | None:
        """The runner-up that plans may be made for."""
        return self.runner_up if self.runner_up and self.runner_up.is_checked else None
