"""The modes of one served model, and the switch between them. Background tasks write it, documents read it."""

from __future__ import annotations

import asyncio

from appliance.plan import Plan
from appliance.settings import Settings
from appliance.values import dataclass


@dataclass(frozen=True, kw_only=True)
class ModePlan:
    """The plan that a mode would serve now, measured or predicted, and its speeds at a usual depth.

    `plan` is None if no plan of this mode fits; `why_none` says what it lacks then. A speed is None if it is unknown.
    """

    mode: str
    plan: Plan | None
    why_none: str = ""
    decode_tokens_per_s: float | None = None
    prefill_tokens_per_s: float | None = None
    is_measured: bool = False


class ModeState:
    """Data only. Made inside the running loop."""

    def __init__(self, settings: Settings) -> None:
        self.at_start = settings.mode
        self.source = settings.sources.get("mode", "default")  # of the mode at the start
        self.plans: tuple[ModePlan, ...] = ()  # empty: not known yet
        self.wanted: str | None = None  # the mode that is being switched to
        self.is_wanted = asyncio.Event()  # set as long as `wanted` is
        self.last: str | None = None  # the mode of the last switch, or of the one that runs
        self.failure = ""  # why the last switch failed; empty if it did not

    def begin(self, mode: str) -> None:
        self.wanted = self.last = mode
        self.failure = ""
        self.is_wanted.set()

    def end(self, failure: str = "") -> None:
        self.wanted = None
        self.failure = failure
        self.is_wanted.clear()

    def plan_of(self, mode: str) -> ModePlan | None:
        """Return the row of a mode; None if it is not known yet."""
        return next((row for row in self.plans if row.mode == mode), None)

    def words(self, mode: str) -> str:
        """Say how long a switch to `mode` lasts: settings count again at the next start."""
        if mode == self.at_start:
            return f"mode '{mode}' is the one of the settings ({self.source})"
        return f"mode '{mode}' lasts until the appliance stops; the next start takes '{self.at_start}' ({self.source})"
