"""The speed that the profile promises for the plan that serves. Pure."""

from __future__ import annotations

from appliance.plan import Plan
from appliance.profile import Profile
from appliance.tune.figures.curve import Curve
from appliance.tune.figures.measurement import curve_of


class Reference:
    """The curve of one plan."""

    def __init__(self, curve: Curve) -> None:
        self._curve = curve

    def tokens_per_s(self, depth: float) -> float:
        """Return the decode speed with so many tokens in the cache."""
        return 1000 / self._curve.decode_ms(depth)

    def prefill_s(self, first: float, last: float) -> float:
        """Return the time to read a prompt's tokens from `first` to `last`."""
        return self._curve.prefill_s(first, last) if last > first else 0.0

    def answer_s(self, cached: float, tokens_in: int, tokens_out: int) -> float:
        """Return the time of an answer whose first `cached` tokens of the prompt are in the cache."""
        return self.prefill_s(cached, tokens_in) + self._curve.decode_s(tokens_in, max(1, tokens_out))


def reference_of(plan: Plan | None, profile: Profile | None) -> Reference | None:
    """Return the reference; None if this plan was not measured."""
    if plan is None or profile is None:
        return None
    looks = [look for look in profile.measurements if look.key in plan.keys and look.points]
    return Reference(curve_of(looks)) if looks else None
