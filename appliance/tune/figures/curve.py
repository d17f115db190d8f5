"""Speed over depth, computed from a few measurements. Pure.

Decode time is interpolated linearly between measured depths. On a CPU it is not linear (14.5, 17.7, 25.6, 55.5, 94 ms
were seen at 0, 512, 1,024, 2,048, 4,096), so figures beyond the deepest measurement have an interval and say
"extrapolated". Prefill of N tokens takes p1 N + p2 N^2: each token needs its share of reading the weights, and attends
to every token before it. If weights are copied to a GPU for each batch, prefill takes c for each batch begun, and p1 N:
a prompt of 32 tokens waits for nearly as many bytes as one of 512.
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

LONGER = 3  # a long measurement decodes so many times the tokens of a short one, and has that weight
NOISE = 0.07  # relative noise of one time in a short measurement; 3 to 10 % is usual
SPREAD = 1.5  # factor by which a curve may continue steeper or flatter than its last stretch


@dataclass(frozen=True, kw_only=True)
class Point:
    """Speed with `depth` tokens in the cache, ms per token: decode at this depth and prefill up to it.

    `prefill_tokens` is the number of tokens read for this point; the tokens before them were cached. `noise_factor` is
    the noise of `decode_ms` relative to the usual one, above 1 if there was time for a few tokens only. `copied_batch`
    is the number of tokens for which host weights are copied to a GPU at once; 0 if none are copied.
    """

    depth: int
    decode_ms: float
    prefill_ms: float
    prefill_tokens: int
    noise_factor: float = 1.0
    copied_batch: int = 0

    @property
    def relative_error(self) -> float:
        """Relative error of `decode_ms`; 0 if it is not above the usual noise, which is not reported."""
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
    """Time per token in ms, with its interval if the figure is extrapolated."""

    ms: float
    low_ms: float
    high_ms: float
    is_extrapolated: bool = False

    def describe(self) -> str:
        """Return words such as "116.0 tok/s" or "42.1 tok/s (extrapolated: 30.2 to 55.0)"."""
        speed = f"{1000 / self.ms:.1f} tok/s"
        if not self.is_extrapolated:
            return speed
        return f"{speed} (extrapolated: {1000 / self.high_ms:.1f} to {1000 / self.low_ms:.1f})"


@dataclass(frozen=True, kw_only=True)
class Curve:
    """Speed over depth. It needs at least one point; depths must differ, in any order."""

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
        """Return the curve without points deeper than this; at least the shallowest point stays."""
        points = tuple(point for point in self.ordered if point.depth <= depth)
        return replace(self, points=points or self.ordered[:1])

    @cached_property
    def _slopes(self) -> tuple[float, ...]:
        """Slope of each stretch, ms per token of depth."""
        return tuple((b.decode_ms - a.decode_ms) / (b.depth - a.depth) for a, b in itertools.pairwise(self.ordered))

    @cached_property
    def _ahead(self) -> tuple[float, float, float]:
        """Slopes beyond the deepest point: likely, lowest, highest. Slopes are never negative: decode that got faster
        with depth was noise. With a single point the slope may be anything up to proportional to depth."""
        last = self.ordered[-1]
        if not self._slopes:
            return 0.0, 0.0, last.decode_ms / max(1, last.depth)
        likely = max(0.0, self._slopes[-1])
        from_first = (last.decode_ms - self.ordered[0].decode_ms) / (last.depth - self.ordered[0].depth)
        lowest = min(likely / SPREAD, max(0.0, from_first))
        # If the curve has begun to bend, it may bend further by as much; if not, it may begin to bend at once.
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
        """Return the seconds to decode `tokens` tokens from depth `first` on: the exact integral of the curve."""
        end = first + tokens
        corners = (first, *(p.depth for p in self.ordered if first < p.depth < end), end)
        areas = ((b - a) * (self.decode_ms(a) + self.decode_ms(b)) / 2 for a, b in itertools.pairwise(corners))
        return sum(areas) / 1000

    def relative_error(self, first: float, last: float) -> float:
        """Return the largest relative error of the points that decoding from depth `first` to `last` is computed from:
        those between and the next on either side; beyond the deepest point, all of them."""
        depths = [point.depth for point in self.ordered]
        begin = max(0, bisect_right(depths, first) - 1) if last <= self.deepest else 0
        return max(point.relative_error for point in self.ordered[begin : bisect_left(depths, last) + 1])

    def prefill_s(self, first: float, last: float) -> float:
        """Return the seconds to prefill the tokens from depth `first` to `last`, if those before are cached."""
        if batch := self._copied_batch:
            per_batch, per_token = self._copied
            return (per_batch * math.ceil((last - first) / batch) + per_token * (last - first)) / 1000
        per_token, per_square = self.prefill
        return (per_token * (last - first) + per_square * (last**2 - first**2)) / 1000

    @cached_property
    def prefill(self) -> tuple[float, float]:
        """p1 in ms per token and p2 in ms per token squared, by non-negative least squares over the stretches read.

        The weight is 1 / time, since a short prompt does not fill a batch and says little about full ones.
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
        """Time per batch and per token in ms if weights are copied; fitted like `prefill`."""
        batch = self._copied_batch
        return _fit_two(
            [
                (float(-(-p.prefill_tokens // batch)), float(p.prefill_tokens), p.prefill_tokens * p.prefill_ms)
                for p in self._read
            ]
        )

    @cached_property
    def _read(self) -> tuple[Point, ...]:
        """Points with prefilled tokens, by depth."""
        return tuple(p for p in self.ordered if p.prefill_tokens > 0 and p.prefill_ms > 0)

    def _between(self, depth: float) -> float:
        """Return the decode time at a depth within the measured range, ms. Below the first depth it is that of the
        first."""
        if depth <= self.ordered[0].depth:
            return self.ordered[0].decode_ms
        for (low, high), slope in zip(itertools.pairwise(self.ordered), self._slopes, strict=True):
            if depth <= high.depth:
                return low.decode_ms + (depth - low.depth) * slope
        return self.ordered[-1].decode_ms


def _fit_two(rows: Sequence[tuple[float, float, float]]) -> tuple[float, float]:
    """Return the non-negative a, b that minimise the sum of (a x + b y - t)^2 / t over rows (x, y, t)."""
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
