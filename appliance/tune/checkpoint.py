"""Checkpoint of a tuning: results so far, kept so that an interrupted tuning can be resumed.

All parts belong to the tuning's model, build, machine and settings. Each part also names its plan.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Protocol

from appliance.console.progress import Phase
from appliance.console.report import Report
from appliance.errors import VolumeError
from appliance.tune.budget import LoadsOfDay, utc_day
from appliance.tune.figures.measurement import TRIES, Measurement
from appliance.tune.figures.perplexity import ScoredChunk
from appliance.tune.figures.slots import Concurrency
from appliance.tune.figures.workload import Workload
from appliance.tune.speculate import Tried
from appliance.tune.trials.run_trial import Step


@dataclass(frozen=True, kw_only=True)
class DraftTrial:
    """Result of one start for choosing the number of draft tokens of the plan `key`. All starts of a plan get the same
    prompts, with answers as long as those of the first start."""

    key: str
    tried: Tried


@dataclass(frozen=True, kw_only=True)
class SlotsTrial:
    """Result of one number of slots. `key` names the plan including its speculative decoding. Only results with the
    same workload are compared. If `found` is None the engine failed with `error`."""

    key: str
    slots: int
    found: Concurrency | None = None
    error: str | None = None


@dataclass(frozen=True, kw_only=True)
class Partial:
    """Results so far, in the order in which they were found.

    Decisions on KV cache types are not kept. They are computed again from the chunks of text, so that a refusal for
    lack of time never counts as a measured one.
    """

    measurements: tuple[Measurement, ...] = ()
    begun: tuple[Measurement, ...] = ()  # interrupted measurements, with the depths measured so far
    scored_chunks: tuple[ScoredChunk, ...] = ()
    drafts: tuple[DraftTrial, ...] = ()
    slots: tuple[SlotsTrial, ...] = ()
    loads: LoadsOfDay | None = None  # of the last day on which an engine was loaded

    @property
    def count(self) -> int:
        """Number of results. It only grows while a tuning runs."""
        points = sum(len(each.points) for each in (*self.measurements, *self.begun))
        chunks = sum(len(scored_chunk.nll) for scored_chunk in self.scored_chunks)
        return points + chunks + len(self.drafts) + len(self.slots)

    def describe(self) -> str:
        """Return words such as "3 measurements, 24 chunks of text, 2 trials of speculative decoding"; empty without
        results."""
        chunks = sum(len(scored_chunk.nll) for scored_chunk in self.scored_chunks)
        counts = {
            "measurement": len(self.measurements),
            "depth of a measurement that was begun": sum(len(each.points) for each in self.begun),
            "chunk of text": chunks,
            "trial of speculative decoding": len(self.drafts),
            "trial of slots": len(self.slots),
        }
        named = ((count, *name.partition(" ")) for name, count in counts.items() if count)
        return ", ".join(f"{count} {what}{'s' * (count > 1)}{space}{rest}" for count, what, space, rest in named)


class PartialStore(Protocol):
    """Storage for the checkpoint of a tuning."""

    def load(self) -> Partial:
        """Return the checkpoint; an empty one if there is none or it cannot be read."""

    def save(self, partial: Partial) -> None:
        """Save the checkpoint, at once or soon. Raises VolumeError if nothing else keeps it."""


class PartialResults:
    """Results of a running tuning; each is saved and reported. `shows_phase` is False while an engine serves,
    so that clients are not told that the appliance is measuring."""

    def __init__(self, store: PartialStore, report: Report, *, shows_phase: bool) -> None:
        self._store = store
        self._report = report
        self._shows_phase = shows_phase
        self.kept = Partial()
        self._begun_with = 0
        self.measurements: list[Measurement] = []  # including those of the checkpoint

    def load(self) -> None:
        self.kept = self._store.load()
        self._begun_with = self.kept.count

    @property
    def gained(self) -> int:
        """Number of results beyond those of the checkpoint that the tuning began with."""
        return self.kept.count - self._begun_with

    def phase(self, words: str) -> None:
        if self._shows_phase:
            self._report.phase(Phase.TUNING, words)

    @property
    def loads_today(self) -> int:
        return self.kept.loads.on(utc_day()) if self.kept.loads else 0

    def on_load(self) -> None:
        """Count an engine that is about to be loaded. Kept before the load, so that a kill cannot hide it."""
        self._save(replace(self.kept, loads=LoadsOfDay(day=utc_day(), count=self.loads_today + 1)))

    def on_step(self, step: Step) -> None:
        words = f"{step.plan.key}: {step.what}"
        self.phase(words)
        self._report.info("tune_step", words)

    def begun(self, key: str, *, is_long: bool) -> Measurement | None:
        """Return the interrupted measurement of this plan with the depths measured so far, or None."""
        return next((each for each in self.kept.begun if (each.key, each.is_long) == (key, is_long)), None)

    def on_depth(self, measurement: Measurement) -> None:
        """Save a running measurement after one more depth."""
        self._save(replace(self.kept, begun=(*self._begun_but(measurement), measurement)))

    def _begun_but(self, measurement: Measurement) -> tuple[Measurement, ...]:
        own = (measurement.key, measurement.is_long)
        return tuple(each for each in self.kept.begun if (each.key, each.is_long) != own)

    def on_measurement(self, measurement: Measurement) -> None:
        self.measurements.append(measurement)
        begun = self._begun_but(measurement)
        self._save(replace(self.kept, measurements=(*self.kept.measurements, measurement), begun=begun))
        if measurement.error:
            self._report.warning("tune_failed", measurement.describe())
            return
        self._report.info("tune_measured", measurement.describe(), points=[asdict(p) for p in measurement.points])

    def on_chunk(self, scored_chunk: ScoredChunk) -> None:
        try:
            self._save(replace(self.kept, scored_chunks=(*self.kept.scored_chunks, scored_chunk)))
        except VolumeError as error:  # this may be called during a stop, which must not fail
            self._report.warning("not_kept", error.message)

    def on_draft(self, key: str) -> Callable[[Tried], None]:
        """Return a function that saves results of draft trials for the plan with this key."""

        def keep(tried: Tried) -> None:
            self._save(replace(self.kept, drafts=(*self.kept.drafts, DraftTrial(key=key, tried=tried))))

        return keep

    def on_slots(self, look: SlotsTrial) -> None:
        self._save(replace(self.kept, slots=(*self.kept.slots, look)))

    def drafts_of(self, key: str) -> list[Tried]:
        return [look.tried for look in self.kept.drafts if look.key == key]

    def slots_of(self, key: str, count: int, workload: Workload | None) -> SlotsTrial | None:
        """Return the kept result for this number of slots, or None. If `workload` is given, the result must have it. A
        failure counts only after TRIES failures."""
        looks = [look for look in self.kept.slots if (look.key, look.slots) == (key, count)]
        good = (look for look in looks if look.found and workload in (None, look.found.workload))
        failed = [look for look in looks if look.error]
        return next(good, failed[-1] if len(failed) >= TRIES else None)

    def _save(self, partial: Partial) -> None:
        self.kept = partial
        self._store.save(partial)
