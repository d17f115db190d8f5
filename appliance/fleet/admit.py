"""Admission and eviction: what to do so that one more model can be loaded. Pure, and exact in bytes.

The order of attempts, and why a model that is answering is waited for, is in appliance/fleet/README.md. All sizes are
MiB by place of memory; a place that `free` does not name has nothing free.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import inf

from appliance.values import dataclass

Places = Mapping[str, float]  # MiB by place of memory: "host", or a GPU's id

KEPT = 0.7  # a smaller variant with this share of the tuned one's speed is preferred to an eviction
EXACT = 12  # up to so many candidates all sets of victims are compared


@dataclass(frozen=True, kw_only=True)
class Variant:
    """One way to load a model. `speed` is in tokens per second, comparable among the variants of one model."""

    key: str  # the plan's
    needs: Places
    speed: float
    error: float = 0.0  # recorded relative error of `needs`: with 0.03 it may hold 3 % more

    @property
    def at_most(self) -> dict[str, float]:
        """MiB that it may hold, with its error, by place. Places where it holds nothing are left out."""
        return {place: mib * (1 + self.error) for place, mib in self.needs.items() if mib > 0}


@dataclass(frozen=True, kw_only=True)
class Resident:
    """A model that is loaded, or loading."""

    name: str
    holds: Places
    is_pinned: bool = False
    is_answering: bool = False  # also while a request waits for its load
    reload_s: float
    use_chance: float  # 0 to 1: chance that it is wanted again soon
    cache_s: float = 0.0  # seconds of prefill that its cache saves and an eviction loses

    @property
    def cost_s(self) -> float:
        """Expected seconds that its eviction costs."""
        return (self.reload_s + self.cache_s) * self.use_chance


@dataclass(frozen=True, kw_only=True)
class Load:
    """Load this variant beside all others, now."""

    variant: Variant


@dataclass(frozen=True, kw_only=True)
class Evict:
    """Unload the victims, by name in ascending order, then load the variant."""

    victims: tuple[str, ...]
    variant: Variant


@dataclass(frozen=True, kw_only=True)
class Wait:
    """Ask again when one of the models that are named has answered.

    `victims` are those and the idle ones that have to go with them. None of them may take new requests for long: with
    two that answer by turns, the wait has no end.
    """

    reason: str
    names: tuple[str, ...]
    victims: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Refuse:
    """No variant can be loaded, whoever is unloaded."""

    reason: str


def admit(
    name: str, variants: Sequence[Variant], residents: Sequence[Resident], free: Places
) -> Load | Evict | Wait | Refuse:
    """Return what to do so that the model can be loaded.

    `variants`: the tuned one first, smaller ones after it, the largest first. `free`: what is free now beside all
    residents and foreign programs; negative if more is held than there is. The order of the residents is immaterial.
    Raises ValueError if there are no variants, two residents have one name, or the model is a resident already.
    """
    _check(name, variants, residents)
    least_speed = KEPT * variants[0].speed
    good = [variant for variant in variants if variant is variants[0] or variant.speed >= least_speed]
    slow = [variant for variant in variants[1:] if variant.speed < least_speed]
    for variant in good:
        if not _lacking(variant, free):
            return Load(variant=variant)
    return (
        _make_room(name, good, residents, free)
        # A slow variant stays slow for as long as the model is loaded, an answer ends soon: the wait comes first.
        or _make_room(name, slow, residents, free)
        or Refuse(reason=_figures(name, variants, residents, free))
    )


def _check(name: str, variants: Sequence[Variant], residents: Sequence[Resident]) -> None:
    names = [resident.name for resident in residents]
    if not variants or name in names or len(set(names)) < len(names):
        message = f"admission of {name}: {len(variants)} variants, residents: {', '.join(sorted(names))}"
        raise ValueError(message)


def _make_room(
    name: str, variants: Sequence[Variant], residents: Sequence[Resident], free: Places
) -> Load | Evict | Wait | None:
    """Return how the first variant that can fit gets room: by idle victims, else by a wait; None if none can."""
    unpinned = [resident for resident in residents if not resident.is_pinned]
    idle = [resident for resident in unpinned if not resident.is_answering]
    for variant in variants:
        victims = cheapest(idle, _lacking(variant, free))
        if victims is not None:
            return Evict(victims=victims, variant=variant) if victims else Load(variant=variant)
    answering = {resident.name for resident in unpinned if resident.is_answering}
    for variant in variants:
        victims = cheapest(unpinned, _lacking(variant, free))
        if victims is not None:
            awaited = tuple(each for each in victims if each in answering)
            reason = f"{name} ({variant.key}) fits when an answer has ended: {', '.join(awaited)}"
            return Wait(reason=reason, names=awaited, victims=victims)
    return None


def cheapest(candidates: Sequence[Resident], lacking: Places) -> tuple[str, ...] | None:
    """Return the names of the victims that cost least and free what is lacking, in ascending order; None if all
    together do not. No victim of the set can be spared.

    Exact up to EXACT candidates. If there are more, a greedy choice by seconds for each MiB of the shortage is filled
    up to EXACT with the next in that order, and the best set among those is returned.
    """
    useful = [each for each in candidates if _relief(each, lacking) > 0]
    useful.sort(key=lambda each: (-each.cost_s, each.name))  # sums do not depend on the order that was given
    if not _frees(useful, lacking):
        return None
    if len(useful) > EXACT:
        chosen = _greedy(useful, lacking)
        others = sorted((each for each in useful if each not in chosen), key=lambda each: _price(each, lacking))
        kept = [*chosen, *others[: max(0, EXACT - len(chosen))]]
        useful = [each for each in useful if each in kept]
    victims = _greedy(useful, lacking) if len(useful) > EXACT else _best(useful, lacking)
    return tuple(sorted(each.name for each in victims))


def _best(candidates: Sequence[Resident], lacking: Places) -> list[Resident]:
    """Return the set that frees what is lacking at the least cost; of equals, the smallest.

    Looks at every subset, except those that contain a set found before or cost more than it. Candidates fall in cost:
    leaving out the dear ones first finds a cheap set early.
    """
    best: tuple[tuple[float, int, list[str]], list[Resident]] = ((inf, 0, []), [])
    still_open: list[tuple[int, list[Resident]]] = [(0, [])]
    while still_open:
        depth, chosen = still_open.pop()
        rank = (sum(each.cost_s for each in chosen), len(chosen), sorted(each.name for each in chosen))
        if rank >= best[0]:
            continue
        if _frees(chosen, lacking):
            best = (rank, chosen)
        elif _frees([*chosen, *candidates[depth:]], lacking):
            still_open.append((depth + 1, [*chosen, candidates[depth]]))
            still_open.append((depth + 1, chosen))
    return best[1]


def _greedy(candidates: Sequence[Resident], lacking: Places) -> list[Resident]:
    """Return a set without a victim that can be spared: one after the other the cheapest for each MiB that is still
    lacking, then without those that later ones made needless, the dearest first."""
    chosen: list[Resident] = []
    while not _frees(chosen, lacking):
        freed = _sums(chosen, lacking)
        rest = {place: mib - freed[place] for place, mib in lacking.items() if mib > freed[place]}
        left = [each for each in candidates if each not in chosen and _relief(each, rest) > 0]
        chosen.append(min(left, key=lambda each: (_price(each, rest), each.name)))
    for one in candidates:
        without = [each for each in chosen if each is not one]
        if len(without) < len(chosen) and _frees(without, lacking):
            chosen = without
    return chosen


def _price(resident: Resident, lacking: Places) -> float:
    return resident.cost_s / _relief(resident, lacking)


def _relief(resident: Resident, lacking: Places) -> float:
    """Return the shares of what is lacking that an eviction gives, summed over places."""
    return sum(min(1.0, resident.holds.get(place, 0.0) / mib) for place, mib in lacking.items())


def _frees(victims: Sequence[Resident], lacking: Places) -> bool:
    freed = _sums(victims, lacking)
    return all(freed[place] >= mib for place, mib in lacking.items())


def _sums(residents: Sequence[Resident], places: Places) -> dict[str, float]:
    return {place: sum(each.holds.get(place, 0.0) for each in residents) for place in places}


def _lacking(variant: Variant, free: Places) -> dict[str, float]:
    """Return the MiB that the variant lacks by place, its error included; only places in which it lacks any."""
    return {place: mib - free.get(place, 0.0) for place, mib in variant.at_most.items() if mib > free.get(place, 0.0)}


def _figures(name: str, variants: Sequence[Variant], residents: Sequence[Resident], free: Places) -> str:
    """Return why the smallest variant fits nowhere, with the figures of each place in which it lacks memory."""
    smallest = variants[-1]
    pinned = [resident for resident in residents if resident.is_pinned]
    unpinned = [resident for resident in residents if not resident.is_pinned]
    lines = []
    for place, lacks in _lacking(smallest, free).items():
        can_free = sum(each.holds.get(place, 0.0) for each in unpinned)
        if lacks <= can_free:
            continue
        holders = sorted(each.name for each in pinned if each.holds.get(place, 0.0) > 0)
        held = sum(each.holds.get(place, 0.0) for each in pinned)
        by_pinned = f", pinned models hold {held:.0f} MiB ({', '.join(holders)})" if holders else ""
        lines.append(
            f"{place} needs {smallest.at_most[place]:.0f} MiB, {free.get(place, 0.0):.0f} MiB are free,"
            f" unloading frees {can_free:.0f} MiB{by_pinned}"
        )
    return f"{name} does not fit, even its smallest variant ({smallest.key}): {'; '.join(lines)}"
