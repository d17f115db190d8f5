"""Choice of the next candidate to measure, and of the best so far, as pure functions of the measurements.

Every candidate has a prediction. The predictor's corrections are fitted to the measurements (refit.py). The next
measurement is the one with the highest worth per second. Worth is the knowledge gradient (Frazier, Powell, Dayanik
2009, "The knowledge-gradient policy for correlated normal beliefs"): the expected improvement of the best through this
measurement. Candidates that were measured once and are still promising are measured again, longer.

Every measurement starts an engine, so its price includes the load and what the start has to compile. Between otherwise
equal candidates, one for which everything is compiled already comes first.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from appliance.plan import KnobEffect
from appliance.tune.figures.curve import LONGER, NOISE, Curve, Point
from appliance.tune.figures.load_times import Start, Starts
from appliance.tune.figures.modes import NOISE as AS_FAST
from appliance.tune.figures.workload import Mix, cost_s
from appliance.tune.search.cost_terms import Candidate, Effects, decode_terms, mean_job, prefill_terms
from appliance.tune.search.refit import Fit, Job, Observation, Term, fit

OUT_OF_BUDGET = "budget"  # why a search stopped: time or loads are used up, or too little is left
POOL = 160  # out of thousands, so many candidates with the best prediction are evaluated
NEED_STD = 0.02  # relative error of a predicted need
WORTH_ANOTHER = 0.0005  # minimum worth of a measurement, as a share of a job's time
WORTH_A_SECOND = 0.0001  # additional minimum per second that it takes: a load of 100 s has to promise 1 %
AS_CHEAP = 1.3  # a long measurement is made at once if it costs at most so many times a short one, load included
PRICE = 0.5  # worth is divided by seconds to this power: with 1 no load would ever pay, with 0 its time would not count
SHORTEST_S = 0.1  # lower bound of a measurement's time
LIKELY_FIT = 0.9
SMALLER_BUFFER = 0.5  # chance to fit if the candidate needs more than a failed one but has a smaller batch
WORTH_A_TRY = 0.02  # candidates with a lower chance to fit are not tried


@dataclass(frozen=True, kw_only=True)
class OutOfMemory:
    """Lack of memory on one device. `missing_mib` is from the engine's log; None if the log does not say."""

    device: str
    missing_mib: float | None


@dataclass(frozen=True, kw_only=True)
class Trial:
    """Result of measuring one candidate. Without points it failed: for lack of memory if `lacking` is set, else for
    another reason."""

    key: str
    points: tuple[Point, ...] = ()
    is_long: bool = False
    load_s: float = 0.0
    lacking: OutOfMemory | None = None


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """Estimated time of a candidate. `ms` is for the mean job, `std` the standard deviation of its logarithm."""

    candidate: Candidate
    ms: float
    std: float
    is_measured: bool


@dataclass(frozen=True, kw_only=True)
class Ask:
    """Next measurement to make."""

    candidate: Candidate
    is_long: bool
    seconds: float  # predicted, including the load


@dataclass(frozen=True, kw_only=True)
class Stop:
    why: str


@dataclass(frozen=True, kw_only=True)
class Effort:
    """Depths and tokens of a measurement, from which its time is predicted."""

    depths: tuple[int, ...] = (32, 512)
    tokens_each: int = 24


def noise_of(*, is_long: bool) -> float:
    """Return the relative noise of one measured time, before residuals are known."""
    return NOISE / math.sqrt(LONGER) if is_long else NOISE


