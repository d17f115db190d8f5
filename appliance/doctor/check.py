"""One check: what was looked at, what was seen, and what to do about it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from appliance.errors import FatalError


@dataclass(frozen=True, kw_only=True)
class Check:
    """`exit_code` is what a start would end with because of this; 0 unless it failed."""

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
    """As a start would end: its words, its hint, its code."""
    return Check(name=name, status="fail", value=error.message, remedy=error.hint, exit_code=error.exit_code)


def judged(name: str, value: str, trouble: str | None) -> Check:
    """A warning when there is a remedy to give."""
    return warned(name, value, trouble) if trouble else passed(name, value)
