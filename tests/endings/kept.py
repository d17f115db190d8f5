"""Endings that were kept, as a supervisor would tell them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from appliance.supervisor import Crash
from appliance.supervisor.log import Log


def crash_of(row: Mapping[str, Any], log: Log) -> Crash:
    """`row` of the index says what its log does not."""
    return Crash(
        exit_code=row.get("exit_code"),
        signal=row.get("signal"),
        first_error=log.first_error(),
        log=log.lines,
        was_ready=row.get("was_ready", False),
        stalled=row.get("stalled", False),
        seconds=1.0,
        oom_kills=row.get("oom_kills", 0),
    )
