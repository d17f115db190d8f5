"""The type that an unquantized model is quantized to on this machine. README.md has the rule with its reasons."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from appliance.errors import ModelUnreadableError
from appliance.model import Model, digest, plain_name
from appliance.model.files.quantized import AUTO_KINDS, Quantization, QuantizedFile, list_quantized
from appliance.model.formats.parts import read_whole
from appliance.model.shapes.described import requantized
from appliance.selection.candidates import CORE_GB_S
from appliance.selection.forecast import forecast, without_profile
from appliance.selection.rank import FLUENT_TOKENS_PER_S, Forecast, usual_context
from appliance.start.inputs import StartInputs

# Decode against the origin. Every type below 16 bits reads at least 1.8 times fewer bytes: a smaller gain means that
# something else limits the speed, and a file of half the size is not worth its loss then.
GAIN = 1.25

Forecasts = Mapping[str, Forecast | str]


def decide(start: StartInputs) -> Quantization:
    """Decide for an unquantized model whose type the settings allow to change."""
    settings, origin = start.settings, start.inputs.model
    key = digest(origin.parts, origin.header_bytes).key
    files = list_quantized(settings.models_dir, [key])
    made = {file.note.kind: file for file in files if file.note.refused is None}
    refused = {file.note.kind: file.note.refused for file in files if file.note.refused is not None}
    asked = AUTO_KINDS if settings.quantize == "auto" else (settings.quantize,)
    kinds = tuple(kind for kind in asked if kind not in refused)
    models, problem = _models(start, kinds)
    if problem or not kinds:
        problem = problem or "; ".join(f"{kind} was refused: {why}" for kind, why in refused.items())
        return Quantization(origin=origin, digest=key, kind=None, reason=problem)
    wanted = settings.ctx_size or usual_context(settings.mode, origin.native_context)
    forecasts: dict[str, Forecast | str] = {}
    # One that is on the volume is judged first: free memory differs from start to start, and a second type would cost
    # room and minutes for little.
    for kind in [kind for kind in kinds if kind in made]:
        forecasts[kind] = _forecast(start, models[kind], wanted)
        if _is_good(forecasts[kind], wanted, is_asked=settings.quantize != "auto"):
            return _quantization(start, key, models, kind, "made by an earlier start", made[kind])
    original = _forecast(start, origin, wanted)
    fits = not isinstance(original, str)
    for kind in kinds:
        forecasts.setdefault(kind, _forecast(start, models[kind], wanted))
    if settings.quantize == "auto":
        chosen, reason = choose_kind(forecasts, original, wanted)
    elif isinstance(words := forecasts[settings.quantize], str):
        chosen, reason = None, f"{settings.quantize} does not fit: {words}"
    else:
        chosen, reason = settings.quantize, f"--quantize asks for it ({settings.sources['quantize']})"
    if chosen is None:
        return Quantization(origin=origin, digest=key, kind=None, reason=reason)
    found = _quantization(start, key, models, chosen, reason, made.get(chosen))
    return replace(found, comes_first=not fits and found.file is None)


def _quantization(
    start: StartInputs, key: str, models: Mapping[str, Model], kind: str, reason: str, file: QuantizedFile | None
) -> Quantization:
    origin = start.inputs.model
    return Quantization(origin=origin, digest=key, kind=kind, reason=reason, model=models[kind], file=file)


def _models(start: StartInputs, kinds: tuple[str, ...]) -> tuple[dict[str, Model], str]:
    """Return the model in each type, and why there is none if its tensors do not allow to predict one."""
    origin = start.inputs.model
    try:
        gguf = read_whole(origin.path)
        found = {kind: requantized(gguf, kind) for kind in kinds}
    except (ValueError, KeyError, IndexError, ArithmeticError, ModelUnreadableError) as error:
        return {}, f"its size in another type is unknown: {type(error).__name__}: {error}"
    name = origin.called or plain_name(origin.path)
    return {
        kind: replace(model, projector=origin.projector, adapters=origin.adapters, called=name)
        for kind, model in found.items()
    }, ""


def _forecast(start: StartInputs, model: Model, wanted: int) -> Forecast | str:
    cores = start.inputs.hardware.cpu.cores
    inputs = replace(start.inputs, model=model, dram_gb_s_max=CORE_GB_S * cores)
    return forecast(without_profile(start.engine, start.install, inputs), wanted)


def _is_good(found: Forecast | str, wanted: int, *, is_asked: bool) -> bool:
    if isinstance(found, str):
        return False
    return is_asked or (found.context >= wanted and (found.decode_tokens_per_s or 0.0) >= FLUENT_TOKENS_PER_S)


def choose_kind(forecasts: Forecasts, original: Forecast | str | None, wanted: int) -> tuple[str | None, str]:
    """Return the type and the reason; None if the original stays. `forecasts` has the types, the largest first.

    The whole wanted context counts first, at most the longest that any of them can have. Of the types that have it,
    those count that decode GAIN times as fast as the original, if that has it too. The largest of them that decodes
    FLUENT_TOKENS_PER_S is taken, else the fastest. Pure.
    """
    fitting = {kind: found for kind, found in forecasts.items() if not isinstance(found, str)}
    if not fitting:
        words = next((found for found in forecasts.values() if isinstance(found, str)), "")
        return None, f"no type fits: {words}"
    stays = original if isinstance(original, Forecast) else None
    context = min(wanted, max(found.context for found in (*fitting.values(), *([stays] if stays else []))))
    whole = {kind: found for kind, found in fitting.items() if found.context >= context}
    decode_before = stays.decode_tokens_per_s if stays and stays.context >= context else None
    has_original = stays is not None and stays.context >= context
    if has_original:
        whole = {kind: found for kind, found in whole.items() if _gains(found, decode_before)}
        if not whole:
            return None, f"no smaller type has {context:,} tokens and decodes {GAIN:g} times as fast"
    fluent = [kind for kind, found in whole.items() if (found.decode_tokens_per_s or 0.0) >= FLUENT_TOKENS_PER_S]
    fastest = max(whole, key=lambda kind: whole[kind].decode_tokens_per_s or 0.0)
    chosen = fluent[0] if fluent else fastest
    return chosen, _reason(whole[chosen], context, decode_before, is_largest=bool(fluent), original=original)


def _gains(found: Forecast, decode_before: float | None) -> bool:
    """True if the gain is known to be large enough."""
    decode = found.decode_tokens_per_s
    return decode is not None and decode_before is not None and decode >= GAIN * decode_before


def _reason(
    found: Forecast, context: int, decode_before: float | None, *, is_largest: bool, original: Forecast | str | None
) -> str:
    decode = found.decode_tokens_per_s
    speed = f" and {decode:,.1f} tok/s" if decode else ""
    which = "largest type" if is_largest else "fastest type"
    words = f"the {which} with {context:,} tokens{speed}"
    if decode_before:
        return f"{words} instead of {decode_before:,.1f}"
    return (
        f"{words}; the original {original}" if isinstance(original, str) else f"{words}; the original has fewer tokens"
    )
