"""Context lengths above the native one: refused, or reached by YaRN (arXiv 2309.00071) through --hf-overrides. Pure.

For most kinds of RoPE scaling vLLM takes `max_position_embeddings` as the scaled length. For the others it multiplies
the value by the factor (config/model.py `_get_and_verify_max_len`, 0.32.0 and 0.33.0).
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

from appliance.errors import ConfigError
from appliance.model import Model
from appliance.model.architecture.facts import CONTEXT_LIMIT, FACTOR_LIMIT
from appliance.plan import Choice
from appliance.settings import Settings
from appliance.values import dataclass

TRIED_FACTOR = 4.0  # the largest that Qwen's model cards name
# Kinds of scaling for which vLLM does not multiply the native length by the factor.
_SCALED_ALREADY = frozenset({"su", "longrope", "llama3", "yarn", "deepseek_yarn", "deepseek_llama_scaling"})


def wanted_context(settings: Settings, model: Model) -> int:
    """Return the context length that was asked for, else the native one. Raises ConfigError (10) if the model does not
    reach it or cannot have the RoPE scaling that was asked for."""
    asked, native = settings.ctx_size, model.native_context
    if settings.rope_scaling == "yarn":
        _check_yarn(settings, model)
    elif asked is not None and asked > native:
        _check_reach(settings, model, asked)
    return asked or native


def _check_reach(settings: Settings, model: Model, asked: int) -> None:
    """Raise ConfigError (10) if vLLM would refuse so long a context."""
    native, scaling = model.native_context, _own_scaling(model.config)
    message = f"context length is above the model's native {native:,}: {asked:,} ({settings.sources['ctx_size']})"
    if scaling is None:
        hint = f"use --ctx-size {native}, or add --rope-scaling yarn: factor {asked / native:.3g}, at some loss"
        raise ConfigError(message, hint=hint)
    if asked <= scaling.derived(native):
        return
    hint = f"use --ctx-size {int(scaling.derived(native))}: the model has a RoPE scaling of its own, {scaling.kind}"
    if (reach := scaling.reach) and reach > native:
        hint = (
            f"write max_position_embeddings {reach} into {model.path / 'config.json'}: its {scaling.kind} of factor "
            f"{scaling.factor:g} over {scaling.original:,} reaches so far, and vLLM serves what that key says; or use "
            f"--ctx-size {native}"
        )
    raise ConfigError(message, hint=hint)


def unused_reach(model: Model) -> Choice | None:
    """Return a warning if the model's own YaRN scaling reaches further than its `max_position_embeddings`, else
    None."""
    scaling, native = _own_scaling(model.config), model.native_context
    if scaling is None or scaling.kind != "yarn" or not scaling.reach or scaling.reach <= native:
        return None
    why = (
        f"config.json has YaRN of factor {scaling.factor:g} over {scaling.original:,}, which is {scaling.reach:,}, and "
        f"max_position_embeddings {native:,}, which vLLM serves: write {scaling.reach} there for all of it"
    )
    return Choice(name="rope_scaling", value="yarn", reason=why, source="model", is_refusal=True)


def overrides_for(settings: Settings, model: Model) -> str | None:
    """Return the JSON of --hf-overrides, or None without YaRN."""
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
        # Rounded up, so that it reaches the context.
        "factor": math.ceil(settings.ctx_size / native * 10_000) / 10_000,
        "original_max_position_embeddings": native,
    }
    # vLLM refuses a context above max_position_embeddings, whatever the factor.
    changed: dict[str, Any] = {"rope_parameters": scaled, "max_position_embeddings": settings.ctx_size}
    name = next((key for key in ("text_config", "llm_config") if isinstance(model.config.get(key), Mapping)), None)
    return json.dumps({name: changed} if name else changed, sort_keys=True, separators=(",", ":"))


def rope_words(settings: Settings, model: Model) -> str:
    """Return words such as "beyond the model's native 40,960 by YaRN, factor 3.2"."""
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
        message = f"model has a RoPE scaling of its own, {own.kind}: rope_scaling 'yarn' ({source}), {model.path.name}"
        hint = f"take it out; this model reaches {int(own.derived(native)):,} tokens as it is"
        if own.kind == "yarn" and own.reach and own.reach > native:
            hint += f", and {own.reach:,} with max_position_embeddings {own.reach} in {model.path / 'config.json'}"
        raise ConfigError(message, hint=hint)
    if asked is None or asked <= native:
        given = "no context length is set" if asked is None else f"the context length is {asked:,}"
        message = f"rope_scaling 'yarn' ({source}) is for a context above the model's native {native:,}, and {given}"
        raise ConfigError(message, hint=f"add --ctx-size, as {2 * native}, or take --rope-scaling out")


@dataclass(frozen=True, kw_only=True)
class _Scaling:
    """RoPE scaling of config.json. `original` is the length before scaling; None if config.json does not say."""

    kind: str
    factor: float
    original: int | None
    is_applied: bool  # True if the native length already includes the factor

    @property
    def reach(self) -> int | None:
        return int(self.factor * self.original) if self.original else None

    def derived(self, native: int) -> float:
        """Return the longest context that vLLM accepts, tokens."""
        return native if self.is_applied else native * self.factor


def _own_scaling(config: Mapping[str, Any]) -> _Scaling | None:
    inner = _language_part(config)
    for name in ("rope_scaling", "rope_parameters"):
        found = inner.get(name)
        if isinstance(found, Mapping):
            kind = found.get("rope_type") or found.get("type")
            if kind not in (None, "default", "mrope"):
                is_applied = kind in _SCALED_ALREADY or "gemma3" in str(inner.get("model_type"))
                factor, original = _factor(found), _original(found)
                return _Scaling(kind=str(kind)[:40], factor=factor, original=original, is_applied=is_applied)
    return None


def _factor(found: Mapping[str, Any]) -> float:
    value = found.get("factor")
    is_factor = isinstance(value, int | float) and not isinstance(value, bool) and 1 <= value <= FACTOR_LIMIT
    return float(value) if is_factor else 1.0  # type: ignore[arg-type]


def _original(found: Mapping[str, Any]) -> int | None:
    value = found.get("original_max_position_embeddings")
    return value if type(value) is int and 0 < value <= CONTEXT_LIMIT else None


def _language_part(config: Mapping[str, Any]) -> Mapping[str, Any]:
    for name in ("text_config", "llm_config"):
        if isinstance(config.get(name), Mapping):
            inner: Mapping[str, Any] = config[name]
            return inner
    return config
