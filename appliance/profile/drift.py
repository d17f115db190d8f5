"""Drift: is the engine still as fast as its profile says? Probes compared with what was measured. Pure.

A probe repeats a measurement of the plan that serves, at one of its own depths. Two in a row that are slower by more
than TOLERANCE make the profile stale, two that are not make it valid: one may be chance, and a third would only tell
later. Either is final until the next start.
"""

from __future__ import annotations

from dataclasses import replace
from enum import StrEnum

from appliance.plan import Plan
from appliance.profile.record import Profile
from appliance.tune.figures.curve import Curve, Point
from appliance.tune.figures.measurement import curve_of
from appliance.values import dataclass

TOLERANCE = 0.15  # of a speed: what is within it may be chance, or the room's temperature
PROBES_MAX = 10  # a verdict needs two; more than this are of a machine that never is quiet
TOKENS = 48  # that a probe decodes: twice those of a short look, whose figures are off by 3 to 10 %
MIN_PREFILL_TOKENS = 256
# A probe that takes so many times what the profile says is slow, whatever its end would tell.
OVERDUE, OVERDUE_LEAST_S = 4.0, 10.0
# A draft reads along with each plain step, and what that alone takes was not measured. A draft that takes more than
# half a step is not worth serving: to draft one token right takes two of its steps, and saves one of the model's.
DRAFT_SHARE = 0.5


class DriftState(StrEnum):
    UNDECIDED = "open"
    VALID = "holds"
    STALE = "stale"


@dataclass(frozen=True, kw_only=True)
class Compared:
    """Speeds in tokens a second; `measured` is true to a factor of `slack`."""

    did: str  # "decoded" or "read"; "read and decoded" for a probe that was given up
    depth: int
    speed: float
    measured: float
    slack: float = 1.0

    @property
    def is_slow(self) -> bool:
        return self.speed * self.slack < (1 - TOLERANCE) * self.measured

    @property
    def is_good(self) -> bool:
        """As fast as measured. What is neither this nor slow tells nothing: it may be either."""
        return self.speed >= (1 - TOLERANCE) * self.measured

    @property
    def is_fast(self) -> bool:
        """Only of decoding: a prompt read at once may need fewer batches than one that was read piece by piece."""
        return self.did == "decoded" and self.speed > (1 + TOLERANCE) * self.measured * self.slack

    def describe(self) -> str:
        """As in "decoded 12.1 tok/s at 1,900 tokens, 16.0 measured: 24 % slower"."""
        change = self.speed / self.measured - 1
        words = f"{self.did} {self.speed:.1f} tok/s at {self.depth:,} tokens, {self.measured:.1f} measured"
        return f"{words}: {100 * abs(change):.0f} % {'slower' if change < 0 else 'faster'}"


@dataclass(frozen=True, kw_only=True)
class Baseline:
    """What was measured of the plan that serves. `prefill_ms` is that of each token from the beginning to this depth;
    None where they are too few to tell anything, or were not all read."""

    point: Point
    prefill_ms: float | None
    draft_slack: float = 1.0

    @property
    def expected_s(self) -> float:
        """What a probe takes, by the profile."""
        prefill_ms = self.prefill_ms if self.prefill_ms is not None else self.point.prefill_ms
        return (self.point.depth * prefill_ms + TOKENS * self.point.decode_ms) / 1000

    def limit_s(self, least_s: float = OVERDUE_LEAST_S) -> float:
        """After which a probe is given up."""
        return max(least_s, OVERDUE * self.draft_slack * self.expected_s)

    def overdue(self, seconds: float) -> tuple[Compared, ...]:
        """A probe that was given up after its limit: it was no faster than this."""
        tokens = self.point.depth + TOKENS
        slack = self.draft_slack * (1 + self.point.relative_error)
        speed, measured = tokens / seconds, tokens / self.expected_s
        return (Compared(did="read and decoded", depth=self.point.depth, speed=speed, measured=measured, slack=slack),)

    def compare(self, seen: Point) -> tuple[Compared, ...]:
        """`seen` has read all of its prompt."""
        return tuple(
            Compared(did=did, depth=self.point.depth, speed=1000 / ms, measured=1000 / measured_ms, slack=slack)
            for did, ms, measured_ms, slack in (
                ("decoded", seen.decode_ms, self.point.decode_ms, self.draft_slack * (1 + self.point.relative_error)),
                ("read", seen.prefill_ms, self.prefill_ms, self.draft_slack),
            )
            if measured_ms is not None
        )


@dataclass(frozen=True, kw_only=True)
class Drift:
    """All that was seen so far. `words` say why the state is what it is; `note` that it is faster than measured."""

    state: DriftState = DriftState.UNDECIDED
    words: str = ""
    note: str = ""
    last: tuple[Compared, ...] = ()  # of the last probe that nothing disturbed

    def observe(self, found: tuple[Compared, ...], disturbance: str | None = None) -> Drift:
        """`disturbance` says who else used the machine meanwhile; then the probe decides nothing."""
        if self.state is not DriftState.UNDECIDED or disturbance is not None:
            return self
        pairs = [(before, now) for before in self.last for now in found if before.did == now.did]
        slow = [max(pair, key=lambda one: one.speed) for pair in pairs if all(one.is_slow for one in pair)]
        fast = [min(pair, key=lambda one: one.speed) for pair in pairs if all(one.is_fast for one in pair)]
        now = replace(self, last=found, note=f"{fast[0].describe()}, twice" if fast else self.note)
        if slow:
            return replace(now, state=DriftState.STALE, words=f"{slow[0].describe()}, twice")
        if pairs and all(one.is_good for pair in pairs for one in pair):
            words = f"two probes were no slower than measured, within {100 * TOLERANCE:.0f} %"
            return replace(now, state=DriftState.VALID, words=words)
        return now


def baseline_of(profile: Profile, serving: Plan) -> Baseline | None:
    """Of the middle one of the depths: a deeper one takes longer to read, and at an empty one the cache counts little.
    None where the plan that serves was not measured, or at no depth that it has room for."""
    looks = [m for m in profile.measurements if m.key in serving.keys and m.points]
    if not looks:
        return None
    curve = curve_of(looks)
    points = [point for point in curve.ordered if point.depth + TOKENS < serving.context]
    if not points:
        return None
    point = points[len(points) // 2]
    has_draft = serving.speculation is not None and serving.speculation.kind in ("draft", "mtp")
    return Baseline(
        point=point,
        prefill_ms=_prefill_ms(curve, point.depth) if point.depth >= MIN_PREFILL_TOKENS else None,
        draft_slack=1 + DRAFT_SHARE if has_draft else 1.0,
    )


def _prefill_ms(curve: Curve, depth: int) -> float | None:
    """The mean over the pieces in which the prompt was read: at once it takes no more batches, and no longer."""
    by_depth = {point.depth: point for point in curve.points}
    whole_ms, left = 0.0, depth
    while left > 0 and (point := by_depth.get(left)) is not None and point.prefill_tokens > 0:
        whole_ms += point.prefill_tokens * point.prefill_ms
        left -= point.prefill_tokens
    return whole_ms / depth if whole_ms and not left else None
