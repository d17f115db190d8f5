"""The experts of a layer that are in the GPU's slots, and the decision what to do with a token's experts. Admission has
a price.

Engine and simulator call the same code: `decide` before a layer's experts run, `observe` while the next layer's
attention runs, `landed` when a copy has ended. Not thread-safe: the caller's loop owns it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from operator import itemgetter
from typing import Literal, NamedTuple

from appliance.moe.cost import Cost
from appliance.moe.uses import History, Uses

Rule = Literal["priced", "lru", "lru-1", "cpu"]  # lru-1: at most one copy a layer and token
GUARD_TOKENS = 256
_GUARD_EVERY = 8  # every so many layers one is watched; the others are assumed to behave like it
_GUARD_RETRIED = 8  # comparisons after which prices are tried again, since the text may be another one by then
_GUARD_MARGIN = 0.005  # a smaller difference is chance, and changing the rule has a cost
# least gain of a hit, as a share of a copy's time: a resident expert outlives the horizon, and no copy needs more than
# 3.3 hits to pay off
_LEAST_GAIN = 0.3
_IN_FLIGHT_TOKENS = 2  # largest amount of copies in flight over all layers, in tokens' experts
_VALUE = itemgetter(0)


class SlotsTooFewError(ValueError):
    """There are fewer slots than one token uses: each token would evict experts that it needs itself."""


class Upload(NamedTuple):
    """One copy into `slot`. Its `victim` may still be read by GPU work that was enqueued before the copy.

    `is_fetch` is True if this token computes with the expert as soon as the copy has ended; otherwise the copy is for
    later tokens.
    """

    expert: int
    victim: int | None
    slot: int
    is_fetch: bool


class Decision(NamedTuple):
    """The place where each expert of a token is computed: exactly one of `gpu`, `fetch` and `cpu`."""

    gpu: tuple[int, ...]
    fetch: tuple[int, ...]
    cpu: tuple[int, ...]
    uploads: tuple[Upload, ...]  # copies for `fetch` first, then those for later tokens
    ms: float  # predicted time, without the layer's other work


@dataclass(frozen=True, kw_only=True)
class Takeover:
    """A change of the deciding rule. Times are predicted, over `GUARD_TOKENS` tokens of the watched layers."""

    token: int
    before: Rule
    after: Rule
    before_ms: float
    after_ms: float | None  # None: prices are tried again, without a prediction

    def in_words(self) -> str:
        if self.after_ms is None:
            return f"experts: rule {self.after} is tried again instead of {self.before} at token {self.token}"
        saved = 1 - self.after_ms / self.before_ms
        return f"experts: rule {self.after} takes over from {self.before} at token {self.token}: {saved:.1%} less time"


@dataclass(kw_only=True)
class Shared:
    """State that the layers of one model share: learned uses, bytes in flight, and the rule that decides."""

    uses: Uses
    in_flight_max_mb: float
    rule: Rule = "priced"
    on_takeover: Callable[[Takeover], None] = lambda _: None
    in_flight_mb: float = 0.0
    decoded: int = 0  # tokens of layer 0, without prompts
    compared: int = 0  # comparisons since a rule other than prices took over
    # predicted time of each rule since the rules were last compared
    predicted_ms: dict[Rule, float] = field(default_factory=dict)

    def add(self, rule: Rule, ms: float) -> None:
        self.predicted_ms[rule] = self.predicted_ms.get(rule, 0.0) + ms

    def compare(self, token: int) -> None:
        """Change to the rule with the least predicted time if the current rule is behind by more than the margin.
        Prices are tried again some time after another rule has taken over."""
        ms, before = self.predicted_ms, self.rule
        after, after_ms = min(ms.items(), key=lambda pair: (pair[1], pair[0]))
        self.compared += before != "priced"
        if self.compared == _GUARD_RETRIED:
            self._change("priced", token, None)
        elif after_ms < ms[before] * (1 - _GUARD_MARGIN):
            self._change(after, token, after_ms)
        self.predicted_ms = {}

    def _change(self, after: Rule, token: int, after_ms: float | None) -> None:
        before, self.rule, self.compared = self.rule, after, 0
        before_ms = self.predicted_ms[before]
        self.on_takeover(Takeover(token=token, before=before, after=after, before_ms=before_ms, after_ms=after_ms))


def layer_caches(
    costs: Sequence[Cost],
    *,
    slots: int,
    experts: int,
    top_k: Sequence[int],
    on_takeover: Callable[[Takeover], None] = lambda _: None,
    is_guarded: bool = True,
    needed: Collection[int] | None = None,
) -> tuple[LayerCache, ...]:
    """Return one cache for each layer with routed experts, in order; `costs` and `top_k` are by layer.

    With `needed`, only those layers decide, exactly as they would among all layers; the others have no slots unless
    they are watched. Raises SlotsTooFewError if `slots` is neither 0 nor enough for one token.
    """
    largest_mb = max((cost.expert_mb * k for cost, k in zip(costs, top_k, strict=True)), default=0.0)
    shared = Shared(
        uses=Uses(),
        in_flight_max_mb=_IN_FLIGHT_TOKENS * largest_mb,
        on_takeover=on_takeover,
    )
    found = []
    for layer, (cost, k) in enumerate(zip(costs, top_k, strict=True)):
        guarded = is_guarded and slots > 0 and layer % _GUARD_EVERY == 0
        own = slots if guarded or needed is None or layer in needed else 0
        cache = LayerCache(
            cost=cost, slots=own, experts=experts, top_k=k, shared=shared, layer=layer, is_guarded=guarded
        )
        found.append(cache)
    return tuple(found)


class LayerCache:
    """The slots of one layer."""

    def __init__(
        self,
        *,
        cost: Cost,
        slots: int,
        experts: int,
        top_k: int,
        shared: Shared,
        layer: int = 0,
        is_guarded: bool = False,
        pinned: Sequence[int] = (),
    ) -> None:
        """`pinned` experts are in slots from the start and are never evicted, such as those that a model always uses.

        Raises SlotsTooFewError if `slots` is neither 0 nor enough for one token and the pinned experts.
        """
        if not 0 < top_k <= experts:
            message = f"a token cannot use {top_k} of {experts} experts"
            raise ValueError(message)
        needed = max(top_k, len(pinned))
        if 0 < slots < needed or (pinned and not slots):
            message = f"{slots} slots of layer {layer} hold less than one token's experts: {needed}"
            raise SlotsTooFewError(message)
        self.cost = cost
        self._expert_mb = cost.expert_mb
        self.slots = slots
        self._experts = experts
        self.top_k = top_k
        self.shared = shared
        self._pinned = frozenset(pinned)
        # expert -> slot, for experts that may be read
        self._slot_of = {expert: slot for slot, expert in enumerate(pinned)}
        self._free = list(range(slots - 1, len(pinned) - 1, -1))
        self._in_flight: dict[int, Upload] = {}
        self._history = History(experts, shared.uses, layer, is_valued=slots > 0)
        self._ranked: list[tuple[float, int]] = []  # (value, resident expert) for the next token, lowest value first
        self._saved = self._saved_ms()
        least = _LEAST_GAIN * cost.expert_mb / cost.rates.pcie_gb_s
        self._gains = [max(least, saved) for saved in self._saved]
        self._splits = [cost.splits(top_k, hits) for hits in range(top_k + 1)]
        self.all_cpu_ms = cost.all_cpu_ms(top_k)
        self._layer = layer
        self._guard = _Guard(self) if is_guarded else None
        # the token, whether it is a prompt's, and its decision, until they are observed
        self._decided: tuple[Sequence[int], bool, Decision] | None = None

    def _saved_ms(self) -> list[float]:
        """Return, by number of hits, the time that one more hit saves: the mean of the steps on both sides, since whole
        experts make the time a staircase."""
        best = [self.cost.best_ms(self.top_k, hits) for hits in range(self.top_k + 1)]
        saved = []
        for hits in range(self.top_k + 1):
            before, after = max(0, hits - 1), min(self.top_k, hits + 1)
            saved.append((best[before] - best[after]) / (after - before))
        return saved

    def split_ms(self, hits: int, copied: int) -> float:
        """Return the time of the best split of a token with so many hits and copies."""
        return self._splits[hits][copied].ms

    @property
    def residents(self) -> frozenset[int]:
        """Experts that may be read now."""
        return frozenset(self._slot_of)

    @property
    def in_flight(self) -> tuple[Upload, ...]:
        return tuple(self._in_flight.values())

    def begin(self, tokens: int, counts: Sequence[int]) -> tuple[int, ...]:
        """Start from the uses of an earlier run, before the first `decide`. Returns the experts that the caller copies
        into slot 0, 1 and so on before it reads them: those with the most uses."""
        self._history.begin(tokens, counts)
        used = [expert for expert, count in enumerate(self._history.counted()) if count]
        ranked = sorted((-value, expert) for value, expert in self._history.valued(used))[: self.slots]
        self._slot_of = {expert: slot for slot, (_, expert) in enumerate(ranked)}
        del self._free[self.slots - len(ranked) :]
        self._rank()
        return tuple(self._slot_of)

    def decide(self, used: Sequence[int], *, is_prompt: bool = False) -> Decision:
        """Return what to do with a token's experts, given by falling router weight. O(top_k + slots) look-ups.
        `is_prompt`: True for a prompt's token, whose copies take no decoding time.

        A victim stops being resident here. It may be one of this token's own hits: its GPU work is enqueued before the
        copy, and the copy waits for that work on its stream. Raises ValueError for a token that the layer cannot have.
        """
        if self._decided is not None:
            message = "decide was called twice without observe between"
            raise RuntimeError(message)
        if len(used) != self.top_k:
            message = f"a token of this layer uses {self.top_k} experts, not {len(used)}"
            raise ValueError(message)
        decision = self._decision(used, self.shared.rule, is_prompt=is_prompt)
        self._decided = used, is_prompt, decision
        return decision

    def _decision(self, used: Sequence[int], rule: Rule, *, is_prompt: bool) -> Decision:
        if not self.slots or rule == "cpu":
            return Decision((), (), tuple(used), (), self.all_cpu_ms)
        slot_of, in_flight = self._slot_of, self._in_flight
        hits = [expert for expert in used if expert in slot_of]
        if len(hits) == self.top_k:
            return self._carried_out(hits, [], [], [], 0)
        misses = [expert for expert in used if expert not in slot_of]
        wanted = [expert for expert in misses if expert not in in_flight] if in_flight else misses
        shared = self.shared
        room = int((shared.in_flight_max_mb - shared.in_flight_mb) / self._expert_mb + 1e-9)
        if room > len(wanted):
            room = len(wanted)
        if rule == "priced" and is_prompt:
            wanted, victims, count = self._most_used(hits, wanted, room)
        elif rule == "priced":
            wanted, victims, count = self._priced(hits, wanted, room)
        else:
            victims, count = self._lru(used, room, 1 if rule == "lru-1" else self.top_k)
        return self._carried_out(hits, misses, wanted, victims, count)

    def _most_used(self, hits: list[int], wanted: list[int], room: int) -> tuple[list[int], list[int], int]:
        """Return a prompt's misses by falling uses so far, the victims by rising uses, and how many copies to make:
        into each free slot, then while an expert has been used more often than its victim."""
        uses = self._history.uses
        wanted = sorted(wanted, key=uses, reverse=True)  # stable: equal ones stay ordered by router weight
        victims = [expert for expert in self._slot_of if expert not in hits and expert not in self._pinned]
        victims.sort(key=lambda expert: (uses(expert), expert))
        count = free = min(room, len(self._free))
        for expert, victim in zip(wanted[free:room], victims, strict=False):
            if uses(expert) + 1 <= uses(victim):
                break
            count += 1
        return wanted, victims, count

    def _priced(self, hits: list[int], wanted: list[int], room: int) -> tuple[list[int], list[int], int]:
        """Return the misses by falling value, the victims by rising value, and how many copies pay off: the first into
        free slots, the others into the victims' slots.

        The price of a copy is the time that it adds to this token, negative if fetching shortens the token. Its gain is
        the difference in value times the time that a hit is taken to save. For a free slot, which is kept for long, it
        is what the expert's uses so far would have saved: a copy is made once its misses have cost as much.
        """
        history = self._history
        asked = history.valued(wanted, history.used_now)
        asked.sort(key=_VALUE, reverse=True)  # the sort is stable: equal values stay ordered by router weight
        wanted = [expert for _, expert in asked]
        free = min(room, len(self._free))
        victims = self._least_valuable(hits, room - free) if room > free else []
        splits = self._splits[len(hits)]
        saved_ms, gain_ms = self._saved[len(hits)], self._gains[len(hits)]
        count = number = 0
        gained, best = 0.0, -splits[0].ms
        while number < free + len(victims):
            value, expert = asked[number]
            if number < free:
                gained += (history.uses(expert) + 1) * saved_ms
            else:
                gained += (value - victims[number - free][0]) * gain_ms
            number += 1
            score = gained - splits[number].ms
            if score > best:
                count, best = number, score
        return wanted, [expert for _, expert in victims], count

    def _least_valuable(self, hits: list[int], count: int) -> list[tuple[float, int]]:
        """Return the `count` least valuable residents, which may include this token's own hits. Use normally only
        raises the value of a hit, so a hit that ranks behind `count` others need not be looked at."""
        found: list[tuple[float, int]] = []
        passed = []
        for pair in self._ranked:
            if pair[1] in hits:
                passed.append(pair[1])
            else:
                found.append(pair)
                if len(found) == count:
                    break
        used_now = self._history.used_now
        if used_now < 0:
            passed = [expert for expert in hits if expert not in self._pinned]
        if passed:
            found += self._history.valued(passed, used_now)
            found.sort()
            del found[count:]
        return found

    def _lru(self, used: Sequence[int], room: int, most: int) -> tuple[list[int], int]:
        victims = [expert for expert in self._slot_of if expert not in self._pinned and expert not in used]
        victims.sort(key=self._history.last_use)
        free = len(self._free)
        return victims, min(room, max(most, free), free + len(victims))

    def _carried_out(
        self, hits: list[int], misses: list[int], wanted: list[int], victims: list[int], count: int
    ) -> Decision:
        """Start the copies of the first `count` wanted experts, into free slots first, then into the victims' slots."""
        ms, on_gpu, fetched, _ = self._splits[len(hits)][count]
        gpu = tuple(hits[:on_gpu])
        if not count:
            return Decision(gpu, (), (*hits[on_gpu:], *misses), (), ms)
        fetch = tuple(wanted[:fetched])
        cpu = (*hits[on_gpu:], *[expert for expert in misses if expert not in fetch])
        slot_of, in_flight, free, uploads = self._slot_of, self._in_flight, self._free, []
        into_free = len(free)
        for number in range(count):
            expert, victim = wanted[number], None
            if number < into_free:
                slot = free.pop()
            else:
                victim = victims[number - into_free]
                slot = slot_of.pop(victim)
            upload = in_flight[expert] = Upload(expert, victim, slot, number < fetched)
            uploads.append(upload)
        self.shared.in_flight_mb += count * self._expert_mb
        return Decision(gpu, fetch, cpu, tuple(uploads), ms)

    def observe(self) -> None:
        """Call after each `decide`, off the critical path: learns from the token and ranks the residents for the next
        one."""
        if self._decided is None:
            message = "observe was called without decide before it"
            raise RuntimeError(message)
        used, is_prompt, decision = self._decided
        self._decided = None
        self._history.add(used)
        if self._guard is not None:
            self._guard.see(used, decision, is_prompt=is_prompt)
            if self._layer == 0 and not is_prompt:
                self.shared.decoded += 1
                if self.shared.decoded % GUARD_TOKENS == 0:
                    self.shared.compare(self._history.tokens)
        if self.slots:
            self._rank()

    def _rank(self) -> None:
        slot_of, pinned = self._slot_of, self._pinned
        ranked = self._history.valued([each for each in slot_of if each not in pinned] if pinned else slot_of)
        ranked.sort()
        self._ranked = ranked

    def landed(self, upload: Upload) -> None:
        """Note that a copy has ended: from now on the expert may be read and evicted. Raises KeyError if it was not in
        flight."""
        if self._in_flight.get(upload.expert) != upload:
            raise KeyError(upload)
        del self._in_flight[upload.expert]
        self.shared.in_flight_mb -= self._expert_mb
        self._slot_of[upload.expert] = upload.slot
        if self._decided is None:
            self._rank()


