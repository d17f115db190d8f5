"""One value of a plan, and why it is that."""

from __future__ import annotations

from appliance.values import dataclass


@dataclass(frozen=True, kw_only=True)
class Choice:
    """One value of a plan with the reason for it; `source` says which fact or setting decided."""

    name: str
    value: str
    reason: str
    source: str
    detail: str = ""  # figures behind the reason, for those who ask for them
    is_refusal: bool = False  # something was asked for and is not done: said at the start, not only when asked
