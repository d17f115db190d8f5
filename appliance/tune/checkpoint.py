"""What a tuning that has not ended has found so far, and what of it is kept for one that goes on.

Model, build, machine and settings are those of the tuning; beside that each part says of which plan it is.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Protocol

from appliance.console.progress import Phase
from appliance.console.report import Report
from appliance.errors import VolumeError
from appliance.tune.figures.measurement import TRIES, Measurement
from appliance.tune.figures.perplexity import ScoredChunk
from appliance.tune.figures.slots import Concurrency
from appliance.tune.figures.workload import Workload
from appliance.tune.speculate import Tried
from appliance.tune.trials.run_trial import Step


@dataclass(frozen=True, kw_only=True)
class DraftTrial:
    """One start of those that choose how far to draft for the plan of this key. All of one plan were asked the
    same prompts, with answers as long as those of the first."""

    key: str
    tried: Tried


@dataclass(frozen=True, kw_only=True)
class SlotsTrial:
    """One number of slots for the plan of this name, draft tokens and all. Only those with the same workload are
    compared. Without `found` the engine ended, with `error`."""

    key: str
    slots: int
    found: Concurrency | None = None
    error: str | None = None


@dataclass(frozen=True, kw_only=True)
class Partial:
    """In the order in which it was found. What was decided of types of the KV cache is not among it: that is computed
    again from the chunks of text, so that a refusal for lack of time is never taken for one that was measured."""

    measurements: tuple[Measurement, ...] = ()
    begun: tuple[Measurement, ...] = ()  # with the depths that they came to before they were interrupted
    scored_chunks: tuple[ScoredChunk, ...] = ()
    drafts: tuple[DraftTrial, ...] = ()
    slots: tuple[SlotsTrial, ...] = ()

    @property
    def count(self) -> int:
        """How much there is; it only grows as a tuning goes on."""
        points = sum(len(each.points) for each in (*self.measurements, *self.begun))
        chunks = sum(len(scored_chunk.nll) for scored_chunk in self.scored_chunks)
        return points + chunks + len(self.drafts) + len(self.slots)

    def describe(self) -> str:
        """As in "3 measurements, 24 chunks of text, 2 trials of speculative decoding"; empty where there is nothing."""
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
    """Where a tuning keeps what it has found, for one that goes on later."""

    def load(self) -> Partial:
        """Empty where there is nothing, or nothing that can be read."""

    def save(self, partial: Partial) -> None:
        """Raises VolumeError."""


class PartialResults:
    """What a tuning has found so far: reported and kept as it comes. `shows_phase` is False while something else
    serves: clients are not told then that it is being measured."""

    def __init__(self, store: PartialStore, report: Report, *, shows_phase: bool) -> None:
        self._store = store
        self._report = report
        self._shows_phase = shows_phase
        self.kept = Partial()
        self._begun_with = 0
        self.measurements: list[Measurement] = []  # also those that the tuning began with

    def load(self) -> None:
        self.kept = self._store.load()
        self._begun_with = self.kept.count

    @property
    def gained(self) -> int:
        """How much there is beyond what it began with."""
        return self.kept.count - self._begun_with

    def phase(self, words: str) -> None:
        if self._shows_phase:
            self._report.phase(Phase.TUNING, words)

    def on_step(self, step: Step) -> None:
        words = f"{step.plan.key}: {step.what}"
        self.phase(words)
        self._report.info("tune_step", words)

    def begun(self, key: str, *, is_long: bool) -> Measurement | None:
        """The depths that a measurement of this plan came to before it was interrupted."""
        return next((each for each in self.kept.begun if (each.key, each.is_long) == (key, is_long)), None)

    def on_depth(self, measurement: Measurement) -> None:
        """One more depth of a measurement that goes on."""
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
        except VolumeError as error:  # it may be told while everything is being stopped, and that is to go on
            self._report.warning("not_kept", error.message)

    def on_draft(self, key: str) -> Callable[[Tried], None]:
        """For starts with the plan of this key."""

        def keep(tried: Tried) -> None:
            self._save(replace(self.kept, drafts=(*self.kept.drafts, DraftTrial(key=key, tried=tried))))

        return keep

    def on_slots(self, look: SlotsTrial) -> None:
        self._save(replace(self.kept, slots=(*self.kept.slots, look)))

    def drafts_of(self, key: str) -> list[Tried]:
        return [look.tried for look in self.kept.drafts if look.key == key]

    def slots_of(self, key: str, count: int, workload: Workload | None) -> SlotsTrial | None:
        """Of a tuning that was broken off: with this workload, if one was measured with already; a failure only when
        it was one TRIES times."""
        looks = [look for look in self.kept.slots if (look.key, look.slots) == (key, count)]
        good = (look for look in looks if look.found and workload in (None, look.found.workload))
        failed = [look for look in looks if look.error]
        return next(good, failed[-1] if len(failed) >= TRIES else None)

    def _save(self, partial: Partial) -> None:
        self.kept = partial
        self._store.save(partial)
