"""Random steps on fake devices: memory that runs out and answers that are dropped are counted, and must be 0.

The devices never ask the planner. They allocate by a table of loads, off by up to 3 %, hide memory in fragments that a
probe counts as free, and hold foreign memory that comes and goes, also while a model loads. What is tested is `admit`
with what a coordinator does around it: it probes before it decides and again before it loads, keeps RESERVE of each
place, counts what a loaded model really holds, and lets a model that is waited for take no new request.

What no coordinator can promise: a foreign program that takes more than the reserve between the last probe and the
allocation. `--foreign-mib` sets how much that is; with more than the reserve leaves, the count is no longer 0.
"""

from __future__ import annotations

import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from appliance.fleet.admit import Evict, Load, Places, Refuse, Resident, Variant, Wait, admit
from appliance.fleet.use import Uses

LOADS = Path(__file__).with_name("fleet_loads.json")
ERROR = 0.03
FRAGMENTS = 0.01  # at most so much of a device is free by the probe, yet cannot be allocated
FOREIGN_MIB = 256.0
MOST_WAITING = 20
RESERVE_MIB = 256.0  # and FRAGMENTS of the device: covers what is hidden, and what others take during one load
CHANCES = {"ask": 0.4, "answered": 0.4, "foreign": 0.1, "nothing": 0.1}  # of each kind of step


@dataclass(frozen=True, kw_only=True)
class Loads:
    """Devices by MiB, and for each model its variants: the tuned one first. Foreign programs take up to
    `foreign` of a device."""

    devices: Mapping[str, float]
    foreign: float
    variants: Mapping[str, tuple[Variant, ...]]
    pinned: frozenset[str]


def read_loads(path: Path) -> Loads:
    document = json.loads(path.read_text(encoding="utf-8"))
    return Loads(
        devices=document["devices"],
        foreign=document["foreign"],
        variants={
            name: tuple(Variant(**{"error": ERROR, **each}) for each in model)
            for name, model in document["models"].items()
        },
        pinned=frozenset(document["pinned"]),
    )


@dataclass(kw_only=True)
class Counts:
    steps: int = 0
    loads: int = 0
    evictions: int = 0
    waits: int = 0
    retries: int = 0  # memory was gone at the second probe, before anything was allocated
    refused: int = 0  # requests
    answers: int = 0
    longest_wait_steps: int = 0
    smaller: int = 0  # loads of a variant that is not the tuned one
    out_of_memory: int = 0
    dropped: int = 0
    unserved: int = 0  # requests that still wait at the end, after all answers have ended

    @property
    def is_clean(self) -> bool:
        return self.out_of_memory == self.dropped == self.unserved == 0

    def in_words(self) -> str:
        return ", ".join(f"{value} {name.replace('_', ' ')}" for name, value in vars(self).items())


class Devices:
    """Memory by place. Only `load` and `take` use it up, and only `probe` tells what is free."""

    def __init__(self, rng: random.Random, loads: Loads, foreign_mib: float) -> None:
        self._rng, self._loads, self._foreign_mib = rng, loads, foreign_mib
        self._held: dict[str, dict[str, float]] = {}
        self._foreign = dict.fromkeys(loads.devices, 0.0)

    def probe(self) -> dict[str, float]:
        held = {place: sum(each.get(place, 0.0) for each in self._held.values()) for place in self._loads.devices}
        return {place: mib - held[place] - self._foreign[place] for place, mib in self._loads.devices.items()}

    def load(self, name: str, needs: Places) -> dict[str, float] | None:
        """Allocate what a variant really takes, and return it; None if memory runs out."""
        for place in self._loads.devices:
            self._take(place, self._rng.uniform(0, self._foreign_mib))
        wanted = {place: mib * self._rng.uniform(1 - ERROR, 1 + ERROR) for place, mib in needs.items()}
        hidden = {place: self._rng.uniform(0, FRAGMENTS) * mib for place, mib in self._loads.devices.items()}
        free = self.probe()
        if any(mib > free[place] - hidden[place] for place, mib in wanted.items()):
            return None
        self._held[name] = wanted
        return wanted

    def unload(self, name: str) -> None:
        del self._held[name]

    def change_foreign(self) -> None:
        """Let programs beside ours shrink, or grow until about as much is free as some model needs: the hard case."""
        place = self._rng.choice(list(self._loads.devices))
        if self._rng.random() < 0.5:
            self._foreign[place] *= self._rng.random()
            return
        needs = [each.needs[place] for made in self._loads.variants.values() for each in made if place in each.needs]
        left_mib = self._rng.choice(needs) * self._rng.uniform(1, 1 + 2 * ERROR) + self._rng.uniform(0, 2 * RESERVE_MIB)
        self._take(place, self.probe()[place] - left_mib)

    def _take(self, place: str, mib: float) -> None:
        most = self._loads.foreign * self._loads.devices[place] - self._foreign[place]
        self._foreign[place] += max(0.0, min(mib, most, self.probe()[place]))


