"""How often an expert will be used soon, learned while tokens are decoded: the value of having it in a slot.

An expert is known by three figures: tokens since its last use, uses in the last 16 tokens, uses in the 48 before them.
One table goes by the first two, a second one learns what the first leaves over, by the third: expectations add up, and
the long count corrects the short one. All layers share both tables, so they are filled within a few tokens.
"""

from __future__ import annotations

import copy
import math
from collections import deque
from collections.abc import Iterable, Sequence

RECENT = 16  # tokens
REMEMBERED = 64
HORIZONS = (4, 8, 16)  # tokens ahead
_COUNTS = 7  # uses of the last 16 tokens: 0 to 5, 6 or more
_AGES = 18  # 0 to 16 tokens, or more
_AGE_ROW = (0, 1, 2, 3, 3, *[4] * 4, *[5] * 8, 6)  # 0, 1, 2, 3-4, 5-8, 9-16, more
_OLDER_ROW = tuple(min(6, int(1.5 * math.log2(1 + count))) for count in range(REMEMBERED + 1))
_PRIOR_WEIGHT = 8.0  # samples
_PRIOR_SHARE = 0.5  # of the recent count
_LEFT_WEIGHT = 16.0  # samples of nothing left over
_SAMPLED = 64  # experts looked at in one snapshot


def horizon(break_even_uses: float) -> int:
    """Tokens to look ahead: the shortest of `HORIZONS` that is at least half the break-even.

    Four is right where links are fast. Where one upload costs many hits, an expert's uses in four tokens never repay it,
    and nothing would be admitted; looking further ahead than that is guessing.
    """
    return next((tokens for tokens in HORIZONS if break_even_uses <= 2 * tokens), HORIZONS[-1])


class Uses:
    """The two tables, for all layers of a model. Deterministic; constant memory."""

    def __init__(self, tokens_ahead: int) -> None:
        self.tokens_ahead = tokens_ahead
        cells = range(_COUNTS * (max(_AGE_ROW) + 1))
        self._sum = [0.0 for _ in cells]
        self._samples = [0 for _ in cells]
        self.by_recent = [_PRIOR_SHARE * (cell % _COUNTS) for cell in cells]
        left = range(max(_OLDER_ROW) + 1)
        self._left_sum = [0.0 for _ in left]
        self._left_samples = [0 for _ in left]
        self.by_older = [0.0 for _ in left]

    def learn(self, snapshot: Sequence[tuple[int, int, int]], used_since: dict[int, int]) -> None:
        """`snapshot`: (expert, cell, older cell) as they were `tokens_ahead` ago; `used_since`: expert -> uses since."""
        total, samples, left, left_samples = self._sum, self._samples, self._left_sum, self._left_samples
        by_recent = self.by_recent
        for expert, cell, older in snapshot:
            uses = used_since.get(expert, 0)
            left[older] += uses - by_recent[cell]
            left_samples[older] += 1
            total[cell] += uses
            samples[cell] += 1
        for cell, count in enumerate(samples):
            prior = _PRIOR_SHARE * (cell % _COUNTS) * _PRIOR_WEIGHT
            by_recent[cell] = (total[cell] + prior) / (count + _PRIOR_WEIGHT)
        self.by_older[:] = [value / (count + _LEFT_WEIGHT) for value, count in zip(left, left_samples, strict=True)]


class History:
    """Uses of one layer's experts: 64 tokens back, whatever the length of a conversation."""

    def __init__(self, experts: int, uses: Uses, stagger: int) -> None:
        """`stagger` sets layers apart, so that not all take a snapshot at the same token."""
        self._uses = uses
        self._stagger = stagger
        self._learns = True
        self.tokens = 0
        self._last = [-1] * experts  # token of the last use; -1: never
        self._place = [0] * experts  # in the order of router weights at that use, 0 or below
        self._recent = [0] * experts
        self._older = [0] * experts
        self._ring: deque[tuple[int, ...]] = deque(maxlen=REMEMBERED)
        self._seen: list[int] = []
        self._waiting: deque[tuple[int, list[tuple[int, int, int]]]] = deque()

    def add(self, used: Sequence[int]) -> None:
        """The experts of one more token, by falling router weight. O(top_k): this is on the critical path."""
        last, recent, place, token = self._last, self._recent, self._place, self.tokens
        for position, expert in enumerate(used):
            if last[expert] < 0:
                self._seen.append(expert)
            last[expert] = token
            place[expert] = -position
            recent[expert] += 1
        self._ring.append(tuple(used))
        self.tokens = token + 1

    def settle(self) -> None:
        """Off the critical path, after each `add`: learns from old snapshots, and makes room for the next token."""
        token, ring = self.tokens - 1, self._ring
        if self._waiting and self._waiting[0][0] == token:
            self._learn(self._waiting.popleft()[1])
        # Often at first, when each sample moves the tables, and ever less often: 1/16 after a thousand tokens.
        stride = 1 if token < 64 else 4 if token < 1024 else 16
        if self._learns and (token + self._stagger) % stride == 0:
            self._waiting.append((token + self._uses.tokens_ahead, self._snapshot()))
        if len(ring) >= RECENT:
            recent, older = self._recent, self._older
            for expert in ring[-RECENT]:
                recent[expert] -= 1
                older[expert] += 1
            if len(ring) == REMEMBERED:
                for expert in ring[0]:
                    older[expert] -= 1

    def _learn(self, snapshot: list[tuple[int, int, int]]) -> None:
        ahead = self._uses.tokens_ahead
        since: dict[int, int] = {}
        for back in range(1, ahead + 1):
            for expert in self._ring[-back]:
                since[expert] = since.get(expert, 0) + 1
        self._uses.learn(snapshot, since)

    def _snapshot(self) -> list[tuple[int, int, int]]:
        now, last, recent, older = self.tokens - 1, self._last, self._recent, self._older
        seen = self._seen
        step = -(-len(seen) // _SAMPLED)
        return [
            (
                expert,
                _AGE_ROW[min(now - last[expert], _AGES - 1)] * _COUNTS + min(recent[expert], _COUNTS - 1),
                _OLDER_ROW[older[expert]],
            )
            for expert in seen[now % step :: step]
        ]

    def fork(self) -> History:
        """The same past, settled; what follows is not learned from, since the original does."""
        twin = copy.copy(self)
        twin._learns = False
        for name in ("_last", "_place", "_recent", "_older", "_ring", "_seen"):
            setattr(twin, name, copy.copy(getattr(self, name)))
        twin._waiting = deque()
        return twin

    def values(self, experts: Iterable[int], *, is_next: bool = False) -> list[float]:
        """Expected uses in the next `tokens_ahead` tokens, in the same order; not below 0.

        `is_next`: as of the token to come, for experts that it does not use; after `settle` only.
        """
        now, last, recent, older = self.tokens - 1 + is_next, self._last, self._recent, self._older
        by_recent, by_older, rows, oldest, counts = (
            self._uses.by_recent, self._uses.by_older, _CELLS, _OLDER_ROW, _COUNTS - 1,
        )  # fmt: skip
        found = []
        for expert in experts:
            age, count = now - last[expert], recent[expert]
            cell = rows[age if age < _AGES else _AGES - 1] + (count if count < counts else counts)
            value = by_recent[cell] + by_older[oldest[older[expert]]]
            found.append(value if value > 0.0 else 0.0)
        return found

    def recency(self, expert: int) -> tuple[int, int]:
        """What LRU orders by: token of the last use, and within one token the router weight."""
        return self._last[expert], self._place[expert]


_CELLS = tuple(row * _COUNTS for row in _AGE_ROW)
