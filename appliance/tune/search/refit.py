"""A predictor's few parameters, fitted again after each measurement: pure.

A predicted time is a sum of terms, and each term is off by a factor of its own: exp of the sum of the corrections that
it names. With theta the corrections, minimise over theta

    sum over observations  rho((ln t - ln sum_j ms_j exp(theta . x_j)) / s)  +  sum_k theta_k^2 / prior_k^2

ridge regression in log space (Hoerl & Kennard 1970) by Gauss-Newton, which is the mode of a Bayesian posterior with
normal priors; its covariance is the inverse of the last normal matrix (Bishop, PRML, section 4.4). rho is Student's t,
as iteratively reweighted squares, so that one hiccup of the machine does not bend everything.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

ROUNDS = 8
# Of Student's t: a residual of five deviations weighs a sixth of what one of none does.
T_FREEDOM = 5.0
STEP = 1.5  # no correction moves by more than this in one round
MISFIT = 0.03  # how far a plan is from any model of so few parameters, before anything was measured
BELIEF = 4.0  # the noise that is given, and MISFIT, count as so many observations of themselves
DEFAULT_PRIOR = 0.35


@dataclass(frozen=True, kw_only=True)
class Term:
    """A share of a time, as predicted, and the names of the corrections that it is multiplied by."""

    ms: float
    by: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Late:
    """A part of a job that has a limit: what it takes beyond counts `weight` times more."""

    terms: tuple[Term, ...]
    limit_ms: float
    weight: float


@dataclass(frozen=True, kw_only=True)
class Job:
    """What plans are compared by: a sum of terms, and what its parts are late."""

    terms: tuple[Term, ...]
    late: tuple[Late, ...] = ()

    def ms(self, summed: Callable[[tuple[Term, ...]], float]) -> float:
        """`summed` corrects terms and adds them up."""
        excess = (part.weight * max(0.0, summed(part.terms) - part.limit_ms) for part in self.late)
        return summed(self.terms) + sum(excess)


@dataclass(frozen=True, kw_only=True)
class Observation:
    """A time that was measured, its prediction, and the relative noise of measuring it."""

    terms: tuple[Term, ...]
    ms: float
    noise: float


@dataclass(frozen=True, kw_only=True)
class Fit:
    """`names` are in the order of `theta` and of the rows of `covariance`. `misfit` is the relative error that remains
    for a plan which was not measured, besides that of the corrections; `noise_factor` how many times larger residuals
    are than noise and MISFIT would have them."""

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
        """By how many percent the job becomes longer if all of its terms do by one: more than one where it is late."""
        by_name = self._by_name
        return sum(size for _, size in _sizes(job, by_name)) / _total(job, by_name)

    def std(self, job: Job, against: Job | None = None) -> float:
        """Standard deviation of ln(time), or of ln(time / that of `against`), from the corrections alone; what was
        never seen has its prior. A correction that scales both alike says nothing of which is faster."""
        return self._along(self._difference(job, against))[0]

    def reach(self, job: Job, against: Job) -> float:
        """The same for the luck that makes `job` the shorter: half of what two deviations of it are worth. A part
        can shrink to nothing and the rest remains, which the slope that `std` is made of does not know."""
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
        """d ln(time of one / time of the other) / d correction."""
        by_name = self._by_name
        shares = _shares(job, by_name)
        for name, share in (_shares(against, by_name) if against else {}).items():
            shares[name] = shares.get(name, 0.0) - share
        return shares

    def _along(self, shares: Mapping[str, float]) -> tuple[float, dict[str, float]]:
        """The deviation of sum(share * correction), and each correction's covariance with that sum."""
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
    """Of no observations: no corrections. Fitted twice, the second time with the noise that the first one shows."""
    first = _fit(observations, priors, 1.0)
    return _fit(observations, priors, first.noise_factor) if observations else first


def _fit(observations: Sequence[Observation], priors: Mapping[str, float], noise_factor: float) -> Fit:
    names = tuple(sorted({name for seen in observations for term in seen.terms for name in term.by}))
    theta = [0.0] * len(names)
    weights = [1.0] * len(observations)
    ridge = [1.0 / prior(priors, name) ** 2 for name in names]
    # With the noise alone, a plan measured twice would outvote all others about parameters that they share.
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
    # Few residuals say little of the noise: what was given counts as BELIEF of them.
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
    """Normal matrix, right side and residuals at theta."""
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
    """What each term adds to the job's time, as often as it counts."""
    sizes = [(term, _scaled(term, by_name)) for term in job.terms]
    for part in job.late:
        own = [(term, _scaled(term, by_name)) for term in part.terms]
        if sum(size for _, size in own) > part.limit_ms:
            sizes += [(term, part.weight * size) for term, size in own]
    return sizes


def _shares(job: Job, by_name: Mapping[str, float]) -> dict[str, float]:
    """d ln(time) / d correction: the share of the time that each correction scales."""
    shares: dict[str, float] = {}
    total = _total(job, by_name)
    for term, size in _sizes(job, by_name):
        for name in term.by:
            shares[name] = shares.get(name, 0.0) + size / total
    return shares


def _t_weight(z: float) -> float:
    return (T_FREEDOM + 1) / (T_FREEDOM + z * z)


def solve(matrix: Sequence[Sequence[float]], right: Sequence[float]) -> list[float]:
    """Of a symmetric positive definite matrix, which a ridge always is."""
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
