"""What an engine that ran out of memory said of it."""

from __future__ import annotations

from appliance.values import dataclass


@dataclass(frozen=True, kw_only=True)
class Shortage:
    """What an engine's log tells of it. `refused_mib` is the size of the buffer that was refused, so at most that much
    was missing. `device` is the engine's name of the GPU; None: the host. `free_mib` was
    free there when the engine began, before it allocated anything. `context` is what it names as the longest that would
    have fitted. `is_whole`: nothing was allocated yet, and `refused_mib` is all that it wants to find free."""

    refused_mib: float
    device: str | None = None
    free_mib: float | None = None
    context: int | None = None
    is_whole: bool = False
