"""Watches one request: reads counters where it begins and where it ends, and says what made the answer."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Any, TypeVar

from appliance.console.progress import Phase
from appliance.probe.load.conditions import Conditions, conditions
from appliance.probe.load.meter import Reading
from appliance.serve.model.served_model import ServedModel
from appliance.serve.receipts.causes import Cause, Facts, capped_share, causes
from appliance.serve.receipts.prompts import Engine, Prompts, hashes_of, prompt_of
from appliance.serve.receipts.reference import Reference, reference_of
from appliance.system.detached import detached

if TYPE_CHECKING:
    from appliance.gateway.clients.request_log import FinishedRequest
    from appliance.gateway.clients.traffic import Traffic  # both for the name only
    from appliance.probe.load.load import LoadSample

T = TypeVar("T")
FRESH_S = 0.25  # counters of the CPUs, which take a millisecond or two, are read at most so often
ENERGY_FRESH_S = 0.1
ANSWER_WAITS_S = 0.3  # the end of an answer waits so long for a last reading
BESIDE = 0.05  # mean number of other requests below which this one ran alone


class Watcher:
    """What the requests of one served model share."""

    def __init__(self, served: ServedModel) -> None:
        self.served = served
        self.prompts = Prompts()
        self.finished_on: Engine | None = None  # the engine of the last request that ended well
        self._sampled: LoadSample | None = None
        self._reading: asyncio.Task[LoadSample | None] | None = None
        self._reference: Reference | None = None
        self._reference_of: tuple[object, object] = (None, None)
        self._tasks: set[asyncio.Task[Any]] = set()

    @property
    def engine(self) -> Engine:
        """The engine that serves now."""
        return Engine(restarts=self.served.host.restarts, number=id(self.served.ready))

    @property
    def reference(self) -> Reference | None:
        now = self.served.host.plan, self.served.profile
        if now[0] is not self._reference_of[0] or now[1] is not self._reference_of[1]:
            self._reference_of, self._reference = now, reference_of(*now)
        return self._reference

    def sample(self) -> LoadSample | None:
        """Return the CPUs' counters, at most `FRESH_S` old; None if they cannot be read."""
        # Imported here, with the first request and in a thread: a start needs none of it.
        from appliance.probe.load.counters import query_load

        if self._is_stale():
            try:
                self._sampled = query_load()
            except OSError:  # no file is left to read with
                return None
        return self._sampled

    def sampled(self) -> asyncio.Future[LoadSample | None]:
        """Return the same as `sample`, read beside the event loop. Requests of one moment share one reading."""
        if self._reading is not None and not self._reading.done():
            return self._reading
        if not self._is_stale():  # by whichever reading came last
            known: asyncio.Future[LoadSample | None] = asyncio.get_running_loop().create_future()
            known.set_result(self._sampled)
            return known
        self._reading = self.in_thread(self.sample)
        return self._reading

    def _is_stale(self) -> bool:
        return self._sampled is None or time.monotonic() - self._sampled.time_s > FRESH_S

    def spawn(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Run beside the request, whatever becomes of it."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def in_thread(self, work: Callable[[], T]) -> asyncio.Task[T]:
        return self.spawn(detached(work))


class RequestWatch:
    """One request, from the moment when its body has come. See `appliance.gateway.engine.insight.Watched`."""

    def __init__(
        self, watcher: Watcher, body: bytes, traffic: Traffic, *, load_s: float = 0.0, loaded: str = ""
    ) -> None:
        """The request has waited `load_s` until its model was there; `loaded` says what was done meanwhile."""
        served = watcher.served
        self._watcher = watcher
        self._traffic = traffic
        self._load_s = load_s
        self._loaded = loaded
        self._watched = time.monotonic()
        self._began = self._watched - load_s
        self._work_s = traffic.work_s
        self._arrivals = traffic.arrivals
        self._engine = watcher.engine
        self._phase = served.report.progress.phase
        self._held_words = served.report.progress.sentence() if self._phase is Phase.HELD else ""
        self._was_tuning = served.tuning.is_busy is True
        prompt = prompt_of(body)
        self._hashes = hashes_of(prompt)
        self._shared, self._read_by = watcher.prompts.find(self._hashes, len(prompt))
        self._before = watcher.sampled()
        meter = served.meter
        self._has_energy = meter.has_gpus or not meter.why_unknown or meter.last is None
        self._first = watcher.in_thread(lambda: meter.read(fresh_s=ENERGY_FRESH_S)) if self._has_energy else None

    async def receipt(self, row: FinishedRequest) -> dict[str, Any]:
        """Return the receipt: figures of this answer and of the profile, null for what is unknown."""
        last = await self._read_last()
        served, reference = self._watcher.served, self._watcher.reference
        depth = None if row.tokens_in is None else row.tokens_in + (row.tokens_out or 0) // 2
        facts = self._facts(row, reference)
        promised = None if reference is None or depth is None else reference.tokens_per_s(depth)
        return {
            "plan": served.host.plan.key if served.host.plan else None,
            "tokens_per_s": row.tokens_per_s,
            "profile_tokens_per_s": None if promised is None else round(promised, 1),
            "depth": depth,
            "seconds": row.seconds,
            "profile_seconds": None if facts is None else round(facts.expected_s, 3),
            "tokens_cached": row.tokens_cached,
            "tokens_from_disk": row.tokens_from_disk,
            "waited_s": row.waited_s,
            "waited_for": self._waited_for(row),
            "joules": self._joules(last),
            "slowed_by": [] if facts is None else [str(cause) for cause in causes(facts)],
        }

    def end(self, row: FinishedRequest) -> tuple[str, ...]:
        """Return what slowed the request down, and remember what it read."""
        watcher = self._watcher
        is_good = 0 < row.status < 400 and row.ending in ("stop", "length", "tool_calls")
        found: tuple[str, ...] = ()
        if is_good:
            facts = self._facts(row, watcher.reference)
            found = () if facts is None else tuple(str(cause) for cause in causes(facts))
            watcher.prompts.note(self._hashes, watcher.engine)
            watcher.finished_on = watcher.engine
        if self._first is not None and self._beside < BESIDE:
            watcher.spawn(self._count_energy(row.tokens_out))
        return found

    @property
    def _beside(self) -> float:
        """Mean number of other requests since the model was there for this one."""
        seconds = time.monotonic() - self._watched
        worked_s = self._traffic.work_s - self._work_s
        # This request itself is among the running ones, or was until just now.
        return max(0.0, worked_s / seconds - 1) if seconds > 0 else 0.0

    def _facts(self, row: FinishedRequest, reference: Reference | None) -> Facts | None:
        """Return what is known of this answer; None without a profile or without the engine's own counts."""
        if reference is None or row.tokens_in is None or not row.tokens_out:
            return None
        known = row.tokens_in if row.tokens_cached is None else self._shared * row.tokens_in
        cached = row.tokens_cached or 0
        expected_s = reference.answer_s(
            cached if row.tokens_cached is None else max(known, cached), row.tokens_in, row.tokens_out
        )
        seconds = time.monotonic() - self._began
        facts = Facts(seconds=seconds, expected_s=expected_s)
        if not facts.is_slow:
            return facts
        served, engine = self._watcher.served, self._watcher.engine
        lost_by = Cause.COLD_CACHE
        if self._read_by is not None and self._read_by != engine:
            lost_by = Cause.RESTART if self._read_by.restarts != engine.restarts else Cause.TUNING
        before_last = self._watcher.finished_on
        return Facts(
            seconds=seconds,
            expected_s=expected_s,
            held_s=row.waited_s - self._load_s if self._held_words else 0.0,
            load_s=self._load_s,
            lost_s=0.0 if row.tokens_cached is None else reference.prefill_s(cached, known),
            lost_by=lost_by,
            is_first_after_restart=engine.restarts > (before_last.restarts if before_last else 0),
            is_beside_tuning=self._was_tuning or served.tuning.is_busy is True,
            beside=self._beside,
            conditions=self._conditions(),
            clock_share=capped_share(reading.gpus for reading in served.meter.since(self._began)),
        )

    def _conditions(self) -> Conditions | None:
        """Return the load of the CPUs since the beginning; None if unknown."""
        if not self._before.done() or self._before.cancelled() or self._before.exception():
            return None
        before, after = self._before.result(), self._watcher.sample()
        if before is None or after is None:
            return None
        return conditions(before, after)

    def _waited_for(self, row: FinishedRequest) -> str | None:
        """Say what the request waited for; None if it did not wait, or if that is unknown."""
        if not row.waited_s:
            return None
        if self._load_s:
            return self._loaded
        if self._held_words:
            return self._held_words
        return "other requests" if self._beside >= BESIDE else None

    async def _read_last(self) -> Reading | None:
        if self._first is None:
            return None
        meter = self._watcher.served.meter
        reading = self._watcher.in_thread(meter.read)
        await asyncio.wait((reading,), timeout=ANSWER_WAITS_S)
        return reading.result() if reading.done() and not reading.exception() else None

    def _joules(self, last: Reading | None) -> float | None:
        """Return the energy of this answer; None if it is unknown, or if other requests used it too."""
        if self._first is None or last is None or not self._first.done() or self._beside >= BESIDE:
            return None
        first = self._first.result()
        return None if first.joules is None or last.joules is None else round(last.joules - first.joules, 2)

    async def _count_energy(self, tokens: int | None) -> None:
        first = await self._first if self._first is not None else None
        last = await detached(self._watcher.served.meter.read)
        if first is not None and first.joules is not None and last.joules is not None:
            self._watcher.served.energy_use.add(last.joules - first.joules, tokens)
