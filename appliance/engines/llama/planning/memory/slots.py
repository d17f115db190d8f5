"""Number of slots (requests that run at the same time), and how a conversation is kept while others run. Pure.

Behaviour of the engine, read in its tools/server/server-context.cpp and seen (tests/process/test_side_request.py):

- A request goes to the free slot that holds more than `--slot-prompt-similarity` of the request as its beginning. If
  there is none, it goes to the slot that was idle longest. A slot that would lose more than half of its tokens is
  first saved to the prompt cache, and the cache's best match is loaded.
- With `--cache-idle-slots`, the engine's default, every idle slot is saved and cleared when a request begins. It is
  cleared even if the cache cannot take it: every side request then loses a conversation longer than the cache.
- A conversation that is loaded from the prompt cache needs room before idle slots are cleared. If two conversations do
  not fit into the context together, the loaded one is read again. With one slot this cannot happen.
- If running requests together exceed the context, idle slots are cleared without being saved; then all requests fail.
  The gateway repeats those whose answer has not begun, one after the other (`api/routes.py`, CROWDED).
"""

from __future__ import annotations

from appliance.engines.llama.planning.memory.memory import checkpoint_mib, kv_mib, state_mib
from appliance.model import Model
from appliance.plan.parts.choice import Choice
from appliance.settings import Settings

NO_ROOM = "memory, which has no room for more"


def conversation_mib(model: Model, kv_type: str, tokens: int, *, ubatch: int, checkpoints: int | None) -> float:
    """Return the MiB of the prompt cache that one conversation needs: cells, states and checkpoints."""
    copies = (checkpoints or 0) * checkpoint_mib(model, kv_type)
    return kv_mib(model, kv_type, tokens, ubatch, 1) + state_mib(model, 1) + copies


def choices(
    settings: Settings, model: Model, context: int, *, cache_mib: float, needed_mib: float
) -> tuple[Choice, ...]:
    """Return the choices of the number of slots and of idle slots.

    `cache_mib` is the size of the prompt cache, `needed_mib` that of a conversation that fills the context.
    """
    return (_parallel(settings, model, context), *_idle(settings, context, cache_mib, needed_mib))


def idle_slots_stay(settings: Settings, cache_mib: float, needed_mib: float) -> bool:
    """Return True if idle slots must keep their tokens, because the prompt cache is smaller than one conversation."""
    return settings.slots > 1 and cache_mib < needed_mib


def _parallel(settings: Settings, model: Model, context: int) -> Choice:
    count = settings.slots
    what = "only states and sliding windows cost memory" if checkpoint_mib(model, "f16") else "they cost no memory"
    beside = "a second request waits for the first"
    if settings.users > 1:
        beside = _share(settings, count, context)
    elif count > 1:
        beside = "a second request runs beside the first"
    lost = (
        "what another request costs a conversation: all of it if both do not fit into the context together, and what "
        "lies behind a beginning that both share if that is more than half of it"
    )
    kept = "another request costs a conversation only what the prompt cache does not take, and each turn a copy to it"
    asked = "asked for: " if settings.is_set("parallel") and settings.sources["parallel"] != NO_ROOM else ""
    return Choice(
        name="parallel",
        value=str(count),
        reason=f"{asked}slots share one context, so {what}; {beside}",
        detail=lost if count > 1 else kept,
        source=settings.slots_source,
    )


def _share(settings: Settings, count: int, context: int) -> str:
    users = settings.users
    if count > users:
        served = f"{users} users at once and {count - users} beside them"
    else:
        served = f"{count} at once, of {users} users" if count < users else f"{users} users at once, none beside them"
    each = context // min(users, count)
    beyond = "if they need more, requests that have not begun wait, and the others fail"
    return f"{served}; one request alone has all {context:,} tokens, each has {each:,} when all run; {beyond}"


def _idle(settings: Settings, context: int, cache_mib: float, needed_mib: float) -> tuple[Choice, ...]:
    """Return the choice for idle slots; empty if the prompt cache can take any conversation, as in the default."""
    if cache_mib >= needed_mib:
        return ()
    held = int(context * cache_mib / needed_mib)
    short = f"the prompt cache would take {held:,} of the context's {context:,} tokens"
    if not idle_slots_stay(settings, cache_mib, needed_mib):
        why = f"{short}; with one slot, what is longer is read anew after another request: --parallel 2 keeps it"
        return (Choice(name="idle_slots", value="saved", reason=why, source="memory"),)
    why = (
        f"{short}, and every side request would lose a longer conversation; so a conversation is read again only if it "
        f"does not fit into the context with another one, or if the {_ordinal(settings.slots)} other one needs its slot"
    )
    return (Choice(name="idle_slots", value="kept in the context", reason=why, source="memory"),)


def _ordinal(number: int) -> str:
    endings = {1: "st", 2: "nd", 3: "rd"}
    return f"{number}{'th' if number % 100 in (11, 12, 13) else endings.get(number % 10, 'th')}"
