"""One value of a plan, with the reason for it."""

from __future__ import annotations

from appliance.values import dataclass


@dataclass(frozen=True, kw_only=True)
class Choice:
    """One value of a plan with the reason for it; `source` is the fact or setting that decided."""

    name: str
    value: str
    reason: str
    source: str
    detail: str = ""  # more figures behind the reason, shown with --explain --verbose
    is_refusal: bool = False  # True if a request of the user is not fulfilled: every start says so
