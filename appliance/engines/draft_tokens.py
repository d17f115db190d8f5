"""The setting `draft_tokens` in a plan, for the planners of all engines. Pure."""

from __future__ import annotations

from appliance.errors import ConfigError
from appliance.plan import KINDS
from appliance.settings import Settings


def check_draft_tokens(settings: Settings) -> None:
    """Raise ConfigError if a number of draft tokens is set and no kind of speculative decoding is named."""
    if settings.draft_tokens is None or settings.speculation in KINDS:
        return
    asked = f"speculation is {settings.speculation} ({settings.sources['speculation']})"
    why = "nothing is drafted" if settings.speculation == "off" else "which chooses the number by measuring"
    message = f"setting draft_tokens has no effect: {settings.draft_tokens} ({settings.sources['draft_tokens']}): "
    raise ConfigError(message + f"{asked}, {why}", hint=f"name a kind with --speculation: {', '.join(KINDS)}")
