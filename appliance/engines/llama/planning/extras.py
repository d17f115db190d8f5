"""What a user asks llama-server for that no plan decides: taken from the settings and files of today, also where a plan
was measured long ago. Pure."""

from __future__ import annotations

from appliance.engines.llama.planning.engine_args import engine_args_choice
from appliance.plan import Device
from appliance.plan.choice import Choice
from appliance.settings import Settings
from appliance.values import dataclass


@dataclass(frozen=True, kw_only=True)
class Extras:
    engine_args: tuple[str, ...] = ()
    chat_template_file: str | None = None
    reasoning_format: str | None = None


def extras_of(settings: Settings) -> Extras:
    return Extras(
        engine_args=settings.engine_arg,
        chat_template_file=str(settings.chat_template_file) if settings.chat_template_file else None,
        reasoning_format=None if settings.reasoning_format == "auto" else settings.reasoning_format,
    )


def extra_choices(settings: Settings, devices: tuple[Device, ...]) -> tuple[Choice, ...]:
    """Those that were asked for."""
    words = {
        "reserve_mib": (
            f"{settings.reserve_mib:,}",
            "left alone of what is free on each GPU" if devices else "there is no GPU to leave it on",
        ),
        "chat_template_file": (str(settings.chat_template_file), "used instead of the model's own template"),
        "reasoning_format": (settings.reasoning_format, "asked for"),
    }
    found = tuple(
        Choice(name=name, value=value, reason=why, source=settings.sources[name])
        for name, (value, why) in words.items()
        if settings.is_set(name)
    )
    passed = engine_args_choice(settings)
    return (*found, passed) if passed else found
