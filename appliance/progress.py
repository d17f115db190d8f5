"""Where a start stands, in words that a client can be shown. Standard library only: imported before the engine runs."""

from __future__ import annotations

import time
from dataclasses import field
from enum import StrEnum
from typing import Any

from appliance.values import dataclass


class Phase(StrEnum):
    STARTING = "starting"
    DOWNLOADING = "downloading"
    LOADING = "loading"
    TUNING = "tuning"
    READY = "ready"
    HELD = "held"  # the engine is away on purpose and comes back: requests wait for it instead of being refused
    RESTARTING = "restarting"
    STOPPING = "stopping"
    FAILED = "failed"


DOING = {
    Phase.STARTING: "the appliance is starting",
    Phase.DOWNLOADING: "the model is being downloaded",
    Phase.LOADING: "the model is being loaded",
    Phase.TUNING: "the machine is being measured",
    Phase.READY: "the model is ready",
    Phase.HELD: "requests wait for the engine",
    Phase.RESTARTING: "the engine is being restarted",
    Phase.STOPPING: "the appliance is stopping",
    Phase.FAILED: "the engine failed",
}


@dataclass(frozen=True, kw_only=True)
class Progress:
    """`fraction` of the phase that is done, 0 to 1, None when unknown; `since` is time.monotonic() at its beginning."""

    phase: Phase
    message: str = ""
    fraction: float | None = None
    since: float = field(default_factory=time.monotonic)

    @property
    def is_ready(self) -> bool:
        return self.phase is Phase.READY

    @property
    def is_held(self) -> bool:
        return self.phase is Phase.HELD

    def sentence(self) -> str:
        """What is being done and how far it is: "the model is being loaded: weights (42 %)"."""
        text = f"{DOING[self.phase]}: {self.message}" if self.message else DOING[self.phase]
        return text if self.fraction is None else f"{text} ({self.fraction * 100:.0f} %)"

    def document(self) -> dict[str, Any]:
        """The body of a readiness answer that is not "ready"."""
        return {
            "status": "not ready",
            "phase": str(self.phase),
            "message": self.sentence(),
            "fraction": self.fraction,
            "elapsed_s": round(max(0.0, time.monotonic() - self.since), 1),
        }
