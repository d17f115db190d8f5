"""Attachments: projector, LoRA adapters and chat template that settings name in addition to the model.

Each is checked before anything is planned: a wrong one would end the engine while the model is loaded.
"""

from __future__ import annotations

import difflib
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

from appliance.errors import ConfigError, printable
from appliance.model import Adapter, Model, check_match, find_model, list_models, read_adapter, read_projector
from appliance.model.architecture.facts import CALLS_TOOLS, REASONS
from appliance.settings import Settings, parse_adapter
from appliance.system.disk import hint_of_empty

TEMPLATE_LIMIT_BYTES = 1024 * 1024  # the longest known ones have 30 KiB


def check_files(settings: Settings) -> None:
    """Check the files before a model is fetched for hours. Raises ConfigError (10) for a missing one.

    The projector is not checked: it may come with the model.
    """
    for word in settings.lora:
        _adapter_path(parse_adapter(word)[0], settings)
    if settings.chat_template_file is not None:
        _read_template(settings.chat_template_file, settings.sources["chat_template_file"])


def with_attachments(model: Model, settings: Settings, *, is_here: bool = True) -> Model:
    """Return the model with its attachments. With `is_here` False only its header or shape is known.

    Raises ConfigError (10) for a missing file, ModelUnreadableError (30) for a file of another model.
    """
    model = _with_projector(model, settings)
    if settings.lora and not is_here:
        message = (
            f"setting lora cannot be planned: {settings.lora[0]} ({settings.sources['lora']}): no file of {model.title}"
        )
        raise ConfigError(
            message, hint="an adapter is held to the matrices of the model's file: fetch it, or take --lora out"
        )
    model = replace(model, adapters=_adapters(model, settings))
    if settings.pooling != "auto":
        _check_pooling(model, settings)
        model = replace(model, pooling=settings.pooling, is_embedding_model=True)
    if settings.chat_template_file is not None:
        text = _read_template(settings.chat_template_file, settings.sources["chat_template_file"])
        calls_tools, reasons = bool(CALLS_TOOLS.search(text)), bool(REASONS.search(text))
        model = replace(model, chat_template=text, calls_tools=calls_tools, reasons=reasons)
    return model


def _check_pooling(model: Model, settings: Settings) -> None:
    given = f"pooling '{settings.pooling}' ({settings.sources['pooling']}), {model.title}"
    if model.is_reranker and settings.pooling != "rank":
        message = f"model is a reranker, whose vectors are one score each: {given}"
        raise ConfigError(message, hint="take --pooling out, and ask for /v1/rerank; vectors take an embedding model")
    if settings.pooling == "rank" and not (model.is_reranker or model.can_rank):
        message = f"model has no head that scores (cls.weight or cls.output.weight): {given}"
        raise ConfigError(message, hint="take --pooling out, or give a reranker")


def attachment_sizes(model: Model) -> dict[str, Any]:
    """Return the sizes of the attachments, for the profile's key."""
    projector = {"projector": model.projector.weights_bytes} if model.projector else {}
    return {**projector, **({"adapters": [each.weights_bytes for each in model.adapters]} if model.adapters else {})}


def _with_projector(model: Model, settings: Settings) -> Model:
    request, source = settings.mmproj, settings.sources["mmproj"]
    if request == "off":
        return replace(model, projector=None)
    if request != "auto":
        places = (settings.models_dir / request, model.path.parent / request)  # for an absolute path both are that path
        path = next((place for place in places if _is_file(place)), None)
        if path is None:
            message = f"setting mmproj names no file: '{printable(request)}' ({source})"
            hint = next(filter(None, map(hint_of_empty, places)), None)
            hint = hint or f"put it beside the model or into {settings.models_dir}, or give its path"
            raise ConfigError(message, hint=hint)
        model = replace(model, projector=read_projector(path))
    if model.projector is not None:
        check_match(model.projector, model, source if request != "auto" else "beside the model")
    return model


def _adapters(model: Model, settings: Settings) -> tuple[Adapter, ...]:
    asked = [parse_adapter(word) for word in settings.lora]
    found = tuple(read_adapter(_adapter_path(name, settings), scale, model) for name, scale in asked)
    twice = next((path for path, count in Counter(each.path for each in found).items() if count > 1), None)
    if twice is not None:
        message = f"setting lora names one adapter twice: {printable(str(twice))} ({settings.sources['lora']})"
        raise ConfigError(message, hint="give it once, with the sum of the scales")
    return found


def _adapter_path(name: str, settings: Settings) -> Path:
    source = settings.sources["lora"]
    path = find_model(name, settings.models_dir)
    if path is None:
        names = {each.name: each for each in list_models(settings.models_dir)}
        near = difflib.get_close_matches(name, [*names, *(each.stem for each in names.values())], 1)
        message = f"setting lora names no file: '{printable(name)}' ({source})"
        hint = f"perhaps you meant {printable(near[0])}" if near else f"put it into {settings.models_dir}"
        raise ConfigError(message, hint=hint)
    if set(str(path)) & set(':,"\n'):
        message = f"adapter's path cannot be told to the engine: {printable(str(path))} ({source})"
        raise ConfigError(message, hint="rename it: without colons, commas and quotation marks")
    return path


def _why_no_file(path: Path) -> str:
    if path.is_dir():
        return "it is a folder"
    return "it is no file" if path.exists() else "no such file"


def _read_template(path: Path, source: str) -> str:
    try:
        is_file = path.is_file()  # opening a pipe would block the start for ever
        text = path.read_bytes() if is_file and path.stat().st_size <= TEMPLATE_LIMIT_BYTES else None
        if text is not None:
            return text.decode("utf-8")
        reason = f"it is longer than {TEMPLATE_LIMIT_BYTES:,} bytes" if is_file else _why_no_file(path)
    except UnicodeDecodeError:
        reason = "it is no UTF-8"
    except (OSError, ValueError) as error:  # ValueError: a NUL byte in the path
        reason = ((error.strerror if isinstance(error, OSError) else None) or str(error)).lower()
    message = f"setting chat_template_file cannot be read: '{printable(str(path))}' ({source}): {reason}"
    raise ConfigError(message, hint=hint_of_empty(path) or "give the path of a Jinja template inside the container")


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except (OSError, ValueError):
        return False
