"""Tells clients and the log how far a file is that is fetched or made."""

from __future__ import annotations

import time
from collections.abc import Callable

from appliance.console.progress import Phase
from appliance.console.report import Report
from appliance.weights.download.meter import FetchProgress

SAY_EVERY_S = 10.0
SAY_EVERY_SHARE = 0.05


class Tell:
    """Shows progress to clients at once as the facts of a phase, and in the log every 10 s or 5 %."""

    def __init__(self, report: Report, phase: Phase, event: str, now: Callable[[], float] = time.monotonic) -> None:
        self._report = report
        self._phase = phase
        self._event = event
        self._now = now
        self._said_at, self._said_share = now(), 0.0

    def __call__(self, progress: FetchProgress) -> None:
        facts = progress.facts()
        self._report.phase(self._phase, progress.describe(), **facts)
        share = progress.bytes_done / progress.bytes_total if progress.bytes_total else 0.0
        if self._now() - self._said_at >= SAY_EVERY_S or share - self._said_share >= SAY_EVERY_SHARE:
            self._said_at, self._said_share = self._now(), share
            self._report.info(self._event, progress.describe(), **facts)
