"""The CPU variant that serves: one of several builds of an engine's CPU kernels."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field
from types import MappingProxyType

from appliance.plan.parts.choice import Choice
from appliance.values import dataclass


@dataclass(frozen=True, kw_only=True)
class RuledOut:
    """CPU variants that failed on this CPU and build, and variants that passed the kernel check."""

    seen: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))  # how each variant failed
    where: str = ""  # path of the file with this record
    checked: frozenset[str] = frozenset()  # variants whose kernels compute correctly


@dataclass(frozen=True, kw_only=True)
class Kernels:
    """A CPU variant, and the next fastest one."""

    variant: str | None  # None: the engine has no variants to choose from
    # Instructions that the kernels are compiled for, which decide what weights they copy. Without a variant: the CPU's.
    isa: tuple[str, ...]
    choice: Choice | None = None
    runner_up: Kernels | None = None  # the next fastest by instructions, which measuring may find faster
    is_checked: bool = False  # True if its kernels passed the check; only then a runner-up is measured

    @property
    def variants(self) -> tuple[str | None, ...]:
        """Names of the variant and of the runner-up, whether checked or not."""
        return (self.variant, *((self.runner_up.variant,) if self.runner_up else ()))

    @property
    def candidate(self) -> Kernels | None:
        """The runner-up if plans may use it; None if it is not checked or does not exist."""
        return self.runner_up if self.runner_up and self.runner_up.is_checked else None