class Search:
    """Search over at least one candidate. It has no state: the same trials give the same answer, so an interrupted
    tuning can be resumed from kept trials."""

    def __init__(
        self,
        candidates: Sequence[Candidate],
        mix: Mix,
        effort: Effort | None = None,
        *,
        knob_effects: Mapping[str, KnobEffect],
    ) -> None:
        self.candidates = tuple(candidates)
        self.mix = mix
        self.effort = effort or Effort()
        self.optional = frozenset(name for name, effect in knob_effects.items() if effect.absent is not None)
        self._by_key = {candidate.key: candidate for candidate in self.candidates}
        # Steps of knobs are counted from the anchor, which has no corrections for them. The candidate with the best
        # prediction will probably be measured first, so the first trials fit rates instead of steps.
        anchor = min(self.candidates, key=lambda c: mean_job(c, Effects([c], c, {}), mix).ms(_predicted_ms))
        self._effects = Effects(self.candidates, anchor, knob_effects)
        self.priors = self._effects.priors
        self._jobs = {c.key: mean_job(c, self._effects, mix) for c in self.candidates}
        self._twins = {c.key: hash(self._jobs[c.key]) for c in self.candidates}

    def ask(self, trials: Sequence[Trial], *, left_s: float) -> Ask | Stop:
        """Return the next measurement, or why there is none: time is up, or none is worth its time."""
        state = State(self, trials)
        # One trial has to succeed even if no time is left: without it there is nothing to choose from.
        possible = [ask for ask in state.asks() if ask[1].seconds <= left_s or state.leader is None]
        if not possible:
            return Stop(why=OUT_OF_BUDGET if state.asks() else "everything that may fit was measured")
        worthy = [pair for pair in possible if pair[0] >= WORTH_ANOTHER + WORTH_A_SECOND * pair[1].seconds]
        if not worthy:
            return Stop(why="no measurement promises more than it costs: the noise is larger")
        return max(worthy, key=lambda pair: pair[0] / max(pair[1].seconds, SHORTEST_S) ** PRICE)[1]

    def rank(self, trials: Sequence[Trial]) -> list[Estimate]:
        """Return estimates, the best first: of the measured candidates, or of the predicted ones if none was
        measured."""
        state = State(self, trials)
        return state.measured or state.predicted[:POOL]

    def best(self, trials: Sequence[Trial], context: int) -> Candidate | None:
        """Return the untried candidate with this context that has the best prediction and is likely to fit, or None.
        Unlike `State.predicted`, this includes candidates with the same prediction as a measured one."""
        state = State(self, trials)
        tried = {trial.key for trial in trials}
        likely = (c for c in self.candidates if c.context == context and c.key not in tried and state.is_likely(c))
        return min(likely, key=lambda c: (state.fit.job_ms(self.job(c.key)), state.compile_s(c)), default=None)

    def observations(self, trials: Sequence[Trial]) -> list[Observation]:
        return [seen for trial in trials if trial.points for seen in self._of_trial(trial)]

    def _of_trial(self, trial: Trial) -> list[Observation]:
        candidate, noise = self._by_key[trial.key], noise_of(is_long=trial.is_long)
        seen = []
        for p in trial.points:
            terms = decode_terms(candidate, self._effects, p.depth)
            seen.append(Observation(terms=terms, ms=p.decode_ms, noise=noise * p.noise_factor))
            # The prediction holds for full batches only, which a few tokens do not fill.
            if p.prefill_tokens >= 128:
                terms = prefill_terms(candidate, self._effects, p.depth - p.prefill_tokens, p.depth)
                seen.append(Observation(terms=terms, ms=p.prefill_ms * p.prefill_tokens, noise=noise))
        return [observation for observation in seen if observation.terms]

    def job(self, key: str) -> Job:
        return self._jobs[key]

    def twins(self, key: str) -> int:
        """Return a value that is equal for candidates with identical predictions, such as numbers of threads if nothing
        runs on the CPU. The first of them that fits, in the caller's order, stands for all."""
        return self._twins[key]

    def start_of(self, trial: Trial) -> Start:
        compilation = self._by_key[trial.key].compilation
        return Start(compilation=compilation, load_s=trial.load_s, served=bool(trial.points))

    def candidate(self, key: str) -> Candidate:
        return self._by_key[key]

    def seconds(self, candidate: Candidate, fitted: Fit, *, is_long: bool) -> float:
        """Return the predicted seconds of measuring a candidate, without the load: warming up with a text as long as
        the first depth, prefilling the text once, and decoding at each depth."""
        effort = self.effort
        tokens = effort.tokens_each * (LONGER if is_long else 1)
        depths = sorted(effort.depths)
        stretches = ((0, depths[0]), *itertools.pairwise((0, *depths)))
        decode = sum(fitted.predict_ms(decode_terms(candidate, self._effects, depth)) for depth in effort.depths)
        read = sum(fitted.predict_ms(prefill_terms(candidate, self._effects, *stretch)) for stretch in stretches)
        return (read + tokens * decode) / 1000


