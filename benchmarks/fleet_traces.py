"""Made-up fleets and requests, each from a seed: models of 0.3 to 40 GB on one machine, and who is asked when."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

DAY_S = 86_400.0
MIB_OF_GB = 1e9 / 2**20
SMALLEST_GB, LARGEST_GB = 0.3, 40.0
REQUESTS = 20_000
KINDS = ("skewed", "daily", "agents", "drifting", "mixed")
EQUAL_EVERY = 4  # of so many traces of a kind, one has models of equal size


@dataclass(frozen=True, kw_only=True)
class Model:
    name: str
    mib: float
    reload_s: float


@dataclass(frozen=True, kw_only=True)
class Request:
    at_s: float
    name: str


@dataclass(frozen=True, kw_only=True)
class Trace:
    seed: int
    kind: str
    is_equal: bool  # True if all models have one size
    models: dict[str, Model]
    free_mib: float  # for models: the largest, and a share of the others, fit
    requests: tuple[Request, ...]  # by time


def make_trace(seed: int) -> Trace:
    """Return the trace of a seed. Kinds take turns by pairs of seeds, so even and odd seeds see each kind alike."""
    rng = random.Random(seed)
    turn = seed // 2
    kind, is_equal = KINDS[turn % len(KINDS)], turn // len(KINDS) % EQUAL_EVERY == EQUAL_EVERY - 1
    models = _models(rng, is_equal)
    total, largest = sum(each.mib for each in models.values()), max(each.mib for each in models.values())
    free_mib = largest + (total - largest) * rng.uniform(0.1, 0.7)
    names = list(models)
    rng.shuffle(names)  # popularity has nothing to do with size
    makers = {"skewed": _skewed, "daily": _daily, "agents": _agents, "drifting": _drifting}
    parts = list(makers.values()) if kind == "mixed" else [makers[kind]]
    found: list[Request] = []
    for make in parts:
        found += make(rng, names, REQUESTS // len(parts))
    found.sort(key=lambda each: each.at_s)
    return Trace(seed=seed, kind=kind, is_equal=is_equal, models=models, free_mib=free_mib, requests=tuple(found))


def _models(rng: random.Random, is_equal: bool) -> dict[str, Model]:
    """Return 4 to 13 models whose sizes are even on a logarithmic scale. Reload: bytes at the disk's rate, and a
    constant."""
    gb_s, constant_s = math.exp(rng.uniform(math.log(0.3), math.log(5))), rng.uniform(1, 8)
    one_gb = _size_gb(rng)
    sizes = [one_gb if is_equal else _size_gb(rng) for _ in range(rng.randint(4, 13))]
    return {
        f"m{number}": Model(name=f"m{number}", mib=gb * MIB_OF_GB, reload_s=constant_s + gb / gb_s)
        for number, gb in enumerate(sizes)
    }


def _size_gb(rng: random.Random) -> float:
    return math.exp(rng.uniform(math.log(SMALLEST_GB), math.log(LARGEST_GB)))


def _zipf(rng: random.Random, count: int) -> list[float]:
    skew = rng.uniform(0.5, 1.5)
    return [1 / rank**skew for rank in range(1, count + 1)]


def _chat(rng: random.Random, name: str, at_s: float) -> Iterator[Request]:
    """Yield a conversation: some questions, each after the last answer was read."""
    while True:
        yield Request(at_s=at_s, name=name)
        if rng.random() < 0.25:
            return
        at_s += 5 + rng.expovariate(1 / 40)


def _skewed(rng: random.Random, names: Sequence[str], count: int) -> list[Request]:
    """Return conversations at random times, with few models that are asked often and many that are rare."""
    weights, gap_s = _zipf(rng, len(names)), rng.uniform(60, 900)
    found: list[Request] = []
    at_s = 0.0
    while len(found) < count:
        at_s += rng.expovariate(1 / gap_s)
        found += _chat(rng, rng.choices(names, weights)[0], at_s)
    return found


def _daily(rng: random.Random, names: Sequence[str], count: int) -> list[Request]:
    """Return conversations in which each model has its hours of the day."""
    weights, gap_s = _zipf(rng, len(names)), rng.uniform(60, 900)
    peaks = [rng.uniform(0, DAY_S) for _ in names]
    found: list[Request] = []
    at_s = 0.0
    while len(found) < count:
        at_s += rng.expovariate(1 / gap_s)
        now = [
            weight * (0.02 + max(0.0, math.cos(2 * math.pi * (at_s - peak) / DAY_S)))
            for weight, peak in zip(weights, peaks, strict=True)
        ]
        found += _chat(rng, rng.choices(names, now)[0], at_s)
    return found


def _agents(rng: random.Random, names: Sequence[str], count: int) -> list[Request]:
    """Return sessions of agents, each of which goes round a few models (chat, embed, rerank) step by step."""
    teams = [rng.sample(list(names), min(len(names), rng.randint(2, 4))) for _ in range(rng.randint(1, 3))]
    weights, gap_s = _zipf(rng, len(teams)), rng.uniform(300, 3600)
    found: list[Request] = []
    at_s = 0.0
    while len(found) < count:
        at_s += rng.expovariate(1 / gap_s)
        team, step_s, now_s = rng.choices(teams, weights)[0], rng.uniform(2, 40), at_s
        for _ in range(rng.randint(3, 40)):
            for name in team:
                found.append(Request(at_s=now_s, name=name))
                now_s += rng.expovariate(1 / step_s)
        if rng.random() < 0.5:  # others meanwhile ask for something else
            found += _chat(rng, rng.choice(list(names)), rng.uniform(at_s, now_s))
    return found


def _drifting(rng: random.Random, names: Sequence[str], count: int) -> list[Request]:
    """Return conversations in which, now and then, a model takes another's place in popularity."""
    order, weights, gap_s = list(names), _zipf(rng, len(names)), rng.uniform(60, 900)
    swap_after = rng.uniform(20, 200)
    found: list[Request] = []
    at_s = 0.0
    while len(found) < count:
        at_s += rng.expovariate(1 / gap_s)
        if rng.random() < 1 / swap_after:
            one, other = rng.sample(range(len(order)), 2)
            order[one], order[other] = order[other], order[one]
        found += _chat(rng, rng.choices(order, weights)[0], at_s)
    return found
