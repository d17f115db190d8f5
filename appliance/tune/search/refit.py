"""Fit of the predictor's few parameters after each measurement. Pure.

A predicted time is a sum of terms. Each term is wrong by a factor of its own: exp of the sum of the corrections that it
names. With theta the corrections, minimise over theta

    sum over observations  rho((ln t - ln sum_j ms_j exp(theta . x_j)) / s)  +  sum_k theta_k^2 / prior_k^2

This is ridge regression in log space (Hoerl & Kennard 1970) by Gauss-Newton. The result is the mode of a Bayesian
posterior with normal priors; its covariance is the inverse of the last normal matrix (Bishop, PRML, section 4.4). rho
is Student's t, computed by iteratively reweighted least squares, so that a single outlier has little influence.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

ROUNDS = 8
# Degrees of freedom of Student's t: a residual of five deviations has a sixth of the weight of a zero residual.
T_FREEDOM = 5.0
STEP = 1.5  # maximum change of a correction in one round
MISFIT = 0.03  # relative error that a model of so few parameters has for any plan, before anything was measured
BELIEF = 4.0  # the given noise and MISFIT count as much as so many observations
DEFAULT_PRIOR = 0.35


@dataclass(frozen=True, kw_only=True)
class Term:
    """Predicted part of a time, and the names of the corrections that scale it."""

    ms: float
    by: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Late:
    """Part of a job with a time limit; time beyond the limit counts `weight` times in addition."""

    terms: tuple[Term, ...]
    limit_ms: float
    weight: float


@dataclass(frozen=True, kw_only=True)
class Job:
    """Job by which plans are compared: a sum of terms, and penalties for late parts."""

    terms: tuple[Term, ...]
    late: tuple[Late, ...] = ()

    def ms(self, summed: Callable[[tuple[Term, ...]], float]) -> float:
        """Return the time of the job including penalties. `summed` corrects terms and adds them up."""
        excess = (part.weight * max(0.0, summed(part.terms) - part.limit_ms) for part in self.late)
        return summed(self.terms) + sum(excess)


@dataclass(frozen=True, kw_only=True)
class Observation:
    """Measured time, its predicted terms, and the relative noise of the measurement."""

    terms: tuple[Term, ...]
    ms: float
    noise: float


@dataclass(frozen=True, kw_only=True)
class Fit:
    """Fitted corrections. `names` are in the order of `theta` and of the rows of `covariance`.

    `misfit` is the relative error that remains for an unmeasured plan in addition to that of the corrections.
    `noise_factor` is the ratio of the residuals to those expected from noise and MISFIT.
    """

    names: tuple[str, ...]
    theta: tuple[float, ...]
    covariance: tuple[tuple[float, ...], ...]
    noise_factor: float
    priors: Mapping[str, float]

    @property
    def misfit(self) -> float:
        return MISFIT * self.noise_factor

    def predict_ms(self, terms: Iterable[Term]) -> float:
        index = {name: at for at, name in enumerate(self.names)}
        return sum(term.ms * math.exp(sum(self.theta[index[n]] for n in term.by if n in index)) for term in terms)

    def job_ms(self, job: Job) -> float:
        return job.ms(self.predict_ms)

    def leverage(self, job: Job) -> float:
        """Return by how many percent the job gets longer if all its terms get longer by one percent; above 1 if parts
        of it are late."""
        by_name = self._by_name
        return sum(size for _, size in _sizes(job, by_name)) / _total(job, by_name)

    def std(self, job: Job, against: Job | None = None) -> float:
        """Return the standard deviation of ln(time), or of ln(time / time of `against`), from the corrections alone.

        Corrections that were never observed have their prior. A correction that scales both jobs equally cancels out.
        """
        return self._along(self._difference(job, against))[0]

    def reach(self, job: Job, against: Job) -> float:
        """Return a deviation like `std`, but only for corrections in favour of `job`: half the gain at two deviations.

        `std` is linear and overestimates this: a part can only shrink to nothing while the rest of the job remains.
        """
        std, slopes = self._along(self._difference(job, against))
        if not std:
            return 0.0
        now = self._by_name
        lucky = {name: now.get(name, 0.0) - 2 * slope / std for name, slope in slopes.items()}
        before = math.log(_total(job, now) / _total(against, now))
        return max(0.0, (before - math.log(_total(job, lucky) / _total(against, lucky))) / 2)

    @property
    def _by_name(self) -> dict[str, float]:
        return dict(zip(self.names, self.theta, strict=True))

    def _difference(self, job: Job, against: Job | None) -> dict[str, float]:
        """Return d ln(time of `job` / time of `against`) / d correction."""
        by_name = self._by_name
        shares = _shares(job, by_name)
        for name, share in (_shares(against, by_name) if against else {}).items():
            shares[name] = shares.get(name, 0.0) - share
        return shares

    def _along(self, shares: Mapping[str, float]) -> tuple[float, dict[str, float]]:
        """Return the standard deviation of sum(share * correction), and each correction's covariance with that sum."""
        index = {name: at for at, name in enumerate(self.names)}
        known = [(index[name], share) for name, share in shares.items() if name in index]
        slopes = {
            name: sum(self.covariance[index[name]][at] * each for at, each in known)
            if name in index
            else share * prior(self.priors, name) ** 2
            for name, share in shares.items()
        }
        return math.sqrt(max(0.0, sum(share * slopes[name] for name, share in shares.items()))), slopes


def fit(observations: Sequence[Observation], priors: Mapping[str, float]) -> Fit:
    """Fit corrections to observations; without observations there are none. It fits twice, the second time with the
    noise that the first fit shows."""
    first = _fit(observations, priors, 1.0)
    return _fit(observations, priors, first.noise_factor) if observations else first


