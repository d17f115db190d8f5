"""Which build of an engine's CPU kernels serves, where it has several."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from appliance.plan.choice import Choice


@dataclass(frozen=True, kw_only=True)
class RuledOut:
    """Variants that failed on this CPU in this build: what was seen of each. `where` is the file that keeps it."""

    seen: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    where: str = ""


@dataclass(frozen=True, kw_only=True)
class Kernels:
    """`isa` is what the kernels that serve are compiled for: it decides which weights they copy. Without `variant` the
    engine takes its own choice, and the CPU's flags stand for it."""

    variant: str | None
    isa: tuple[str, ...]
    choice: Choice | None = None
