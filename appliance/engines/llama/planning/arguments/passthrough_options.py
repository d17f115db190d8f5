"""Options of llama-server that the user sets and no plan decides. They come from today's settings and files, even if
the plan was measured by an earlier start. Pure."""

from __future__ import annotations

from appliance.engines.llama.planning.arguments.engine_args import engine_args_choice
from appliance.engines.llama.planning.memory.attachments import adapters_mib, projector_mib
from appliance.engines.thinking import thinking_choice
from appliance.model import Model, Projector
from appliance.plan import Device
from appliance.plan.parts.choice import Choice
from appliance.settings import Settings
from appliance.values import dataclass


@dataclass(frozen=True, kw_only=True)
class Extras:
    engine_args: tuple[str, ...] = ()
    chat_template_file: str | None = None
    reasoning_format: str | None = None  # None: the engine's default
    projector: str | None = None  # path; None: text only
    projector_on_host: bool = False
    reads: tuple[str, ...] = ()  # inputs of the projector: image, audio
    adapters: tuple[tuple[str, float], ...] = ()  # paths and scales
    pooling: str | None = None  # None: as the model's header says


def extras_of(settings: Settings, model: Model, *, on_host: bool) -> Extras:
    """Return the options for this model. `on_host` is True if the projector lies in host memory."""
    thinking = () if settings.thinking == "auto" else ("--reasoning", settings.thinking)
    is_explicit, projector = settings.pooling != "auto", model.projector
    return Extras(
        projector=str(projector.path) if projector else None,
        projector_on_host=on_host and projector is not None,
        reads=projector.reads if projector else (),
        adapters=tuple((str(adapter.path), adapter.scale) for adapter in model.adapters),
        pooling=model.pooling if is_explicit or model.is_reranker else None,
        engine_args=(*thinking, *settings.engine_arg),
        chat_template_file=str(settings.chat_template_file) if settings.chat_template_file else None,
        reasoning_format=None if settings.reasoning_format == "auto" else settings.reasoning_format,
    )


def extra_choices(
    settings: Settings, model: Model, extras: Extras, left_away: Projector | None, devices: tuple[Device, ...]
) -> tuple[Choice, ...]:
    """Return the choices for attachments that are loaded or left away, and for options that the user set."""
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
    loaded = (
        *_projector(settings, model.projector, extras, left_away),
        *_adapters(settings, model),
        *_pooling(settings, model),
    )
    return (*loaded, *found, *thinking_choice(settings, model), *((passed,) if passed else ()))


def _projector(
    settings: Settings, projector: Projector | None, extras: Extras, left_away: Projector | None
) -> tuple[Choice, ...]:
    """Return the choice for the projector, also if it is turned off or has no room; empty if the model has none."""
    source = settings.sources["mmproj"]
    if left_away is not None:
        why = f"{left_away.path.name} is left away, since the model does not fit beside it: no images or audio are read"
        return (Choice(name="mmproj", value="off", reason=why, source="memory", is_refusal=True),)
    if projector is None:
        why = "asked for: the model is served for text alone"
        off = Choice(name="mmproj", value="off", reason=why, source=source)
        return (off,) if settings.mmproj == "off" else ()
    mib = projector_mib(projector, on_gpu=not extras.projector_on_host)
    why = (
        f"{' and '.join(projector.reads)}: {projector.weights_mib:,.0f} MiB "
        f"{'in host memory' if extras.projector_on_host else 'on CUDA0'}, "
        f"{mib - projector.weights_mib:,.0f} more to work in; --mmproj off serves text alone"
    )
    source = source if settings.is_set("mmproj") else "beside the model"
    return (Choice(name="mmproj", value=projector.path.name, reason=why, source=source),)


def _adapters(settings: Settings, model: Model) -> tuple[Choice, ...]:
    if not model.adapters:
        return ()
    names = ", ".join(f"{adapter.path.name}:{adapter.scale:g}" for adapter in model.adapters)
    why = f"{adapters_mib(model):,.1f} MiB, with the layers that they change; every token reads them, too"
    return (Choice(name="lora", value=names, reason=why, source=settings.sources["lora"]),)


def _pooling(settings: Settings, model: Model) -> tuple[Choice, ...]:
    if not model.is_embedding_model:
        return ()
    gives = "a reranker: it scores documents for a query, and gives no vectors" if model.is_reranker else "vectors"
    source = settings.sources["pooling"] if settings.pooling != "auto" else "model"
    return (Choice(name="pooling", value=model.pooling or "none", reason=gives, source=source),)
