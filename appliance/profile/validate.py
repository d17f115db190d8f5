"""Does the profile still hold? Real requests compared with what was measured, at their own depths. Pure.

Each part of a request, what it read and what it decoded, is compared with the seconds that the profile's curve gives
for just these tokens. Two parts of one kind in a row that are slower by more than TOLERANCE, undisturbed, make the
profile stale; GOOD_ENOUGH requests that are not make it hold. Either is final until the next start.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, replace
from enum import StrEnum

from appliance.engines.llama_timings import Served
from appliance.plan import Plan
from appliance.profile.record import Profile
from appliance.tune.curve import SPREAD, Curve
from appliance.tune.measurement import curve_of

TOLERANCE = 0.15  # of a speed: what is within it may be chance, or the room's temperature
IN_A_ROW = 2
GOOD_ENOUGH = 5
# Steps of decoding in one request. Fewer say little: the profile's own figures are of 24 tokens, off by 3 to 10 %.
MIN_DECODE_STEPS = 24
MIN_PREFILL_TOKENS = 256
PROBES_MAX = 10  # twice what a verdict needs; more are of a machine that never is quiet


class Verdict(StrEnum):
    OPEN = "open"
    HOLDS = "holds"
    STALE = "stale"


@dataclass(frozen=True, kw_only=True)
class Baseline:
    """What was measured of the plan that serves.

    `draft_cost` is what one guessed token adds to a step, as a share of a plain step (b of tuning.md's law); None where
    it was not measured: what was decoded with guesses is not compared then, since its speed is that of its text.
    """

    curve: Curve
    ubatch: int
    draft_cost: float | None = None


@dataclass(frozen=True, kw_only=True)
class Compared:
    """Speeds in tokens a second; those of the profile are an interval, where it can tell no better. `doubt` is the
    share that either end may be off by, where few tokens were timed."""

    did: str  # "decoded" or "read"
    depth: int
    speed: float
    low: float
    high: float
    is_extrapolated: bool
    doubt: float = 0.0

    @property
    def least(self) -> float:
        return self.low / (1 + self.doubt)

    @property
    def most(self) -> float:
        return self.high * (1 + self.doubt)

    @property
    def slower(self) -> float:
        """Than the least that was to be expected, as a share; 0.24 is 24 % slower."""
        return max(0.0, 1 - self.speed / self.least)

    @property
    def faster(self) -> float:
        return max(0.0, self.speed / self.most - 1)

    @property
    def is_slow(self) -> bool:
        return self.slower > TOLERANCE

    @property
    def is_fast(self) -> bool:
        return self.faster > TOLERANCE and not self.is_extrapolated

    @property
    def is_good(self) -> bool:
        """As fast as measured. What is neither this nor slow tells nothing: it may be either."""
        return not self.is_extrapolated and self.speed >= (1 - TOLERANCE) * self.high

    def in_words(self) -> str:
        """As in "decoded 12.1 tok/s at 1,900 tokens, 16.0 measured: 24 % slower"."""
        if self.is_slow:
            bound, end, change = self.least, "least", f"{100 * self.slower:.0f} % slower"
        else:
            bound, end, change = self.most, "most", f"{100 * self.faster:.0f} % faster"
        why = ["extrapolated"] if self.is_extrapolated else []
        why += [f"measured within {100 * self.doubt:.0f} %: few tokens"] if self.doubt else []
        source = f"at {end} to be expected ({', '.join(why)})" if why else "measured"
        return f"{self.did} {self.speed:.1f} tok/s at {self.depth:,} tokens, {bound:.1f} {source}: {change}"


@dataclass(frozen=True, kw_only=True)
class Holds:
    """All that was heard so far. `words` say why a verdict is what it is; `note` that it is faster than measured."""

    baseline: Baseline
    verdict: Verdict = Verdict.OPEN
    words: str = ""
    note: str = ""
    good: int = 0
    slow: tuple[Compared, ...] = ()  # the last in a row, of each kind
    fast: tuple[Compared, ...] = ()

    def heard(self, served: Served, disturbed: str | None = None) -> Holds:
        """`disturbed` says who else used the machine meanwhile; then the request counts for nothing."""
        if self.verdict is not Verdict.OPEN or disturbed is not None or not served.was_alone:
            return self
        found = compare(self.baseline, served)
        slow = _row(self.slow, found, frozenset(one for one in found if one.is_slow))
        fast = _row(self.fast, found, frozenset(one for one in found if one.is_fast))
        good = self.good + (any(one.is_good for one in found) and not any(one.is_slow for one in found))
        note = self.note or _twice(fast)
        now = replace(self, slow=slow, fast=() if note else fast, good=good, note=note)
        if words := _twice(slow):
            return replace(now, verdict=Verdict.STALE, words=words)
        if good < GOOD_ENOUGH:
            return now
        words = f"{good} requests were no slower than measured, within {100 * TOLERANCE:.0f} %"
        return replace(now, verdict=Verdict.HOLDS, words=words)


def baseline_of(profile: Profile, serving: Plan, *, draft_cost: float | None = None) -> Baseline | None:
    """None where the plan that serves was not measured."""
    looks = [m for m in profile.measurements if m.key == serving.key and m.points]
    return Baseline(curve=curve_of(looks), ubatch=serving.ubatch, draft_cost=draft_cost) if looks else None


def compare(baseline: Baseline, served: Served) -> tuple[Compared, ...]:
    """What the request says: of its prefill, of its decoding, of both or of neither."""
    found = (_prefill(baseline, served), _decode(baseline, served))
    return tuple(one for one in found if one is not None)


def should_probe(verdict: Verdict, *, idle_s: float, after_s: float, probes: int) -> bool:
    """Whether to ask the engine something ourselves: nobody has asked for `after_s`, and nothing is known yet."""
    return verdict is Verdict.OPEN and idle_s >= after_s and probes < PROBES_MAX


def _prefill(baseline: Baseline, served: Served) -> Compared | None:
    tokens, first = served.prompt_tokens, served.cached_tokens
    if tokens < MIN_PREFILL_TOKENS or served.prefill_ms <= 0:
        return None
    curve, last = baseline.curve, first + tokens
    known = max(first, min(last, curve.deepest))
    longest_s = curve.prefill_s(first, known) + SPREAD * curve.prefill_s(known, last)
    # A batch that is not full may take as long as one that is: where weights are copied for each, it does.
    longest_s *= math.ceil(tokens / baseline.ubatch) * baseline.ubatch / tokens
    return _compared(
        "read",
        first + tokens // 2,
        tokens,
        served.prefill_ms / 1000,
        shortest_s=curve.prefill_s(first, last),
        longest_s=longest_s,
        is_extrapolated=last > curve.deepest,
    )


def _decode(baseline: Baseline, served: Served) -> Compared | None:
    steps, first = served.decode_steps, served.depth_before
    if steps < MIN_DECODE_STEPS or served.decode_ms <= 0:
        return None
    if served.drafted_tokens and baseline.draft_cost is None:
        return None
    curve, tokens = baseline.curve, served.decode_tokens - 1
    # Accepted guesses save their steps, and every guess makes the step that checks it longer.
    share = (steps + (baseline.draft_cost or 0.0) * served.drafted_tokens) / tokens
    return _compared(
        "decoded",
        first + tokens // 2,
        tokens,
        served.decode_ms / 1000,
        shortest_s=share * curve.decode_s(first, tokens),
        longest_s=share * _longest_decode_s(curve, first, tokens),
        is_extrapolated=first + tokens > curve.deepest,
        doubt=curve.doubt(first, first + tokens),
    )


def _compared(
    did: str,
    depth: int,
    tokens: int,
    seconds: float,
    *,
    shortest_s: float,
    longest_s: float,
    is_extrapolated: bool,
    doubt: float = 0.0,
) -> Compared | None:
    if shortest_s <= 0 or longest_s <= 0:
        return None  # a profile without times
    return Compared(
        did=did,
        depth=depth,
        speed=tokens / seconds,
        low=tokens / longest_s,
        high=tokens / shortest_s,
        is_extrapolated=is_extrapolated,
        doubt=doubt,
    )


def _longest_decode_s(curve: Curve, first: int, tokens: int) -> float:
    """The integral of what a step takes at most: straight lines, with corners where the curve has some."""
    last = first + tokens
    marks = (first, *(p.depth for p in curve.ordered if first < p.depth < last), last)
    areas = ((b - a) * (curve.decode(a).high_ms + curve.decode(b).high_ms) / 2 for a, b in itertools.pairwise(marks))
    return sum(areas) / 1000


def _row(before: tuple[Compared, ...], found: tuple[Compared, ...], such: frozenset[Compared]) -> tuple[Compared, ...]:
    """The last in a row of each kind: one that is not `such` ends its kind's row, unless it tells nothing."""
    row = before
    for one in found:
        if one in such:
            row = (*row, one)
        elif one.is_good or one.is_slow:
            row = tuple(other for other in row if other.did != one.did)
    return row


def _twice(row: tuple[Compared, ...]) -> str:
    """What all of a long enough row were at least; empty while there is none."""
    for did in ("decoded", "read"):
        of_kind = [one for one in row if one.did == did]
        if len(of_kind) >= IN_A_ROW:
            mildest = min(of_kind, key=lambda one: one.slower + one.faster)
            return f"{mildest.in_words()}, twice"
    return ""
