"""At which depths to measure a plan: pure. Each leaves room in the context to decode `tokens_each`."""

from __future__ import annotations

EMPTY = 32  # a prompt of nothing cannot be decoded from; this is close enough to an empty context
MIDDLE = 512  # what a chat brings along
DEEPEST = 2048


def empty_depth(context: int, tokens_each: int) -> int:
    return min(EMPTY, max(1, _room(context, tokens_each) // 4))


def middle_depth(context: int, tokens_each: int, *, prefill_ms: float, seconds: float) -> int | None:
    """What a chat brings along, or what `seconds` can prefill at `prefill_ms` a token; None when that is no deeper
    than empty: on a machine that slow one point has to do."""
    first = empty_depth(context, tokens_each)
    depth = min(MIDDLE, _room(context, tokens_each) // 2, first + _carried(prefill_ms, seconds))
    return depth if depth >= 2 * first else None


def deep_depth(context: int, tokens_each: int, *, prefill_ms: float, seconds: float, middle: int) -> int | None:
    """The deepest, at most DEEPEST, that `seconds` can prefill beyond the middle; None below half again as deep."""
    depth = min(DEEPEST, _room(context, tokens_each), middle + _carried(prefill_ms, seconds))
    return depth if depth >= middle * 1.5 else None


def _room(context: int, tokens_each: int) -> int:
    return context - tokens_each - 1


def _carried(prefill_ms: float, seconds: float) -> int:
    return max(0, int(seconds * 1000 / prefill_ms))
