"""Speed over depth from a few measurements: pure.

Decode time is linear between measured depths. On a CPU it is no line (14.5, 17.7, 25.6, 55.5, 94 ms at 0, 512, 1,024,
2,048, 4,096 were seen), so beyond the deepest measurement a figure carries its interval and says "extrapolated".
Prefill of N tokens takes p1 N + p2 N^2: every token reads the weights' share of its batch, and every token before it.
Where weights are copied to a GPU for each batch, it takes c for each batch that is begun, and p1 N: a prompt of 32
tokens waits for nearly as many bytes as one of 512.
"""

from __future__ import annotations

import itertools
import math
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property

from appliance.plan import SpeedAt
from appliance.values import dataclass

LONGER = 3  # a long look decodes so many times the tokens of a short one, and counts as often
NOISE = 0.07  # relative, of one time in a short look: 3 to 10 % is usual
SPREAD = 1.5  # how much steeper or flatter than its last stretch a curve may go on


@dataclass(frozen=True, kw_only=True)
class Point:
    """Speed with `depth` tokens in the cache: milliseconds a token, decode at this depth and prefill up to it.

    `prefill_tokens` were read for this point, the rest of `depth` was in the cache: from depth - prefill_tokens on.
    `noise_factor`: how many times the usual noise `decode_ms` has, where there was time for a few tokens only.
    `copied_batch`: tokens that host weights are copied to a GPU for at once; 0: none are copied.
    """

    depth: int
    decode_ms: float
    prefill_ms: float
    prefill_tokens: int
    noise_factor: float = 1.0
    copied_batch: int = 0

    @property
    def relative_error(self) -> float:
        """The share that `decode_ms` may be off by; 0 where that is no more than usual, which nobody is told of."""
        return NOISE * self.noise_factor if self.noise_factor > 1 else 0.0

    @property
    def speed(self) -> SpeedAt:
        return SpeedAt(
            depth=self.depth,
            decode_tokens_per_s=1000 / self.decode_ms,
            decode_uncertainty=self.relative_error,
            prefill_tokens=self.prefill_tokens,
            prefill_tokens_per_s=1000 / self.prefill_ms if self.prefill_tokens and self.prefill_ms else None,
        )


@dataclass(frozen=True, kw_only=True)
class Figure:
    """Milliseconds a token, with the interval that it lies in if the curve goes on as curves do."""

    ms: float
    low_ms: float
    high_ms: float
    is_extrapolated: bool = False

    def describe(self) -> str:
        """As in "116.0 tok/s", or "42.1 tok/s (extrapolated: 30.2 to 55.0)"."""
        speed = f"{1000 / self.ms:.1f} tok/s"
        if not self.is_extrapolated:
            return speed
        return f"{speed} (extrapolated: {1000 / self.high_ms:.1f} to {1000 / self.low_ms:.1f})"


