"""One check: its name, what was seen, and what to do about it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from appliance.errors import FatalError


@dataclass(frozen=True, kw_only=True)
class Check:
    """One result. `exit_code` is the code that a start would end with because of it; 0 unless it failed."""

    name: str
    status: Literal["pass", "warn", "fail"]
    value: str
    remedy: str | None = None
    exit_code: int = 0


def passed(name: str, value: str) -> Check:
    return Check(name=name, status="pass", value=value)


def warned(name: str, value: str, remedy: str) -> Check:
    return Check(name=name, status="warn", value=value, remedy=remedy)


def failed(name: str, error: FatalError) -> Check:
    """Return a failed check with the message, hint and exit code that a start would end with."""
    return Check(name=name, status="fail", value=error.message, remedy=error.hint, exit_code=error.exit_code)


def judged(name: str, value: str, trouble: str | None) -> Check:
    """Return a warning if `trouble` holds a remedy, else a passed check."""
    return warned(name, value, trouble) if trouble else passed(name, value)