@dataclass(kw_only=True)
class Serving:
    holds: dict[str, float]
    answers: int = 0


@dataclass(kw_only=True)
class Coordinator:
    """The least that a coordinator does around `admit`, one step at a time."""

    rng: random.Random
    loads: Loads
    devices: Devices
    counts: Counts = field(default_factory=Counts)
    loaded: dict[str, Serving] = field(default_factory=dict)
    waiting: list[tuple[str, int]] = field(default_factory=list)  # model and step of each request, by arrival
    awaited: frozenset[str] = frozenset()
    uses: Uses = field(default_factory=Uses)

    def ask(self, name: str) -> None:
        self.uses.note(name, float(self.counts.steps))
        self.waiting.append((name, self.counts.steps))

    def answered(self) -> None:
        if busy := sorted(name for name, each in self.loaded.items() if each.answers):
            self.loaded[self.rng.choice(busy)].answers -= 1
            self.counts.answers += 1

    def serve(self) -> None:
        """Start the answers that can start; for the first model in the queue that is not loaded, make room."""
        self.awaited, is_blocked = frozenset(), False
        for request in list(self.waiting):
            name, since = request
            if name not in self.loaded and not is_blocked:
                is_blocked = not self._bring(name)
                if request not in self.waiting:  # refused
                    continue
            if name in self.loaded and name not in self.awaited:
                self.loaded[name].answers += 1
                self.waiting.remove(request)
                self.counts.longest_wait_steps = max(self.counts.longest_wait_steps, self.counts.steps - since)

    def _bring(self, name: str) -> bool:
        """Return True if the model is loaded or refused, False if it has to wait."""
        match admit(name, self.loads.variants[name], self._residents(name), self._free()):
            case Wait(victims=victims):
                self.counts.waits += 1
                self.awaited = frozenset(victims)
                return False
            case Refuse():
                self.counts.refused += sum(each[0] == name for each in self.waiting)
                self.waiting = [each for each in self.waiting if each[0] != name]
                return True
            case Evict(victims=victims, variant=variant):
                for victim in victims:
                    self._evict(victim)
                return self._load(name, variant)
            case Load(variant=variant):
                return self._load(name, variant)

    def _load(self, name: str, variant: Variant) -> bool:
        self._between()
        free = self._free()
        if any(mib > free[place] for place, mib in variant.at_most.items()):
            self.counts.retries += 1
            return False  # nothing was allocated: it is decided anew in the next step
        self.counts.loads += 1
        self.counts.smaller += variant is not self.loads.variants[name][0]
        holds = self.devices.load(name, variant.needs)
        if holds is None:
            self.counts.out_of_memory += 1
            return False
        self.loaded[name] = Serving(holds=holds)
        return True

    def _between(self) -> None:
        """Let others change their memory while victims end."""
        if self.rng.random() < 0.2:
            self.devices.change_foreign()

    def _evict(self, name: str) -> None:
        self.counts.evictions += 1
        self.counts.dropped += self.loaded[name].answers
        del self.loaded[name]
        self.devices.unload(name)

    def _free(self) -> dict[str, float]:
        return {
            place: mib - RESERVE_MIB - FRAGMENTS * self.loads.devices[place]
            for place, mib in self.devices.probe().items()
        }

    def _residents(self, wanted: str) -> Sequence[Resident]:
        now_s = float(self.counts.steps)
        return [
            Resident(
                name=name,
                holds=each.holds,
                is_pinned=name in self.loads.pinned,
                is_answering=each.answers > 0,
                reload_s=1 + sum(each.holds.values()) / 2000,
                use_chance=self.uses.chance(name, wanted, now_s),
            )
            for name, each in self.loaded.items()
        ]


def walk(steps: int, seed: int, loads: Loads, *, foreign_mib: float = FOREIGN_MIB) -> Counts:
    """Return what happened in so many random steps, and until the queue was empty after them."""
    rng = random.Random(seed)
    devices = Devices(rng, loads, foreign_mib)
    coordinator = Coordinator(rng=rng, loads=loads, devices=devices)
    counts, names = coordinator.counts, list(loads.variants)
    popularity = [1 / rank for rank in range(1, len(names) + 1)]
    for _ in range(steps):
        counts.steps += 1
        [what] = rng.choices(list(CHANCES), list(CHANCES.values()))
        if what == "ask" and len(coordinator.waiting) < MOST_WAITING:
            coordinator.ask(rng.choices(names, popularity)[0])
        elif what == "answered":
            coordinator.answered()
        elif what == "foreign":
            devices.change_foreign()
        coordinator.serve()
    for _ in range(100 * len(coordinator.waiting) + 100):
        coordinator.answered()
        coordinator.serve()
    counts.unserved = len(coordinator.waiting)
    return counts
