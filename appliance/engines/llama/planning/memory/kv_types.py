"""KV cache types that a plan may use, and types that are worth a quality check. Pure.

f16 is exact and q8_0 nearly exact. Smaller types cost quality, and how much depends on the model. They are used only
if the user asks for them, or if a check found them harmless for this model (`tune/quality.py`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from appliance.engines.llama.planning.memory.flash import EXACT_TYPES, why_no_kernel
from appliance.engines.llama.planning.memory.memory import KV_BYTES, can_keep
from appliance.image_facts import EngineFacts
from appliance.model import Model
from appliance.plan import KvCheck, k_and_v
from appliance.settings import Settings

TRUSTED = ("f16", "q8_0")
MIXED = "q8_0/q4_0"  # K has the more exact type, because rounding hurts K more than V (llama.cpp#7412)
BELOW_Q8 = (MIXED, *(kind for kind, size in KV_BYTES.items() if size < KV_BYTES["q8_0"]))  # the most exact first
WORTH_A_CHECK = 1.2  # a type is checked if it carries this many times the tokens of the types already allowed


def kv_candidates(
    settings: Settings, engine: EngineFacts, model: Model, kv_checks: Iterable[KvCheck] = (), *, on_gpu: bool
) -> tuple[str, ...]:
    """Return the KV cache types that a plan may use, the most exact first.

    On a GPU only types that flash attention reads without conversion, if there are any.
    """
    if settings.kv_type != "auto":
        return (settings.kv_type,)
    proven = {kv_check.kv_type for kv_check in kv_checks if kv_check.is_accepted}
    return _usable((*TRUSTED, *(kind for kind in BELOW_Q8 if kind in proven)), engine, model, on_gpu=on_gpu)


def unjudged(
    settings: Settings, engine: EngineFacts, model: Model, kv_checks: Iterable[KvCheck] = (), *, on_gpu: bool
) -> tuple[str, ...]:
    """Return the types below q8_0 that no check has judged; empty if --kv-type is set."""
    if settings.kv_type != "auto":
        return ()
    judged = {kv_check.kv_type for kv_check in kv_checks}
    usable = _usable((*TRUSTED, *BELOW_Q8), engine, model, on_gpu=on_gpu)
    return tuple(kind for kind in usable if kind in BELOW_Q8 and kind not in judged)


def worth_checking(carried: Mapping[str, int], *, enough: int) -> tuple[str, ...]:
    """Return the types below q8_0 that are worth a check, in the order to check them.

    `carried` is tokens by type (ContextPlan.carried). The type with the most tokens comes first, counted up to
    `enough`; of equals the most exact. Empty if a type that needs no check already carries `enough` tokens.
    """
    have = max((tokens for kind, tokens in carried.items() if kind not in BELOW_Q8), default=0)
    if have >= enough:
        return ()
    kinds = [kind for kind in BELOW_Q8 if min(carried.get(kind, 0), enough) >= max(1.0, have * WORTH_A_CHECK)]
    return tuple(sorted(kinds, key=lambda kind: -min(carried[kind], enough)))


def is_offered(engine: EngineFacts, kv_type: str) -> bool:
    """Return True if the engine has the type. Different types of K and V need kernels for the pair.

    Without them the cache would be converted for every token.
    """
    k, v = k_and_v(kv_type)
    return {k, v} <= set(engine.kv_types) and (k == v or (k, v) in engine.kv_pairs)


def is_fast_pair(engine: EngineFacts, kv_type: str) -> bool:
    """Return True if flash attention on a GPU reads this type; other pairs are converted for every token."""
    pair = k_and_v(kv_type)
    return pair in engine.kv_pairs if engine.kv_pairs else pair[0] == pair[1]


def _usable(kinds: tuple[str, ...], engine: EngineFacts, model: Model, *, on_gpu: bool) -> tuple[str, ...]:
    offered = tuple(kind for kind in kinds if is_offered(engine, kind) and can_keep(model, kind))
    if on_gpu and why_no_kernel(model):
        offered = tuple(kind for kind in offered if kind in EXACT_TYPES)
    fast = tuple(kind for kind in offered if is_fast_pair(engine, kind))
    return (fast or offered) if on_gpu else offered
