"""What a start has compiled before it serves, where an engine keeps the result for later starts."""

from __future__ import annotations

from appliance.values import dataclass


@dataclass(frozen=True, kw_only=True)
class Compilation:
    """Starts with the same key share what was compiled. `seconds` as expected of the next start; 0: it is there."""

    key: str
    seconds: float
