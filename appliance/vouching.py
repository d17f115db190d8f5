"""While it serves: do the speeds of real requests still bear the profile out? The first few decide, or a question of
our own when nobody asks; then nothing is compared any more until the next start."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

from appliance.engines.llama_timings import Served, TimingsReader
from appliance.plan import Plan
from appliance.probe.conditions import conditions
from appliance.probe.load import LoadSample, query_load
from appliance.profile import Profile
from appliance.profile.validate import PROBES_MAX, Holds, Verdict, baseline_of, should_probe

PROBE_AFTER_S = 120.0  # without a request
# From the begin of a request that is shorter: the kernel counts in hundredths of a second, so of less it tells little.
WATCHED_S = 1.0


class Vouching:
    """`ask` decodes something on the engine that serves, as a client would, and is cancelled when one comes."""

    def __init__(self, profile: Profile, serving: Plan, *, root: Path = Path("/")) -> None:
        self._root = root
        baseline = baseline_of(profile, serving)
        self._holds = Holds(baseline=baseline) if baseline else None
        self._reader = TimingsReader()
        self._began: LoadSample | None = None  # the request that began last: of one that was alone, its own
        self._ended: asyncio.Queue[tuple[Served, LoadSample]] = asyncio.Queue()
        self._probes = 0

    @property
    def holds(self) -> Holds | None:
        """None where the plan that serves was not measured: there is nothing to compare with."""
        return self._holds

    def heard(self, line: str) -> None:
        """One line of the engine's log. What else the machine does is looked at when a request begins and when it has
        ended, and never while nobody asks: there may be no verdict for days."""
        if self._holds is None or self._holds.verdict is not Verdict.OPEN:
            return
        begun = self._reader.begun
        served = self._reader.read(line)
        if self._reader.begun != begun:
            self._began = query_load(self._root)
        if served is not None and self._began is not None:
            self._ended.put_nowait((served, self._began))

    def restarted(self) -> None:
        """A new engine counts its requests anew."""
        self._reader = TimingsReader()

    async def run(self, *, idle_s: Callable[[], float], ask: Callable[[], Awaitable[None]]) -> Holds | None:
        """Until there is a verdict; None where there is nothing to compare with."""
        while self._holds is not None and self._holds.verdict is Verdict.OPEN:
            try:
                async with asyncio.timeout(self._until_probe_s(idle_s())):
                    served, began = await self._ended.get()
            except TimeoutError:
                if should_probe(self._holds.verdict, idle_s=idle_s(), after_s=PROBE_AFTER_S, probes=self._probes):
                    self._probes += 1
                    await ask()
                    await asyncio.sleep(WATCHED_S)  # its end stands in the log by then
                continue
            await asyncio.sleep(began.time_s + WATCHED_S - time.monotonic())
            self._holds = self._holds.heard(served, conditions(began, query_load(self._root)).disturbance)
        return self._holds

    def _until_probe_s(self, idle_s: float) -> float | None:
        """Until the machine may have been idle for long enough; None where nothing is asked any more."""
        return max(0.0, PROBE_AFTER_S - idle_s) if self._probes < PROBES_MAX else None
