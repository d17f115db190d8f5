"""At which depths to measure a plan: pure."""

from __future__ import annotations

EMPTY = 32  # a prompt of nothing cannot be decoded from; this is close enough to an empty context
MIDDLE = 512  # what a chat brings along
DEEPEST = 2048


def depths(context: int, tokens_each: int, *, prefill_ms: float | None = None, seconds: float = 0.0) -> tuple[int, ...]:
    """Empty, middle and deep, each leaving room to decode `tokens_each`.

    The deep one is the deepest, at most DEEPEST, that `seconds` can prefill at `prefill_ms` a token; it is left out
    until that rate is known, or when it would lie less than half again as deep as the middle.
    """
    room = context - tokens_each - 1
    middle = min(MIDDLE, room // 2)
    shallow = [min(EMPTY, max(1, middle // 2)), middle]
    if prefill_ms is None:
        return tuple(shallow)
    deep = min(DEEPEST, room, middle + int(seconds * 1000 / prefill_ms))
    return (*shallow, deep) if deep >= middle * 1.5 else tuple(shallow)