@dataclass(frozen=True, kw_only=True)
class Curve:
    """At least one point, in any order, of different depths."""

    points: tuple[Point, ...]

    def __post_init__(self) -> None:
        depths = [point.depth for point in self.points]
        if not depths or len(set(depths)) < len(depths):
            message = f"a curve needs points of different depths, not {depths}"
            raise ValueError(message)

    @cached_property
    def ordered(self) -> tuple[Point, ...]:
        return tuple(sorted(self.points, key=lambda point: point.depth))

    @property
    def deepest(self) -> int:
        return self.ordered[-1].depth

    def up_to(self, depth: float) -> Curve:
        """As if nothing deeper had been measured; the shallowest point stays."""
        points = tuple(point for point in self.ordered if point.depth <= depth)
        return replace(self, points=points or self.ordered[:1])

    @cached_property
    def _slopes(self) -> tuple[float, ...]:
        """Milliseconds per token of depth, stretch by stretch."""
        return tuple((b.decode_ms - a.decode_ms) / (b.depth - a.depth) for a, b in itertools.pairwise(self.ordered))

    @cached_property
    def _ahead(self) -> tuple[float, float, float]:
        """Slopes beyond the deepest: likely, lowest, highest. Nothing becomes faster by being deeper; what was measured
        to do so was noise. One point alone says nothing of a slope: up to proportional to depth."""
        last = self.ordered[-1]
        if not self._slopes:
            return 0.0, 0.0, last.decode_ms / max(1, last.depth)
        likely = max(0.0, self._slopes[-1])
        from_first = (last.decode_ms - self.ordered[0].decode_ms) / (last.depth - self.ordered[0].depth)
        lowest = min(likely / SPREAD, max(0.0, from_first))
        # A knee that has begun goes on as it began; one that has not may begin at once.
        before = max(0.0, self._slopes[-2]) if len(self._slopes) > 1 else likely
        return likely, lowest, max(SPREAD * likely, 2 * likely - before)

    def decode(self, depth: float) -> Figure:
        if depth <= self.deepest:
            ms = self._between(depth)
            return Figure(ms=ms, low_ms=ms, high_ms=ms)
        beyond = depth - self.deepest
        likely, low, high = (self.ordered[-1].decode_ms + slope * beyond for slope in self._ahead)
        return Figure(ms=likely, low_ms=low, high_ms=high, is_extrapolated=True)

    def decode_ms(self, depth: float) -> float:
        return self.decode(depth).ms

    def decode_s(self, first: float, tokens: float) -> float:
        """Seconds to decode `tokens` tokens from depth `first` on: the integral of the curve, exactly."""
        end = first + tokens
        corners = (first, *(p.depth for p in self.ordered if first < p.depth < end), end)
        areas = ((b - a) * (self.decode_ms(a) + self.decode_ms(b)) / 2 for a, b in itertools.pairwise(corners))
        return sum(areas) / 1000

    def relative_error(self, first: float, last: float) -> float:
        """The most of the points that decoding from depth `first` to `last` is taken from: those between and the next
        on either side; all of them beyond the deepest, where the slope counts as well."""
        depths = [point.depth for point in self.ordered]
        begin = max(0, bisect_right(depths, first) - 1) if last <= self.deepest else 0
        return max(point.relative_error for point in self.ordered[begin : bisect_left(depths, last) + 1])

    def prefill_s(self, first: float, last: float) -> float:
        """Seconds to read the tokens from depth `first` to `last`, with those before in the cache."""
        if batch := self._copied_batch:
            per_batch, per_token = self._copied
            return (per_batch * math.ceil((last - first) / batch) + per_token * (last - first)) / 1000
        per_token, per_square = self.prefill
        return (per_token * (last - first) + per_square * (last**2 - first**2)) / 1000

    @cached_property
    def prefill(self) -> tuple[float, float]:
        """p1 in ms a token and p2 in ms a token squared: least squares over the stretches read, neither negative.

        Weighted by 1 / time: a prompt of a few tokens fills no batch, and says little of one that does.
        """
        rows = [
            (
                float(p.prefill_tokens),
                float(p.depth**2 - (p.depth - p.prefill_tokens) ** 2),
                p.prefill_tokens * p.prefill_ms,
            )
            for p in self._read
        ]
        return _fit_two(rows) if rows else (self.ordered[-1].prefill_ms, 0.0)

    @property
    def _copied_batch(self) -> int:
        return max(p.copied_batch for p in self._read) if self._read else 0

    @cached_property
    def _copied(self) -> tuple[float, float]:
        """Milliseconds a batch, and a token, where weights are copied: as `prefill`."""
        batch = self._copied_batch
        return _fit_two(
            [
                (float(-(-p.prefill_tokens // batch)), float(p.prefill_tokens), p.prefill_tokens * p.prefill_ms)
                for p in self._read
            ]
        )

    @cached_property
    def _read(self) -> tuple[Point, ...]:
        """Those that something was read for."""
        return tuple(p for p in self.ordered if p.prefill_tokens > 0 and p.prefill_ms > 0)

    def _between(self, depth: float) -> float:
        """The measured ends are as good as level: less than the first depth is as fast as the first."""
        if depth <= self.ordered[0].depth:
            return self.ordered[0].decode_ms
        for (low, high), slope in zip(itertools.pairwise(self.ordered), self._slopes, strict=True):
            if depth <= high.depth:
                return low.decode_ms + (depth - low.depth) * slope
        return self.ordered[-1].decode_ms


def _fit_two(rows: Sequence[tuple[float, float, float]]) -> tuple[float, float]:
    """Non-negative a, b that minimise the sum of (a x + b y - t)^2 / t over rows (x, y, t)."""
    xx, xy, yy, xt, yt = (
        sum(row)
        for row in zip(*((x * x / t, x * y / t, y * y / t, x, y) for x, y, t in rows), strict=True)
    )  # fmt: skip
    determinant = xx * yy - xy * xy
    if len(rows) > 1 and determinant > 1e-9 * xx * yy:
        a, b = (xt * yy - yt * xy) / determinant, (yt * xx - xt * xy) / determinant
        if a >= 0 and b >= 0:
            return a, b
        if a < 0:
            return 0.0, yt / yy
    return xt / xx, 0.0
