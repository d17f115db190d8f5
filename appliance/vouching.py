"""While it serves: do the speeds of real requests still bear the profile out? The first few decide, or a question of
our own when nobody asks; then nothing is compared any more until the next start."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Awaitable, Callable
from pathlib import Path

from appliance.engines.llama_timings import Served, TimingsReader
from appliance.plan import Plan
from appliance.probe.conditions import conditions
from appliance.probe.load import LoadSample, query_load
from appliance.profile import Profile
from appliance.profile.validate import Holds, Verdict, baseline_of, should_probe

SAMPLE_S = 1.0  # between looks at what else the machine does: half a millisecond each
SAMPLES = 900  # a request of a quarter of an hour is long enough
PROBE_AFTER_S = 120.0  # without a request


class Vouching:
    """`ask` decodes something on the engine that serves, as a client would, and is cancelled when one comes."""

    def __init__(self, profile: Profile, serving: Plan, *, root: Path = Path("/")) -> None:
        self._root = root
        baseline = baseline_of(profile, serving)
        self._holds = Holds(baseline=baseline) if baseline else None
        self._reader = TimingsReader()
        self._samples: deque[tuple[float, LoadSample]] = deque(maxlen=SAMPLES)
        self._changed = asyncio.Event()
        self._probes = 0

    @property
    def holds(self) -> Holds | None:
        """None where the plan that serves was not measured: there is nothing to compare with."""
        return self._holds

    def heard(self, line: str) -> None:
        """One line of the engine's log."""
        if self._holds is None or self._holds.verdict is not Verdict.OPEN:
            return
        served = self._reader.read(line)
        if served is not None:
            self._holds = self._holds.heard(served, self._disturbance(served))
            self._changed.set()

    def restarted(self) -> None:
        """A new engine counts its requests anew."""
        self._reader = TimingsReader()

    async def run(self, *, idle_s: Callable[[], float], ask: Callable[[], Awaitable[None]]) -> Holds | None:
        """Until there is a verdict; None where there is nothing to compare with."""
        while self._holds is not None and self._holds.verdict is Verdict.OPEN:
            self._samples.append((time.monotonic(), query_load(self._root)))
            if should_probe(self._holds.verdict, idle_s=idle_s(), after_s=PROBE_AFTER_S, probes=self._probes):
                self._probes += 1
                await ask()
            self._changed.clear()
            try:
                async with asyncio.timeout(SAMPLE_S):
                    await self._changed.wait()
            except TimeoutError:
                continue
        return self._holds

    def _disturbance(self, served: Served) -> str | None:
        """Since the request began, as far back as was looked."""
        began = time.monotonic() - (served.prefill_ms + served.decode_ms) / 1000
        before = next((sample for at, sample in reversed(self._samples) if at <= began), None)
        if before is None:
            return "nobody watched the machine when the request began"
        return conditions(before, query_load(self._root)).disturbance