class State:
    """Everything that follows from a set of trials."""

    def __init__(self, search: Search, trials: Sequence[Trial]) -> None:
        self._search = search
        self._trials = trials
        self.fit = fit(search.observations(trials), search.priors)
        self._limits = _limits(search, trials)
        self._held = _held(search, trials)
        self._failed = {trial.key for trial in trials if not trial.points}
        self._deadly = _deadly(search, trials)
        self._starts = Starts(search.start_of(trial) for trial in trials)

    @cached_property
    def predicted(self) -> list[Estimate]:
        """Estimates of unmeasured candidates that may fit, the best first. `std` is left at 0, since it is read only
        for measured ones."""
        done = {self._search.twins(trial.key) for trial in self._trials if trial.points}
        factors: dict[tuple[str, ...], float] = {}

        def corrected(terms: tuple[Term, ...]) -> float:
            """Return the corrected sum of terms. Factors are cached, since exp() would take most of the time of a
            choice."""
            for term in terms:
                if term.by not in factors:
                    factors[term.by] = self.fit.predict_ms((Term(ms=1.0, by=term.by),))
            return sum(term.ms * factors[term.by] for term in terms)

        found = []
        for candidate in sorted(self._search.candidates, key=self.compile_s):
            # Thousands of candidates share a few dozen predictions, so each prediction is made once.
            twins = self._search.twins(candidate.key)
            if twins in done or self.chance(candidate) < WORTH_A_TRY:
                continue
            done.add(twins)
            ms = self._search.job(candidate.key).ms(corrected)
            found.append(Estimate(candidate=candidate, ms=ms, std=0.0, is_measured=False))
        return sorted(found, key=lambda estimate: estimate.ms)

    @cached_property
    def measured(self) -> list[Estimate]:
        """Estimates of measured candidates, the best first: the mean of measurement and model, weighted by their
        precision."""
        found = []
        for key in dict.fromkeys(trial.key for trial in self._trials if trial.points):
            trials = [trial for trial in self._trials if trial.key == key and trial.points]
            seen, variance = self._seen(trials)
            job = self._search.job(key)
            model, leverage = math.log(self.fit.job_ms(job)), self.fit.leverage(job)
            # The mean of two normal beliefs, weighted by precision: what was measured, and what the model says of it.
            trust = self.fit.misfit**2 / (self.fit.misfit**2 + variance)
            std = leverage * self.fit.misfit * math.sqrt(1 - trust)
            ms = math.exp(model + trust * (seen - model))
            candidate = self._search.candidate(key)
            found.append(Estimate(candidate=candidate, ms=ms, std=std, is_measured=True))
        return sorted(found, key=lambda estimate: estimate.ms)

    def is_likely(self, candidate: Candidate) -> bool:
        return self.chance(candidate) >= LIKELY_FIT

    def _seen(self, trials: Sequence[Trial]) -> tuple[float, float]:
        """Return ln of the measured job time of one candidate, and its variance."""
        # Logarithms, since noise is relative and twice as slow is as far off as twice as fast.
        seen = [(math.log(self._job_ms(trial)), self._noise_of(trial) ** -2) for trial in trials]
        precision = sum(weight for _, weight in seen)
        return sum(ms * weight for ms, weight in seen) / precision, 1 / precision

    @property
    def leader(self) -> Estimate | None:
        return self.measured[0] if self.measured else None

    def asks(self) -> list[tuple[float, Ask]]:
        """Return possible next measurements with their worth: the expected saving as a share of a job's time."""
        if self.leader is None:
            return self._first()
        return [*self._new(self.leader), *self._again(self.leader)]

    def _first(self) -> list[tuple[float, Ask]]:
        """Return the first measurement: of the candidates likely to fit and predicted as fast as the fastest, the first
        in the caller's order, which the final choice follows too. If none is likely to fit, the likeliest one."""
        if not self.predicted:
            return []
        likely = [e for e in self.predicted if self.chance(e.candidate) >= LIKELY_FIT]
        if likely:
            # Not simply the fastest prediction: between equals the caller's order prefers, for example, an exact cache.
            as_fast = {e.candidate.key for e in likely if e.ms <= likely[0].ms * (1 + AS_FAST)}
            first = next(each for each in self._search.candidates if each.key in as_fast)
        else:
            first = max(self.predicted, key=lambda e: self.chance(e.candidate)).candidate
        return [(1.0, self._look(first))]

    def _new(self, leader: Estimate) -> list[tuple[float, Ask]]:
        pool = self.predicted[:POOL]
        inside = {estimate.candidate.key for estimate in pool}
        # Candidates that differ from the leader in one knob are kept however bad their prediction is: the model may be
        # wrong about exactly that step's correction.
        pool += [e for e in self.predicted[POOL:] if e.candidate.key not in inside and is_next_to(e, leader)]
        found = []
        for estimate in pool:
            ask = self._look(estimate.candidate)
            found.append((self._worth(estimate, leader, is_long=ask.is_long), ask))
        return found

    def _worth(self, new: Estimate, best: Estimate, *, is_long: bool) -> float:
        """Return the expected saving from measuring one more candidate, as a share of a job's time."""
        job, against = (self._search.job(each.candidate.key) for each in (new, best))
        leverage = self.fit.leverage(job)
        variance = self.fit.reach(job, against) ** 2 + (leverage * self.fit.misfit) ** 2
        # Expected change of the belief: its whole deviation if the trial had no noise, less with noise.
        told = variance / math.sqrt(variance + (leverage * self._noise(is_long=is_long)) ** 2)
        return expected_improvement(told, math.log(new.ms / best.ms)) * self.chance(new.candidate)

    def _again(self, leader: Estimate) -> list[tuple[float, Ask]]:
        """Return long measurements of the measured candidates with their worth, compared with the leader; the leader is
        compared with the second best."""
        if len(self.measured) < 2:
            return []
        noise = self._noise(is_long=True)
        found = []
        for estimate in self.measured:
            # Whether the leader was only lucky shows in comparison with the second best.
            other = self.measured[1] if estimate is leader else leader
            job, against = (self._search.job(each.candidate.key) for each in (estimate, other))
            variance = self.fit.std(job, against) ** 2 + estimate.std**2
            told = variance / math.sqrt(variance + (self.fit.leverage(job) * noise) ** 2)
            worth = expected_improvement(told, abs(math.log(estimate.ms / other.ms)))
            found.append((worth, self._ask(estimate.candidate, is_long=True)))
        return found

    def _look(self, candidate: Candidate) -> Ask:
        """Return the first measurement of a candidate: short, unless a long one costs nearly the same because of the
        load."""
        short, long = (self._ask(candidate, is_long=is_long) for is_long in (False, True))
        return long if long.seconds <= AS_CHEAP * short.seconds else short

    def _ask(self, candidate: Candidate, *, is_long: bool) -> Ask:
        start_s = self._starts.load_s + self.compile_s(candidate)
        seconds = start_s + self._search.seconds(candidate, self.fit, is_long=is_long)
        return Ask(candidate=candidate, is_long=is_long, seconds=seconds)

    def compile_s(self, candidate: Candidate) -> float:
        """Return the seconds that the candidate's next start spends on compiling."""
        return self._starts.compile_s(candidate.compilation)

    def _noise(self, *, is_long: bool) -> float:
        return noise_of(is_long=is_long) * self.fit.noise_factor

    def _noise_of(self, trial: Trial) -> float:
        return self._noise(is_long=trial.is_long) * max(point.noise_factor for point in trial.points)

    def _job_ms(self, trial: Trial) -> float:
        """Return the job time of a trial in ms, from the depths at which every plan is measured."""
        curve = Curve(points=trial.points).up_to(max(self._search.effort.depths))
        return 1000 * cost_s(curve, self._search.mix)

    def chance(self, candidate: Candidate) -> float:
        """Return the probability that a candidate fits: 1 below a need that was seen to fit, 0 from a need that
        failed."""
        if candidate.key in self._failed or not self._deadly.isdisjoint(candidate.by_knob):
            return 0.0
        chance = 1.0
        for need in candidate.needs:
            # A failure shows the real limit of memory, whatever the prediction says is free.
            for limit, batch in self._limits.get(need.device, ()):
                if need.need_mib >= limit:
                    if candidate.work.batch >= batch:
                        return 0.0
                    chance *= SMALLER_BUFFER
            if need.need_mib > self._held.get(need.device, 0.0):
                chance *= normal_cdf((need.room_mib - need.need_mib) / (NEED_STD * max(1.0, need.need_mib)))
        return chance


