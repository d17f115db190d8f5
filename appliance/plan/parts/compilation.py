"""Compilation that an engine does before it serves, and whose result it keeps for later starts."""

from __future__ import annotations

from appliance.values import dataclass


@dataclass(frozen=True, kw_only=True)
class Compilation:
    """Starts with the same `key` share the compiled code. `seconds`: expected time at the next start; 0: it is done."""

    key: str
    seconds: float
