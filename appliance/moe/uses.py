"""How often an expert will be used soon, learned while tokens are decoded: the value of having it in a slot.

An expert is known by three figures: tokens since its last use, uses in the last 16 tokens, uses in the 48 before them.
One table goes by the first two, a second one learns what the first leaves over, by the third: expectations add up, and
the long count corrects the short one. All layers share both tables, so they are filled within a few tokens.
"""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Iterable, Sequence

RECENT = 16  # tokens
REMEMBERED = 64
HORIZONS = (4, 8, 16)  # tokens ahead
_AGE_ROW = (0, 1, 2, 3, 3, *[4] * 4, *[5] * 8, *[6] * 16, *[7] * 32, 8)  # 0, 1, 2, 3-4, 5-8, 9-16, 17-32, 33-64, more
_COUNTS = RECENT + 1
_CELLS = tuple(row * _COUNTS for row in _AGE_ROW)  # by age: where the counts of its row begin
_OLDEST = len(_AGE_ROW) - 1
_OLDER_FROM = (1, 2, 3, 5, 7, 10, 15, 23)  # uses: finest where most experts are
_OLDER = tuple(sum(count >= least for least in _OLDER_FROM) for count in range(REMEMBERED + 1))
_OLDER_CELLS = tuple(min(8, count) * 9 for count in range(_COUNTS))  # by uses of the last 16 tokens
_PRIOR_WEIGHT = 8.0  # samples that say: used as often as in the last 16 tokens
_LEFT_WEIGHT = 16.0  # samples of nothing left over
_TIE = 1e-6  # a token of age: of experts in one cell, the least recently used goes first
_SAMPLED = 64  # experts looked at in one snapshot


def horizon(break_even_uses: float, tokens_held: float) -> int:
    """Tokens to look ahead, one of `HORIZONS`: at least half the break-even, and 8 where slots hold four tokens.

    `tokens_held`: slots by experts of a token. Where one upload costs many hits, an expert's uses in four tokens never
    repay it, and nothing would be admitted; in many slots an expert stays longer. Looking further is guessing.
    """
    least = max(break_even_uses / 2, HORIZONS[1] if tokens_held >= HORIZONS[0] else HORIZONS[0])
    return next((tokens for tokens in HORIZONS if least <= tokens), HORIZONS[-1])


class Uses:
    """The two tables, for all layers of a model. Deterministic; constant memory."""

    def __init__(self, tokens_ahead: int) -> None:
        self.tokens_ahead = tokens_ahead
        self.by_recent = [tokens_ahead * (cell % _COUNTS) / RECENT for cell in range(_COUNTS * (_AGE_ROW[-1] + 1))]
        self._sum = [_PRIOR_WEIGHT * uses for uses in self.by_recent]
        self._weight = [_PRIOR_WEIGHT for _ in self.by_recent]
        self.by_older = [0.0] * (_OLDER_CELLS[-1] + _OLDER[-1] + 1)
        self._left = [0.0 for _ in self.by_older]
        self._left_weight = [_LEFT_WEIGHT for _ in self.by_older]

    def learn(self, snapshot: Sequence[tuple[int, int, int]], used_since: dict[int, int]) -> None:
        """`snapshot`: (expert, cell, older cell) `tokens_ahead` tokens ago; `used_since`: expert -> uses since."""
        total, weight, by_recent = self._sum, self._weight, self.by_recent
        left, left_weight, by_older = self._left, self._left_weight, self.by_older
        for expert, cell, older in snapshot:
            uses = used_since.get(expert, 0)
            left[older] += uses - by_recent[cell]
            left_weight[older] += 1
            by_older[older] = left[older] / left_weight[older]
            total[cell] += uses
            weight[cell] += 1
            by_recent[cell] = total[cell] / weight[cell]


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
        found = []
        for expert in seen[now % step :: step]:
            age, count = now - last[expert], recent[expert]
            cell = _CELLS[age if age < _OLDEST else _OLDEST] + count
            found.append((expert, cell, _OLDER_CELLS[count] + _OLDER[older[expert]]))
        return found

    def fork(self) -> History:
        """The same past, settled; what follows is not learned from, since the original does."""
        twin = copy.copy(self)
        twin._learns = False
        for name in ("_last", "_place", "_recent", "_older", "_ring", "_seen"):
            setattr(twin, name, copy.copy(getattr(self, name)))
        twin._waiting = deque()
        return twin

    def values(self, experts: Iterable[int], *, is_next: bool = False) -> list[float]:
        """Expected uses in the next `tokens_ahead` tokens, in the same order; 0 or a trifle below where none is.

        `is_next`: as of the token to come, for experts that it does not use; after `settle` only.
        """
        now, last, recent, older = self.tokens - 1 + is_next, self._last, self._recent, self._older
        by_recent, by_older = self._uses.by_recent, self._uses.by_older
        found = []
        for expert in experts:
            age, count = now - last[expert], recent[expert]
            value = (
                by_recent[_CELLS[age if age < _OLDEST else _OLDEST] + count]
                + by_older[_OLDER_CELLS[count] + _OLDER[older[expert]]]
            )
            found.append((value if value > 0.0 else 0.0) - age * _TIE)
        return found

    def recency(self, expert: int) -> tuple[int, int]:
        """What LRU orders by: token of the last use, and within one token the router weight."""
        return self._last[expert], self._place[expert]