def _deadly(search: Search, trials: Sequence[Trial]) -> set[str]:
    """Return the knobs that plans may do without, and whose every plan has died so far, though not for lack of memory.

    The budget must not be spent on the others that have the same knob.
    """
    found: dict[bool, set[str]] = {True: set(), False: set()}  # by whether the plan lived
    for trial in trials:
        if trial.points or trial.lacking is None:
            found[bool(trial.points)] |= search.optional.intersection(search.candidate(trial.key).by_knob)
    return found[False] - found[True]


def _limits(search: Search, trials: Sequence[Trial]) -> dict[str, list[tuple[float, int]]]:
    """Return for each device the predicted need and batch from which on candidates are not tried: the need of a failed
    candidate minus what was missing.

    It holds for this batch and larger ones. With a smaller batch the compute buffer, the least certain prediction, is
    smaller too.
    """
    limits: dict[str, list[tuple[float, int]]] = {}
    for trial in trials:
        if trial.lacking is None:
            continue
        failed = search.candidate(trial.key)
        for need in failed.needs:
            if need.device == trial.lacking.device:
                limit = need.need_mib - (trial.lacking.missing_mib or 0.0)
                limits.setdefault(need.device, []).append((limit, failed.work.batch))
    return limits


def _held(search: Search, trials: Sequence[Trial]) -> dict[str, float]:
    held: dict[str, float] = {}
    for trial in trials:
        for need in search.candidate(trial.key).needs if trial.points else ():
            held[need.device] = max(need.need_mib, held.get(need.device, 0.0))
    return held


def _predicted_ms(terms: tuple[Term, ...]) -> float:
    return sum(term.ms for term in terms)


def is_next_to(one: Estimate, other: Estimate) -> bool:
    """True if the two candidates differ in exactly one knob."""
    a, b = one.candidate.by_knob, other.candidate.by_knob
    return sum(a.get(name) != b.get(name) for name in a.keys() | b.keys()) == 1


def expected_improvement(std: float, gap: float) -> float:
    """Return E max(0, X) for a normal X with mean -gap and this standard deviation."""
    if std <= 0:
        return max(0.0, -gap)
    z = -gap / std
    return std * (z * normal_cdf(z) + math.exp(-z * z / 2) / math.sqrt(2 * math.pi))


def normal_cdf(z: float) -> float:
    return 0.5 * math.erfc(-z / math.sqrt(2))
