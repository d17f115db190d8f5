"""The state of a start, in words for clients. Standard library only: imported before the engine runs."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import field
from enum import StrEnum
from typing import Any

from appliance.values import dataclass


class Phase(StrEnum):
    STARTING = "starting"
    FETCHING = "fetching"  # weights are being downloaded
    QUANTIZING = "quantizing"  # the model does not fit as it is: a quantized file is being made
    LOADING = "loading"
    TUNING = "tuning"
    READY = "ready"
    HELD = "held"  # the engine is restarted on purpose: requests wait for it instead of being refused
    RESTARTING = "restarting"
    ASLEEP = "asleep"  # the engine was stopped, and is started when the model is wanted
    STOPPING = "stopping"
    FAILED = "failed"


DOING = {
    Phase.STARTING: "the appliance is starting",
    Phase.FETCHING: "the model is being fetched",
    Phase.QUANTIZING: "the model is being quantized",
    Phase.LOADING: "the model is being loaded",
    Phase.TUNING: "the machine is being measured",
    Phase.READY: "the model is ready",
    Phase.HELD: "requests wait for the engine",
    Phase.RESTARTING: "the engine is being restarted",
    Phase.ASLEEP: "the model is not loaded",
    Phase.STOPPING: "the appliance is stopping",
    Phase.FAILED: "the engine failed",
}


@dataclass(frozen=True, kw_only=True)
class Progress:
    """Phase of a start. `since` is time.monotonic() at the beginning of the phase."""

    phase: Phase
    message: str = ""
    since: float = field(default_factory=time.monotonic)
    facts: Mapping[str, Any] = field(default_factory=dict)  # details of the phase for documents, such as its progress

    @property
    def is_ready(self) -> bool:
        return self.phase is Phase.READY

    @property
    def is_held(self) -> bool:
        return self.phase is Phase.HELD

    @property
    def seconds_left(self) -> float | None:
        """Estimated seconds until ready; None if there is no estimate."""
        return self.facts.get("seconds_left")

    def sentence(self) -> str:
        """Return what is being done, as in "the model is being loaded: weights"."""
        return f"{DOING[self.phase]}: {self.message}" if self.message else DOING[self.phase]

    def document(self) -> dict[str, Any]:
        """Return the body of a readiness answer that is not "ready"."""
        return {
            "status": "not ready",
            "phase": str(self.phase),
            "message": self.sentence(),
            "elapsed_s": round(max(0.0, time.monotonic() - self.since), 1),
            **self.facts,
        }
