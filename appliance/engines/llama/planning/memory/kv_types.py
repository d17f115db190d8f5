"""Which types of the KV cache a plan may consider, and which are worth a check of what they cost: pure.

f16 is exact and q8_0 nearly so. What is smaller costs quality, by how much depends on the model; it is taken only when
asked for, or when it was measured to be harmless (`tune/quality.py`).
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
MIXED = "q8_0/q4_0"  # K in the type that rounding hurts more (llama.cpp#7412), V in half of its bytes
BELOW_Q8 = (MIXED, *(kind for kind, size in KV_BYTES.items() if size < KV_BYTES["q8_0"]))  # the most exact first
WORTH_A_CHECK = 1.2  # times the tokens that a trusted type carries


def kv_candidates(
    settings: Settings, engine: EngineFacts, model: Model, kv_checks: Iterable[KvCheck] = (), *, on_gpu: bool
) -> tuple[str, ...]:
    """The most exact first. On a GPU only pairs that its flash attention takes as they are, if there is any."""
    if settings.kv_type != "auto":
        return (settings.kv_type,)
    proven = {kv_check.kv_type for kv_check in kv_checks if kv_check.is_accepted}
    return _usable((*TRUSTED, *(kind for kind in BELOW_Q8 if kind in proven)), engine, model, on_gpu=on_gpu)


def unjudged(
    settings: Settings, engine: EngineFacts, model: Model, kv_checks: Iterable[KvCheck] = (), *, on_gpu: bool
) -> tuple[str, ...]:
    """What a check could add to the candidates; a type that was refused is not asked for again."""
    if settings.kv_type != "auto":
        return ()
    judged = {kv_check.kv_type for kv_check in kv_checks}
    usable = _usable((*TRUSTED, *BELOW_Q8), engine, model, on_gpu=on_gpu)
    return tuple(kind for kind in usable if kind in BELOW_Q8 and kind not in judged)


def worth_checking(carried: Mapping[str, int], *, enough: int) -> tuple[str, ...]:
    """Of the unproven types in `carried` (tokens by type, of a ContextPlan) those whose gain is worth the check.

    In the order to check them in: what carries the most of `enough` first, and of those the most exact. None when a
    type that may be used already carries enough.
    """
    have = max((tokens for kind, tokens in carried.items() if kind not in BELOW_Q8), default=0)
    if have >= enough:
        return ()
    kinds = [kind for kind in BELOW_Q8 if min(carried.get(kind, 0), enough) >= max(1.0, have * WORTH_A_CHECK)]
    return tuple(sorted(kinds, key=lambda kind: -min(carried[kind], enough)))


def is_offered(engine: EngineFacts, kv_type: str) -> bool:
    """Two types at once only where there are kernels for the pair: elsewhere every token would be converted."""
    k, v = k_and_v(kv_type)
    return {k, v} <= set(engine.kv_types) and (k == v or (k, v) in engine.kv_pairs)


def is_fast_pair(engine: EngineFacts, kv_type: str) -> bool:
    """Whether flash attention on a GPU takes this type as it is; other pairs are converted for every token."""
    pair = k_and_v(kv_type)
    return pair in engine.kv_pairs if engine.kv_pairs else pair[0] == pair[1]


def _usable(kinds: tuple[str, ...], engine: EngineFacts, model: Model, *, on_gpu: bool) -> tuple[str, ...]:
    offered = tuple(kind for kind in kinds if is_offered(engine, kind) and can_keep(model, kind))
    if on_gpu and why_no_kernel(model):
        offered = tuple(kind for kind in offered if kind in EXACT_TYPES)
    fast = tuple(kind for kind in offered if is_fast_pair(engine, kind))
    return (fast or offered) if on_gpu else offered
