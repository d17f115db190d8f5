"""KV cache types: the one to serve with, and those worth measuring. Pure.

The choice comes with its reason; a refusal names the alternatives.
"""

from __future__ import annotations

from appliance.engines.vllm.planning.model.chips import Chip
from appliance.engines.vllm.planning.model.precision import ENGINE_TYPES, OUR_TYPES
from appliance.engines.vllm.planning.model.quantization import Quantization
from appliance.errors import ConfigError
from appliance.image_facts import EngineFacts
from appliance.plan.parts.choice import Choice
from appliance.settings import Settings
from appliance.values import dataclass

_ALIASES = {"fp8": "fp8_e4m3"}  # two names of the same type in vLLM
_E5M2 = "fp8_e5m2"
_BELOW_8_BITS = ("int4", "nvfp4")


@dataclass(frozen=True, kw_only=True)
class KvTypes:
    """Chosen type and types worth measuring (`tried`, the chosen one first). 16 and 32-bit types have the appliance's
    names, such as f16."""

    chosen: str
    tried: tuple[str, ...]
    is_named: bool  # True if the flag is needed, since vLLM would choose another type by itself
    choice: Choice


def choose_kv_types(settings: Settings, engine: EngineFacts, chip: Chip, dtype: str, weights: Quantization) -> KvTypes:
    """Choose the KV cache type. Raises ConfigError (10) with the alternatives if the type that the user set is not
    supported. A type given by the flag overrides the checkpoint's own (layers/attention/attention.py of 0.32, 0.33)."""
    own, there = OUR_TYPES[dtype], _offered(engine, chip, dtype, weights)
    if settings.kv_type != "auto":
        return _asked(settings, chip, dtype, there, weights)
    if weights.kv_type in there:
        why = f"the checkpoint carries the scales of such a cache; {_backend(weights.kv_type, chip)} reads it"
        choice = Choice(name="kv_type", value=weights.kv_type, reason=why, source="model")
        return KvTypes(chosen=weights.kv_type, tried=(weights.kv_type, own), is_named=True, choice=choice)
    why = f"exact, as wide as the model's {dtype}"
    if weights.kv_type:
        why += f"; the checkpoint has scales for {weights.kv_type}, which {chip.name} does not read"
    choice = Choice(name="kv_type", value=own, reason=why, source="default")
    worth = (own,) if weights.kv_type else _worth_measuring(own, there)
    return KvTypes(chosen=own, tried=worth, is_named=weights.kv_type is not None, choice=choice)


def _asked(settings: Settings, chip: Chip, dtype: str, there: tuple[str, ...], weights: Quantization) -> KvTypes:
    asked, source = settings.kv_type, settings.sources["kv_type"]
    if asked not in there:
        message = f"setting kv_type cannot be used on {chip.name}: '{asked}' ({source})"
        message += _why_not(asked, chip, dtype, weights)
        raise ConfigError(message, hint=f"use auto, or one of {', '.join(there)}")
    why = f"asked for; {_backend(asked, chip)} reads it"
    choice = Choice(name="kv_type", value=asked, reason=why, source=source)
    return KvTypes(chosen=asked, tried=(asked,), is_named=weights.kv_type is not None, choice=choice)


def _offered(engine: EngineFacts, chip: Chip, dtype: str, weights: Quantization) -> tuple[str, ...]:
    """Return the types that engine, chip and weights allow. The exact one, as wide as the model's, comes first."""
    never = ("auto", *ENGINE_TYPES.values(), *((_E5M2,) if weights.loads_kv_scales else ()))
    narrow = [name for name in chip.kv_types if name not in never]
    return (OUR_TYPES[dtype], *(name for name in narrow if not engine.kv_types or name in engine.kv_types))


def _worth_measuring(own: str, there: tuple[str, ...]) -> tuple[str, ...]:
    """Return the types worth measuring, each once. Types below 8 bits are not tried unless the user asks for one."""
    wide = (name for name in there if not name.startswith(_BELOW_8_BITS))
    return (own, *(name for name in wide if name != own and _ALIASES.get(name) not in there))


def _backend(kv_type: str, chip: Chip) -> str:
    return chip.kv_types.get(ENGINE_TYPES.get(kv_type, kv_type), chip.backends[0])


def _why_not(asked: str, chip: Chip, dtype: str, weights: Quantization) -> str:
    if asked in ENGINE_TYPES:
        return f": the model is computed in {dtype}, and the cache is either that or narrower"
    if not asked.startswith("fp8"):
        return ""
    if asked == _E5M2 and asked in chip.kv_types and weights.loads_kv_scales:
        return f": beside weights in {weights.name} vLLM refuses it"
    if chip.sm is None:
        return f": it needs one of {', '.join(chip.fp8_isa)}, which this CPU lacks" if chip.fp8_isa else ""
    return (
        ": Triton reads fp8 from SM 89 on, and FlashInfer and FlashAttention begin with SM 80" if chip.sm < 80 else ""
    )
