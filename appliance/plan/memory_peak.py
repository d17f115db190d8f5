"""GPU memory that a serving engine was seen to hold, for the plans of later starts."""

from __future__ import annotations

from dataclasses import replace

from appliance.plan.plan import Plan
from appliance.values import dataclass

_MOST_MIB = 2**30  # more than any card has: a larger figure is damaged


@dataclass(frozen=True, kw_only=True)
class CardPeak:
    """MiB of one GPU that the engine's processes held, as the driver reports them."""

    device: str  # the GPU's id
    kv_mib: float  # the KV cache, part of both figures below: it is allocated before the first request
    ready_mib: int  # when the engine became ready
    peak_mib: int  # the most since then

    @property
    def beside_kv_mib(self) -> float:
        """Peak without the KV cache: a start with another size of the cache has to expect this much."""
        return self.peak_mib - self.kv_mib

    @property
    def is_possible(self) -> bool:
        return 0 <= self.kv_mib <= self.peak_mib <= _MOST_MIB and 0 < self.ready_mib <= self.peak_mib


@dataclass(frozen=True, kw_only=True)
class MemoryPeak:
    """Peaks of the GPUs of one plan that served."""

    plan: Plan  # without its choices
    cards: tuple[CardPeak, ...]  # in the order of the plan's shares
    is_whole: bool = False  # True once the engine has done what takes most memory; before, the peak is not used

    def is_of(self, plan: Plan) -> bool:
        """Return True if `plan` has the same configuration as the plan that served."""
        return _configuration(self.plan) == _configuration(plan)

    def merged_with(self, before: MemoryPeak) -> MemoryPeak:
        """Return the higher peak of each card. Both have to be of one configuration."""
        pairs = zip(self.cards, before.cards, strict=True)
        cards = tuple(max(pair, key=lambda card: card.beside_kv_mib) for pair in pairs)
        return replace(self, cards=cards, is_whole=self.is_whole or before.is_whole)


def _configuration(plan: Plan) -> object:
    """Return all that decides the memory besides the KV cache: the knobs except the context, slots, drafts and GPUs."""
    knobs = tuple((name, value) for name, value in plan.knobs if name != "context")
    drafts = (plan.speculation.kind, plan.speculation.tokens) if plan.speculation else None
    return knobs, plan.parallel, drafts, tuple(share.gpu.id for share in plan.placement.shares)