class _LruShadow:
    """The decisions that LRU would have made, with copies that end at once. Residents are ordered by their last use."""

    def __init__(self, slots: int, most: int) -> None:
        self._slots = slots
        self._most = most
        self._residents: dict[int, None] = {}

    def use(self, used: Sequence[int]) -> tuple[int, int]:
        """Return hits and copies of one token."""
        residents = self._residents
        misses = []
        for expert in reversed(used):  # lowest router weight first, so that it is evicted first
            if expert in residents:
                del residents[expert]
                residents[expert] = None
            else:
                misses.append(expert)
        free = self._slots - len(residents)
        copied = min(len(misses), max(self._most, free))
        for _ in range(copied - free):
            del residents[next(iter(residents))]  # never an expert of this token: those come later in the order
        for expert in misses[len(misses) - copied :]:
            residents[expert] = None
        return len(used) - len(misses), copied


class _Guard:
    """Predicted times of the rules that do not decide now, in one layer. Prices are not predicted while another rule
    decides: what would be in their slots is unknown."""

    def __init__(self, cache: LayerCache) -> None:
        self._cache = cache
        self._lru: dict[Rule, _LruShadow] = {
            "lru": _LruShadow(cache.slots, cache.top_k),
            "lru-1": _LruShadow(cache.slots, 1),
        }

    def see(self, used: Sequence[int], decision: Decision, *, is_prompt: bool) -> None:
        """Add the predicted times of a decoded token; a prompt only changes what the rules have in their slots."""
        cache, shared = self._cache, self._cache.shared
        found = {shared.rule: decision.ms}
        for rule, shadow in self._lru.items():
            hits, copied = shadow.use(used)
            found.setdefault(rule, cache.split_ms(hits, copied))
        found.setdefault("cpu", cache.all_cpu_ms)
        if not is_prompt:
            for rule, ms in found.items():
                shared.add(rule, ms)
