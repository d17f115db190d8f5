"""Fits a machine's rates to measured times of layers, robustly and with intervals.

Rows are measured inside the engine while CPU and PCIe work together; a microbenchmark of either alone misleads
(facts/tuning.md section 0, 6). T is a maximum of lines, so a row informs only about the side that finished last.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from appliance.moe.cost import Rates

_NAMES = ("cpu_gb_s", "pcie_gb_s", "dram_gb_s", "cpu_fixed_ms", "gpu_expert_ms")
_ROUNDS = 40
_STEP = 1e-4
_FAR = math.log(10)
# Threshold in mean errors. Half of the 95 % quantile of χ² is 1.9; it is larger here, since the fit also chooses which
# side finished last in a row.
_LIKELY = 3.0
_SMALLEST_ERROR = 1e-3  # smaller relative differences of a time are ignored
_HALVINGS = 12
_TRIED = (0.5, 0.7, 0.85, 0.95, 1.05, 1.15, 1.3, 1.6, 2.5)
_TOLERANCE = 1e-9
_SMALLEST_MS = 1e-4
_HUBER = 1.5  # beyond so many median deviations a row's weight falls with its distance


@dataclass(frozen=True, kw_only=True)
class Measured:
    """One layer and token: numbers of experts on the CPU, fetched, already on the GPU, uploaded for later, and the
    time."""

    on_cpu: int
    fetched: int
    hits: int
    uploads: int
    ms: float


@dataclass(frozen=True, kw_only=True)
class Calibration:
    """Fitted rates. `intervals` maps each rate's name to all values that fit the rows nearly as well; (0, inf) if no
    row depends on that rate."""

    rates: Rates
    intervals: dict[str, tuple[float, float]]
    error: float  # median of |predicted − measured| / measured


def calibrate(rows: Sequence[Measured], *, expert_mb: float, other_ms: float) -> Calibration:
    """Fit C, P, D, t0 and g. The layer's other time is measured separately, without experts.

    Least squares of relative errors with Huber weights (Levenberg-Marquardt on logarithms, from several starts): a few
    stalled rows do not matter. The intervals are by likelihood: resampling would lose the few rows in which a rarely
    last side finished last, and miss its rate. Deterministic. Raises ValueError for fewer rows than rates, or for times
    that are not positive.
    """
    if len(rows) < len(_NAMES) or any(not 0 < row.ms < math.inf for row in rows):
        message = f"{len(rows)} rows with positive times are too few to fit {len(_NAMES)} rates from"
        raise ValueError(message)
    fit = _Fit(rows, expert_mb, other_ms)
    solutions = [fit.solved(start) for start in fit.starts()]
    best = min(solutions, key=fit.loss)
    enough = fit.loss_likely(best)
    # in another solution another side may have finished last
    likely = [each for each in solutions if fit.loss(each) <= enough]
    intervals = {}
    for at, name in enumerate(_NAMES):
        ends = [fit.likely(each, at, enough) for each in likely]
        intervals[name] = min(low for low, _ in ends), max(high for _, high in ends)
    errors = [abs(math.expm1(fit.residual(best, row))) for row in rows]
    return Calibration(rates=fit.rates(best), intervals=intervals, error=statistics.median(errors))


class _Fit:
    def __init__(self, rows: Sequence[Measured], expert_mb: float, other_ms: float) -> None:
        self._rows = rows
        self._size = expert_mb
        self._other = other_ms

    def rates(self, logs: Sequence[float]) -> Rates:
        return Rates(**dict(zip(_NAMES, map(math.exp, logs), strict=True)), other_ms=self._other)

    def starts(self) -> list[list[float]]:
        """Return starting points: for each side the rate that its rows require at least; a guess if there are none."""
        size = self._size
        cpu = [row.on_cpu * size / row.ms for row in self._rows if row.on_cpu and not row.fetched + row.uploads]
        link = [row.fetched * size / row.ms for row in self._rows if row.fetched]
        cpu_gb_s = max(cpu, default=40.0)
        pcie_gb_s = max(link, default=20.0)
        found = []
        for share in (0.6, 0.8, 1.0, 5.0):  # the last one: DRAM that never limits
            for fixed_ms in (0.01, 0.05):
                dram = share * (cpu_gb_s + pcie_gb_s) * 1.2
                found.append([math.log(each) for each in (cpu_gb_s * 1.1, pcie_gb_s * 1.05, dram, fixed_ms, 0.01)])
        return found

    def residual(self, logs: Sequence[float], row: Measured) -> float:
        """Return the residual in logarithms. The formula is `Cost.layer_ms` (a test compares the two), written out here
        to avoid an object for each try."""
        cpu, pcie, dram, fixed, expert = map(math.exp, logs)
        size, fetched = self._size, row.fetched
        moved, read = (fetched + row.uploads) * size, (row.on_cpu + fetched + row.uploads) * size
        ms = max(
            fixed + row.on_cpu * size / cpu if row.on_cpu else 0.0,
            fetched * size / pcie + expert if fetched else 0.0,
            expert * (row.hits + fetched),
            read / dram - self._other,
            moved / pcie - self._other,
            _SMALLEST_MS,
        )
        return math.log(ms / row.ms)

    def loss(self, logs: Sequence[float]) -> float:
        """Return the sum of absolute residuals: one stalled row cannot outweigh the others."""
        return sum(abs(self.residual(logs, row)) for row in self._rows)

    def loss_likely(self, logs: Sequence[float]) -> float:
        """Return the loss up to which a fit is nearly as likely as the best one, `logs`."""
        loss = self.loss(logs)
        return loss + _LIKELY * max(loss / len(self._rows), _SMALLEST_ERROR)

    def likely(self, logs: Sequence[float], at: int, enough: float) -> tuple[float, float]:
        """Return the range in which one rate alone can vary around a fit with a loss of at most `enough`; 0 or infinity
        if there is no end."""
        down, up = (self._reach(logs, at, sign, enough) for sign in (-1, 1))
        best = math.exp(logs[at])
        return best * math.exp(-down), best * math.exp(up)

    def _reach(self, logs: Sequence[float], at: int, sign: int, enough: float) -> float:
        """Return how far the logarithm of one rate can move with a loss of at most `enough`; infinity beyond a factor
        of ten."""

        def fits(distance: float) -> bool:
            return self.loss([value + sign * distance * (n == at) for n, value in enumerate(logs)]) <= enough

        if fits(_FAR):
            return math.inf
        near, far = 0.0, _FAR
        for _ in range(_HALVINGS):
            middle = (near + far) / 2
            near, far = (middle, far) if fits(middle) else (near, middle)
        return far

    def solved(self, start: Sequence[float]) -> list[float]:
        """Return the fit from one start: least squares; then each rate is tried far and near by itself, since a side
        that never finishes last has no slope; then least squares again."""
        logs = self._tried(self._descended(start, _ROUNDS))
        return self._descended(logs, _ROUNDS // 2)

    def _tried(self, logs: list[float]) -> list[float]:
        loss = self.loss(logs)
        for at in range(len(logs)):
            for factor in _TRIED:
                tried = [value + math.log(factor) * (number == at) for number, value in enumerate(logs)]
                if (tried_loss := self.loss(tried)) < loss - _TOLERANCE:
                    logs, loss = tried, tried_loss
        return logs

    def _descended(self, start: Sequence[float], rounds: int) -> list[float]:
        logs, damping, loss = list(start), 1e-2, self.loss(start)
        for _ in range(rounds):
            step = self._step(logs, damping)
            tried = [value + max(-0.5, min(0.5, change)) for value, change in zip(logs, step, strict=True)]
            tried_loss = self.loss(tried)
            if tried_loss < loss - _TOLERANCE:
                logs, loss, damping = tried, tried_loss, max(1e-9, damping / 5)
            else:
                damping *= 6
                if damping > 1e6:
                    break
        return logs

    def _step(self, logs: Sequence[float], damping: float) -> list[float]:
        """Solve (JᵀWJ + damping·I) x = −JᵀW r."""
        size = len(logs)
        residuals = [self.residual(logs, row) for row in self._rows]
        scale = _HUBER * max(1e-6, statistics.median(map(abs, residuals)))
        normal = [[0.0] * size for _ in range(size)]
        right = [0.0] * size
        moved = [[value + _STEP * (number == at) for number, value in enumerate(logs)] for at in range(size)]
        for row, residual in zip(self._rows, residuals, strict=True):
            weight = min(1.0, scale / max(abs(residual), 1e-12))
            slopes = [(self.residual(each, row) - residual) / _STEP for each in moved]
            for i in range(size):
                right[i] -= weight * slopes[i] * residual
                for j in range(size):
                    normal[i][j] += weight * slopes[i] * slopes[j]
        for i in range(size):
            normal[i][i] += damping * max(normal[i][i], 1e-6)
        return _solve(normal, right)


def _solve(matrix: list[list[float]], right: list[float]) -> list[float]:
    """Solve by Gaussian elimination with pivots; the damping makes the matrix positive definite."""
    size = len(right)
    rows = [[*row, value] for row, value in zip(matrix, right, strict=True)]
    for at in range(size):
        pivot = max(range(at, size), key=lambda number: abs(rows[number][at]))
        rows[at], rows[pivot] = rows[pivot], rows[at]
        for below in range(at + 1, size):
            factor = rows[below][at] / rows[at][at]
            for column in range(at, size + 1):
                rows[below][column] -= factor * rows[at][column]
    found = [0.0] * size
    for at in reversed(range(size)):
        known = sum(rows[at][column] * found[column] for column in range(at + 1, size))
        found[at] = (rows[at][size] - known) / rows[at][at]
    return found
