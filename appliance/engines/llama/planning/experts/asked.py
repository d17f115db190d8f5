"""Settings about a mixture's experts: refused if model or engine cannot take them. Pure."""

from __future__ import annotations

from dataclasses import replace

from appliance.errors import ConfigError
from appliance.image_facts import EngineFacts
from appliance.model import Model
from appliance.plan import Choice
from appliance.settings import Settings

SLOTS_FLAG = "--moe-slots"
TRACE_FLAG = "--moe-trace"


def check_experts(settings: Settings, engine: EngineFacts, model: Model) -> None:
    """Raise ConfigError for a number of experts or slots that the engine would refuse, and for a flag that it lacks."""
    _check_used(settings, model)
    _check_slots(settings, engine, model)
    if settings.trace_experts:
        source = settings.sources["trace_experts"]
        if not model.experts:
            message = f"setting trace_experts is on ({source}), and this model has no experts: {model.path.name}"
            raise ConfigError(message, hint="take it out")
        if TRACE_FLAG not in engine.flags:
            message = f"setting trace_experts is on ({source}), and the engine has no {TRACE_FLAG}: {engine.build}"
            raise ConfigError(message, hint="take it out, or use a newer image")


def _check_used(settings: Settings, model: Model) -> None:
    asked, most = settings.experts_used, model.experts_used
    if asked is None:
        return
    source = settings.sources["experts_used"]
    if not model.experts:
        message = f"setting experts_used is {asked} ({source}), and this model has no experts: {model.path.name}"
        raise ConfigError(message, hint="take it out")
    if asked > most:
        message = f"setting experts_used is above the {most} that the model was trained with: {asked} ({source})"
        raise ConfigError(message, hint=f"use --experts-used with 1 to {most}")


def _check_slots(settings: Settings, engine: EngineFacts, model: Model) -> None:
    asked = settings.moe_slots
    if not isinstance(asked, int) or not model.experts:
        return
    source = settings.sources["moe_slots"]
    if SLOTS_FLAG not in engine.flags:
        message = f"setting moe_slots is {asked} ({source}), and the engine has no {SLOTS_FLAG}: {engine.build}"
        raise ConfigError(message, hint="take it out, or use a newer image")
    least = settings.experts_used or model.experts_used
    if asked < least:
        message = f"setting moe_slots is below the {least} experts of one token: {asked} ({source})"
        raise ConfigError(message, hint=f"use --moe-slots {least} or more")


def with_experts_used(model: Model, settings: Settings) -> Model:
    """Return the model as it is served: with as many experts a token as the settings say."""
    return model if settings.experts_used is None else replace(model, experts_used=settings.experts_used)


def overrides_of(model: Model, settings: Settings) -> tuple[str, ...]:
    """Return the engine's metadata overrides; empty if the model is served with the experts it was trained with."""
    asked = settings.experts_used
    return () if asked is None else (f"{model.architecture}.expert_used_count=int:{asked}",)


def used_choice(settings: Settings) -> tuple[Choice, ...]:
    """Return the choice of fewer experts; empty without the setting."""
    asked = settings.experts_used
    if asked is None:
        return ()
    why = "asked for: answers change, as the model was trained with more"
    return (Choice(name="experts_used", value=str(asked), reason=why, source=settings.sources["experts_used"]),)
