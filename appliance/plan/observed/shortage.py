"""The lack of memory that an engine's log reports."""

from __future__ import annotations

from appliance.values import dataclass


@dataclass(frozen=True, kw_only=True)
class Shortage:
    """The lack of memory that an engine's log reports."""

    refused_mib: float  # size of the refused buffer: at most so much was missing
    device: str | None = None  # the engine's name of the GPU; None: host memory
    free_mib: float | None = None  # free there before the engine allocated anything; None: the log does not tell
    context: int | None = None  # the longest context that would have fitted; None: the log does not tell
    is_whole: bool = False  # True if nothing was allocated yet: `refused_mib` is all that the engine needs
