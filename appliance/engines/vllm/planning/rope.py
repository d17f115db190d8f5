"""A context above the model's native length: refused, or reached by YaRN (arXiv 2309.00071) through --hf-overrides.

Pure.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

from appliance.errors import ConfigError
from appliance.model import Model
from appliance.settings import Settings

TRIED_FACTOR = 4.0  # the largest that Qwen's model cards name


def wanted_context(settings: Settings, model: Model) -> int:
    """Raises ConfigError (10) for a context that the model cannot keep, and for a scaling that it cannot have."""
    asked, native = settings.ctx_size, model.native_context
    if settings.rope_scaling == "yarn":
        _check_yarn(settings, model)
    elif asked is not None and asked > native:
        message = f"context length is above the model's native {native:,}: {asked:,} ({settings.sources['ctx_size']})"
        hint = f"use --ctx-size {native}, or add --rope-scaling yarn: factor {asked / native:.3g}, at some loss"
        raise ConfigError(message, hint=hint)
    return asked or native


def overrides_for(settings: Settings, model: Model) -> str | None:
    """JSON of --hf-overrides; None up to the native length."""
    if settings.rope_scaling != "yarn" or settings.ctx_size is None:
        return None
    native = model.native_context
    inner = _language_part(model.config)
    before = inner.get("rope_parameters")
    kept = dict(before) if isinstance(before, Mapping) else {}
    if "rope_theta" not in kept and isinstance(inner.get("rope_theta"), int | float):
        kept["rope_theta"] = inner["rope_theta"]
    scaled = kept | {
        "rope_type": "yarn",
        # Rounded up: vLLM multiplies again and cuts off, and may then miss the context by one token.
        "factor": math.ceil(settings.ctx_size / native * 10_000) / 10_000,
        "original_max_position_embeddings": native,
    }
    changed: dict[str, Any] = {"rope_parameters": scaled}
    name = next((key for key in ("text_config", "llm_config") if isinstance(model.config.get(key), Mapping)), None)
    return json.dumps({name: changed} if name else changed, sort_keys=True, separators=(",", ":"))


def rope_words(settings: Settings, model: Model) -> str:
    """As in "beyond the model's native 40,960 by YaRN, factor 3.2"."""
    factor = (settings.ctx_size or 0) / model.native_context
    more = ", more than was tried by those who publish such models" if factor > TRIED_FACTOR else ""
    return (
        f"beyond the model's native {model.native_context:,} by YaRN, factor {factor:.4g}{more}; "
        "short texts lose a little by it"
    )


def _check_yarn(settings: Settings, model: Model) -> None:
    asked, native, source = settings.ctx_size, model.native_context, settings.sources["rope_scaling"]
    own = _own_scaling(model.config)
    if own is not None:
        message = f"model has a RoPE scaling of its own, {own}: rope_scaling 'yarn' ({source}), {model.path.name}"
        raise ConfigError(message, hint=f"take it out; this model reaches {native:,} tokens as it is")
    if asked is None or asked <= native:
        given = "no context length is set" if asked is None else f"the context length is {asked:,}"
        message = f"rope_scaling 'yarn' ({source}) is for a context above the model's native {native:,}, and {given}"
        raise ConfigError(message, hint=f"add --ctx-size, as {2 * native}, or take --rope-scaling out")


def _own_scaling(config: Mapping[str, Any]) -> str | None:
    inner = _language_part(config)
    for name in ("rope_scaling", "rope_parameters"):
        found = inner.get(name)
        if isinstance(found, Mapping):
            kind = found.get("rope_type") or found.get("type")
            if kind not in (None, "default", "mrope"):
                return str(kind)[:40]
    return None


def _language_part(config: Mapping[str, Any]) -> Mapping[str, Any]:
    for name in ("text_config", "llm_config"):
        if isinstance(config.get(name), Mapping):
            inner: Mapping[str, Any] = config[name]
            return inner
    return config
