"""What an engine that serves was seen to hold of its GPUs, for plans of later starts."""

from __future__ import annotations

from dataclasses import replace

from appliance.plan.plan import Plan
from appliance.values import dataclass

_MOST_MIB = 2**30  # of any card: beyond it a figure is damaged


@dataclass(frozen=True, kw_only=True)
class CardPeak:
    """MiB of one GPU that the engine's processes held, by the driver: as it became ready, and the most seen since."""

    device: str  # its id
    kv_mib: float  # of both, the KV cache, which is there before the first request
    ready_mib: int
    peak_mib: int

    @property
    def beside_kv_mib(self) -> float:
        """What a start with another size of the cache has to expect."""
        return self.peak_mib - self.kv_mib

    @property
    def is_possible(self) -> bool:
        return 0 <= self.kv_mib <= self.peak_mib <= _MOST_MIB and 0 < self.ready_mib <= self.peak_mib


@dataclass(frozen=True, kw_only=True)
class MemoryPeak:
    """`cards` are those of the plan's shares, in their order. `is_whole`: the engine has done what takes most memory,
    else its peak may still come, and decides nothing."""

    plan: Plan  # that served, without its choices
    cards: tuple[CardPeak, ...]
    is_whole: bool = False

    def is_of(self, plan: Plan) -> bool:
        """Whether it is one configuration with the plan that served."""
        return _configuration(self.plan) == _configuration(plan)

    def merged_with(self, before: MemoryPeak) -> MemoryPeak:
        """The higher peak of one configuration."""
        pairs = zip(self.cards, before.cards, strict=True)
        cards = tuple(max(pair, key=lambda card: card.beside_kv_mib) for pair in pairs)
        return replace(self, cards=cards, is_whole=self.is_whole or before.is_whole)


def _configuration(plan: Plan) -> object:
    """All that decides what is held beside the KV cache: everything that varies but the context."""
    knobs = tuple((name, value) for name, value in plan.knobs if name != "context")
    drafts = (plan.speculation.kind, plan.speculation.tokens) if plan.speculation else None
    return knobs, plan.parallel, drafts, tuple(share.gpu.id for share in plan.placement.shares)
