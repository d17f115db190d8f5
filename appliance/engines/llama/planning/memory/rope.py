"""A context above the model's native length: refused, or reached by scaling RoPE with YaRN (arXiv 2309.00071). Pure.

The pinned server limits each slot to the header's context length (tools/server/server-context.cpp, n_ctx_slot), so a
longer context also overrides that key. YaRN scales texts of any length by one factor, so short texts lose quality.
Qwen's model cards name 4 as the largest factor that was tried; benchmarks/yarn.py measures the loss.
"""

from __future__ import annotations

from appliance.engines.llama.planning.memory.memory import padded
from appliance.errors import ConfigError
from appliance.model import Model
from appliance.settings import Settings
from appliance.values import dataclass

TRIED_FACTOR = 4.0


@dataclass(frozen=True, kw_only=True)
class Rope:
    """Scaling of RoPE for a context above the native length."""

    architecture: str
    factor: float | None  # of YaRN; None: the file carries a scaling that reaches `context`
    original: int  # the native length
    context: int  # the context length that is reached


def check_context(settings: Settings, model: Model) -> None:
    """Raise ConfigError if --ctx-size exceeds the model's reach, or if --rope-scaling does not suit the model."""
    asked, native = settings.ctx_size, model.native_context
    if settings.rope_scaling == "yarn":
        _check_yarn(settings, model)
    elif asked is not None and asked > model.longest_context:
        message = (
            f"context length is above the model's native {native:,}: {asked:,} ({settings.sources['ctx_size']}); "
            f"the engine would give no request more than {native:,}"
        )
        longest = model.longest_context
        hint = f"use --ctx-size {longest}"
        if _why_not(model) is None:
            hint += f", or add --rope-scaling yarn: factor {asked / native:.3g}, at some loss"
        raise ConfigError(message, hint=hint)


def _why_not(model: Model) -> str | None:
    """Return words that follow "model" on why YaRN cannot scale it; None if it can."""
    if model.rope_scaling is not None:
        return f"has a RoPE scaling of its own, {model.rope_scaling.kind} by {model.rope_scaling.factor:g}"
    if model.positions == "table":
        return "has no RoPE to scale but a learned row for each position, and none beyond its native length"
    return "has no RoPE to scale" if model.positions == "none" else None


def _check_yarn(settings: Settings, model: Model) -> None:
    asked, native, source = settings.ctx_size, model.native_context, settings.sources["rope_scaling"]
    if (why := _why_not(model)) is not None:
        message = f"model {why}: rope_scaling 'yarn' ({source}), {model.path.name}"
        raise ConfigError(message, hint=f"take it out; this model reaches {model.longest_context:,} tokens as it is")
    if asked is None or asked <= native:
        given = "no context length is set" if asked is None else f"the context length is {asked:,}"
        message = f"rope_scaling 'yarn' ({source}) is for a context above the model's native {native:,}, and {given}"
        raise ConfigError(message, hint=f"add --ctx-size, as {2 * native}, or take --rope-scaling out")


def served_context(settings: Settings, model: Model, tokens: int) -> int:
    """Return the context length rounded up to the cache's step; without YaRN at most the model's longest context."""
    reaches = padded(tokens) if settings.rope_scaling == "yarn" else model.longest_context
    return min(padded(tokens), max(reaches, tokens))


def rope_for(settings: Settings, model: Model, context: int) -> Rope | None:
    """Return the scaling that a context length needs; None up to the native length."""
    native = model.native_context
    if context <= native:
        return None
    factor = context / native if settings.rope_scaling == "yarn" else None
    return Rope(architecture=model.architecture, factor=factor, original=native, context=context)


def in_words(rope: Rope) -> str:
    """Return words on the scaling, for example "beyond the model's native 40,960 by YaRN, factor 3.2"."""
    beyond = f"beyond the model's native {rope.original:,}"
    if rope.factor is None:
        return f"{beyond}, by the RoPE scaling that the file carries"
    more = ", more than was tried by those who publish such models" if rope.factor > TRIED_FACTOR else ""
    return f"{beyond} by YaRN, factor {rope.factor:.4g}{more}; short texts lose a little by it"
