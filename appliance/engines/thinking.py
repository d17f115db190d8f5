"""The setting `thinking` in a plan, for the planners of all engines. Pure."""

from __future__ import annotations

from appliance.model import Model
from appliance.plan.parts.choice import Choice
from appliance.settings import Settings


def thinking_choice(settings: Settings, model: Model) -> tuple[Choice, ...]:
    """Return the choice for `thinking`; empty if nobody set it."""
    if not settings.is_set("thinking"):
        return ()
    has_switch = model.reasons or settings.thinking == "auto"
    why = "of its chat template's switch, if it has one; what a request says goes before it"
    return (
        Choice(
            name="thinking",
            value=settings.thinking,
            reason=f"the default {why}" if has_switch else "without effect: its chat template has no reasoning",
            source=settings.sources["thinking"],
            is_refusal=not has_switch,
        ),
    )