def _fit(observations: Sequence[Observation], priors: Mapping[str, float], noise_factor: float) -> Fit:
    names = tuple(sorted({name for seen in observations for term in seen.terms for name in term.by}))
    theta = [0.0] * len(names)
    weights = [1.0] * len(observations)
    ridge = [1.0 / prior(priors, name) ** 2 for name in names]
    # MISFIT is included, since otherwise a plan measured twice would dominate the parameters that all plans share.
    sds = [noise_factor * math.hypot(seen.noise, MISFIT) for seen in observations]
    normal = [[ridge[i] if i == j else 0.0 for j in range(len(names))] for i in range(len(names))]
    residuals: list[float] = []
    for _ in range(ROUNDS if observations else 0):
        normal, slope, residuals = _normal(observations, names, theta, weights, sds, ridge)
        # A full step may overshoot where exp() is steep: a correction of 10 would be a factor of 22,000.
        moved = solve(normal, slope)
        theta = [old + max(-STEP, min(STEP, new)) for old, new in zip(theta, moved, strict=True)]
        weights = [_t_weight(r / sd) for r, sd in zip(residuals, sds, strict=True)]
        if max(map(abs, moved), default=0.0) < 1e-3:
            break
    # At the mode the inverse of the normal matrix is the posterior's covariance (Laplace).
    covariance = inverse(normal)
    explained = sum(1 - r * covariance[i][i] for i, r in enumerate(ridge))  # effective parameters (PRML 3.91)
    excess = sum(w * (r / sd) ** 2 for r, sd, w in zip(residuals, sds, weights, strict=True))
    # A few residuals say little about the noise, so the given noise counts as much as BELIEF of them.
    believed = (BELIEF + excess) / (BELIEF + max(0.0, len(residuals) - explained))
    return Fit(
        names=names,
        theta=tuple(theta),
        covariance=tuple(map(tuple, covariance)),
        noise_factor=noise_factor * math.sqrt(believed),
        priors=priors,
    )


def prior(priors: Mapping[str, float], name: str) -> float:
    return priors.get(name, DEFAULT_PRIOR)


def _normal(
    observations: Sequence[Observation],
    names: tuple[str, ...],
    theta: list[float],
    weights: list[float],
    sds: list[float],
    ridge: list[float],
) -> tuple[list[list[float]], list[float], list[float]]:
    """Return normal matrix, right-hand side and residuals at theta."""
    index = {name: at for at, name in enumerate(names)}
    by_name = dict(zip(names, theta, strict=True))
    normal = [[ridge[i] if i == j else 0.0 for j in range(len(names))] for i in range(len(names))]
    slope = [-r * value for r, value in zip(ridge, theta, strict=True)]
    residuals = []
    for seen, weight, sd in zip(observations, weights, sds, strict=True):
        job = Job(terms=seen.terms)
        residual = math.log(seen.ms) - math.log(_total(job, by_name))
        residuals.append(residual)
        row = [(index[name], share) for name, share in _shares(job, by_name).items()]
        precision = weight / sd**2
        for i, a in row:
            slope[i] += precision * a * residual
            for j, b in row:
                normal[i][j] += precision * a * b
    return normal, slope, residuals


def _scaled(term: Term, by_name: Mapping[str, float]) -> float:
    return term.ms * math.exp(sum(by_name.get(name, 0.0) for name in term.by))


def _total(job: Job, by_name: Mapping[str, float]) -> float:
    return job.ms(lambda terms: sum(_scaled(term, by_name) for term in terms))


def _sizes(job: Job, by_name: Mapping[str, float]) -> list[tuple[Term, float]]:
    """Return each term with its corrected time, and late terms once more with their penalty."""
    sizes = [(term, _scaled(term, by_name)) for term in job.terms]
    for part in job.late:
        own = [(term, _scaled(term, by_name)) for term in part.terms]
        if sum(size for _, size in own) > part.limit_ms:
            sizes += [(term, part.weight * size) for term, size in own]
    return sizes


def _shares(job: Job, by_name: Mapping[str, float]) -> dict[str, float]:
    """Return d ln(time) / d correction, which is the share of the time that each correction scales."""
    shares: dict[str, float] = {}
    total = _total(job, by_name)
    for term, size in _sizes(job, by_name):
        for name in term.by:
            shares[name] = shares.get(name, 0.0) + size / total
    return shares


def _t_weight(z: float) -> float:
    return (T_FREEDOM + 1) / (T_FREEDOM + z * z)


def solve(matrix: Sequence[Sequence[float]], right: Sequence[float]) -> list[float]:
    """Solve matrix x = right. The matrix must be symmetric and positive definite, as a ridge regression's always is."""
    lower = cholesky(matrix)
    size = len(lower)
    half = [0.0] * size
    for i in range(size):
        half[i] = (right[i] - sum(lower[i][k] * half[k] for k in range(i))) / lower[i][i]
    out = [0.0] * size
    for i in reversed(range(size)):
        out[i] = (half[i] - sum(lower[k][i] * out[k] for k in range(i + 1, size))) / lower[i][i]
    return out


def inverse(matrix: Sequence[Sequence[float]]) -> list[list[float]]:
    size = len(matrix)
    return [solve(matrix, [float(i == j) for i in range(size)]) for j in range(size)]


def cholesky(matrix: Sequence[Sequence[float]]) -> list[list[float]]:
    size = len(matrix)
    lower = [[0.0] * size for _ in range(size)]
    for i in range(size):
        for j in range(i + 1):
            left = matrix[i][j] - sum(lower[i][k] * lower[j][k] for k in range(j))
            lower[i][j] = math.sqrt(left) if i == j else left / lower[j][j]
    return lower
