"""How far measuring of one served model is. Background tasks write it, documents read it."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from appliance.errors import FatalError
    from appliance.profile.drift import DriftState


class TuningState:
    """Data only. Made inside the running loop."""

    def __init__(self) -> None:
        self.is_busy: bool | None = None  # True while plans are measured or loaded; None: nothing waits for a pause
        self.is_given_up = False  # True after a tuning that came to no plan
        self.was_measured = False  # True once this process has measured to the end
        self.failure: FatalError | None = None  # that ended the last tuning
        self.why_not_best = ""  # why the best measured plan does not serve; empty if it does
        self.drift: DriftState | None = None  # None: nothing to compare with
        self.wanted_now = asyncio.Event()  # set while a client waits for the result: no pause is waited for
