"""Drift: compare probes of the serving engine with the speeds in its profile. Pure.

A probe repeats a measurement of the serving plan at one of the measured depths. Two probes in a row that are slower by
more than TOLERANCE make the profile stale; two in a row that are not slower make it valid. One probe may be chance, and
a third would only delay the verdict. The verdict is final until the next start.
"""

from __future__ import annotations

from dataclasses import replace
from enum import StrEnum

from appliance.plan import Plan
from appliance.profile.record import Profile
from appliance.tune.figures.curve import Curve, Point
from appliance.tune.figures.measurement import curve_of
from appliance.values import dataclass

TOLERANCE = 0.15  # relative; smaller differences may be chance or the room's temperature
PROBES_MAX = 10  # a verdict needs two; a machine that spoils more than this is never quiet
TOKENS = 48  # decoded by a probe; twice as many as in a short measurement, whose figures are off by 3 to 10 %
MIN_PREFILL_TOKENS = 256
# A probe that takes this many times as long as the profile predicts counts as slow without waiting for its end.
OVERDUE, OVERDUE_LEAST_S = 4.0, 10.0
# The draft model also runs at each plain step of a probe, and its own time was not measured. Half a step is the upper
# bound: a slower draft model is not worth serving, since one correct draft token costs two of its steps and saves one
# step of the model.
DRAFT_SHARE = 0.5


class DriftState(StrEnum):
    UNDECIDED = "open"
    VALID = "holds"
    STALE = "stale"


@dataclass(frozen=True, kw_only=True)
class Compared:
    """A probe's speed and the measured one, in tok/s; `measured` is accurate to a factor of `slack`."""

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
        """True if the probe is as fast as measured. A probe that is neither good nor slow decides nothing."""
        return self.speed >= (1 - TOLERANCE) * self.measured

    @property
    def is_fast(self) -> bool:
        """True if decoding is faster than measured. Always False for prefill: a prompt read at once may need fewer
        batches than one that was read in pieces."""
        return self.did == "decoded" and self.speed > (1 + TOLERANCE) * self.measured * self.slack

    def describe(self) -> str:
        """Describe the comparison, such as "decoded 12.1 tok/s at 1,900 tokens, 16.0 measured: 24 % slower"."""
        change = self.speed / self.measured - 1
        words = f"{self.did} {self.speed:.1f} tok/s at {self.depth:,} tokens, {self.measured:.1f} measured"
        return f"{words}: {100 * abs(change):.0f} % {'slower' if change < 0 else 'faster'}"


@dataclass(frozen=True, kw_only=True)
class Baseline:
    """Measured speeds of the serving plan at one depth.

    `prefill_ms` is the mean time per prompt token from 0 to this depth. None if the depth is too small to judge, or if
    not every piece of the prompt was measured.
    """

    point: Point
    prefill_ms: float | None
    draft_slack: float = 1.0

    @property
    def expected_s(self) -> float:
        """Predicted duration of a probe, from the profile."""
        prefill_ms = self.prefill_ms if self.prefill_ms is not None else self.point.prefill_ms
        return (self.point.depth * prefill_ms + TOKENS * self.point.decode_ms) / 1000

    def limit_s(self, least_s: float = OVERDUE_LEAST_S) -> float:
        """Return the time limit of a probe, in seconds."""
        return max(least_s, OVERDUE * self.draft_slack * self.expected_s)

    def overdue(self, seconds: float) -> tuple[Compared, ...]:
        """Compare a probe that was stopped at its limit after `seconds`: this speed is an upper bound."""
        tokens = self.point.depth + TOKENS
        slack = self.draft_slack * (1 + self.point.relative_error)
        speed, measured = tokens / seconds, tokens / self.expected_s
        return (Compared(did="read and decoded", depth=self.point.depth, speed=speed, measured=measured, slack=slack),)

    def compare(self, seen: Point) -> tuple[Compared, ...]:
        """Compare a finished probe with the profile. `seen` must have read its whole prompt."""
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
    """Verdict and the probes so far. `words` give the reason for the state; `note` reports an engine faster than
    measured."""

    state: DriftState = DriftState.UNDECIDED
    words: str = ""
    note: str = ""
    last: tuple[Compared, ...] = ()  # last undisturbed probe

    def observe(self, found: tuple[Compared, ...], disturbance: str | None = None) -> Drift:
        """Return the state after one more probe. If a `disturbance` is given, the probe decides nothing."""
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
    """Return the baseline at the middle measured depth: deeper takes longer to read, and at 0 the KV cache hardly
    counts.

    None if the serving plan was not measured, or only at depths that do not fit its context.
    """
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
    """Mean prefill time per token from 0 to `depth`, over the pieces in which the prompt was read; None if a piece is
    missing.

    Reading the prompt at once takes no more batches than reading it in pieces, and no longer.
    """
    by_depth = {point.depth: point for point in curve.points}
    whole_ms, left = 0.0, depth
    while left > 0 and (point := by_depth.get(left)) is not None and point.prefill_tokens > 0:
        whole_ms += point.prefill_tokens * point.prefill_ms
        left -= point.prefill_tokens
    return whole_ms / depth if whole_ms and not left else None
