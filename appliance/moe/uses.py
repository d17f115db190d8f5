"""How often an expert will be used soon, learned while tokens are decoded: the value of having it in a slot.

An expert is known by five figures: whether the present token uses it, its uses averaged over about 4, 16 and 64 tokens
(exponentially, so that they carry age and count together), and its share of all tokens. Expected uses are a weighted
sum of these. The weights are a least-squares fit to what followed, shared by all layers.
"""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Iterable, Sequence
from operator import mul

HORIZON = 6  # tokens ahead
_SPANS = (4, 16, 64)  # tokens
_GROWTHS = tuple(span / (span - 1) for span in _SPANS)
_REBASED = 256  # tokens: stored figures grow by (4/3)^256 at most
_SHARE_PRIOR = 6.0  # unused tokens that are added to each share
_PRIOR = (0.03, 0.05, 0.2, 0.2, 0.5)  # uses a token, for each of the five figures
_PRIOR_SQUARES = (0.5, 0.3, 0.2, 0.1, 0.1)  # how strongly: as ten samples of typical size
_SIZE = len(_PRIOR)
_SAMPLED = 8  # experts looked at in one token
_SOLVED = 64  # samples after which the weights are fitted again, at first
_FORGOTTEN = 1 << 17  # samples: then older ones count half

Sample = tuple[int, int, tuple[float, ...]]  # expert, its uses so far, its five figures


class Uses:
    """The weights, for all layers of a model. Deterministic; constant memory."""

    def __init__(self, tokens_ahead: int = HORIZON) -> None:
        self.tokens_ahead = tokens_ahead
        self.weights = [tokens_ahead * each for each in _PRIOR]
        self._normal = [[_PRIOR_SQUARES[i] * (i == j) for j in range(_SIZE)] for i in range(_SIZE)]
        self._right = list(map(mul, _PRIOR_SQUARES, self.weights))
        self._samples = 0
        self._unsolved = 0

    def learn(self, samples: Sequence[Sample], counts: Sequence[int]) -> None:
        """`samples` were taken `tokens_ahead` tokens ago; `counts`: uses of each expert so far."""
        if not samples:
            return
        columns = list(zip(*(figures for _, _, figures in samples), strict=True))
        uses = [counts[expert] - before for expert, before, _ in samples]
        for i, column in enumerate(columns):
            row = self._normal[i]
            for j in range(i, _SIZE):
                row[j] += sum(map(mul, column, columns[j]))
            self._right[i] += sum(map(mul, column, uses))
        self._samples += len(samples)
        self._unsolved += len(samples)
        if self._unsolved >= max(_SOLVED, self._samples // 16):
            self._solve()

    def _solve(self) -> None:
        """Elimination without pivots: the matrix is positive definite by its prior."""
        rows = [[self._normal[min(i, j)][max(i, j)] for j in range(_SIZE)] + [self._right[i]] for i in range(_SIZE)]
        for i, pivot in enumerate(rows):
            for row in rows[i + 1 :]:
                factor = row[i] / pivot[i]
                row[i:] = [a - factor * b for a, b in zip(row[i:], pivot[i:], strict=True)]
        weights = [0.0] * _SIZE
        for i in reversed(range(_SIZE)):
            weights[i] = (rows[i][_SIZE] - sum(map(mul, rows[i][i + 1 : _SIZE], weights[i + 1 :]))) / rows[i][i]
        self.weights = weights
        self._unsolved = 0
        if self._samples >= _FORGOTTEN:
            self._samples //= 2
            self._normal = [[each / 2 for each in row] for row in self._normal]
            self._right = [each / 2 for each in self._right]


class History:
    """Uses of one layer's experts. Memory does not grow with a conversation."""

    def __init__(self, experts: int, uses: Uses, stagger: int) -> None:
        """`stagger` sets layers apart, so that not all take samples at the same token."""
        self._uses = uses
        self._stagger = stagger
        self._learns = True
        self.tokens = 0
        self._last = [-1] * experts  # token of the last use; -1: never
        self._place = [0] * experts  # in the order of router weights at that use, 0 or below
        self._counts = [0] * experts
        # Averages times growth^token: only those of used experts change, and one factor for all turns them back.
        self._averages = tuple([0.0] * experts for _ in _SPANS)
        self._scales = [1.0 for _ in _SPANS]
        self._factors = self._factored()
        self._next_sampled = 0
        self._waiting: deque[tuple[int, list[Sample]]] = deque()

    def add(self, used: Sequence[int]) -> None:
        """The experts of one more token, by falling router weight. O(top_k): this is on the critical path."""
        last, place, counts, token = self._last, self._place, self._counts, self.tokens
        short, middle, long = self._averages
        a, b, c = self._scales
        position = 0
        for expert in used:
            last[expert] = token
            place[expert] = position
            counts[expert] += 1
            short[expert] += a
            middle[expert] += b
            long[expert] += c
            position -= 1
        self.tokens = token + 1

    def settle(self) -> None:
        """Off the critical path, after each `add`: learns from old samples, and makes room for the next token."""
        token, waiting = self.tokens, self._waiting
        if waiting and waiting[0][0] == token:
            self._uses.learn(waiting.popleft()[1], self._counts)
        # Often at first, when each sample moves the weights, and ever less often: 1/16 after a thousand tokens.
        stride = 1 if token < 64 else 4 if token < 1024 else 16
        if self._learns and (token + self._stagger) % stride == 0:
            waiting.append((token + self._uses.tokens_ahead, self._sample()))
        self._scales = list(map(mul, self._scales, _GROWTHS))
        if token % _REBASED == 0:
            for average, scale in zip(self._averages, self._scales, strict=True):
                average[:] = [each / scale for each in average]
            self._scales = [1.0 for _ in _SPANS]
        self._factors = self._factored()

    def _factored(self) -> tuple[float, float, float, float, float]:
        """What the stored figures count as of the token to come."""
        now, short, middle, long, share = self._uses.weights
        a, b, c = self._scales
        rest = share / (self.tokens + 1 + _SHARE_PRIOR)
        return now, short / (a * _SPANS[0]), middle / (b * _SPANS[1]), long / (c * _SPANS[2]), rest

    def _sample(self) -> list[Sample]:
        now, last, counts = self.tokens - 1, self._last, self._counts
        short, middle, long = self._averages
        a, b, c = (span * scale for span, scale in zip(_SPANS, self._scales, strict=True))
        share = now + 1 + _SHARE_PRIOR
        begin, size = self._next_sampled, len(last)
        self._next_sampled = (begin + _SAMPLED) % size
        return [
            (e, counts[e], (float(last[e] == now), short[e] / a, middle[e] / b, long[e] / c, counts[e] / share))
            for e in (at % size for at in range(begin, begin + min(_SAMPLED, size)))
            if last[e] >= 0
        ]

    def fork(self) -> History:
        """The same past, settled; what follows is not learned from, since the original does."""
        twin = copy.copy(self)
        twin._learns = False
        for name in ("_last", "_place", "_counts"):
            setattr(twin, name, copy.copy(getattr(self, name)))
        twin._averages = tuple(map(list, self._averages))
        twin._waiting = deque()
        return twin

    def valued(self, used: Iterable[int]) -> list[tuple[float, int]]:
        """(expected uses in the next `tokens_ahead` tokens, expert) of the present token's experts, in their order."""
        now, a, b, c, d = self._factors
        short, middle, long = self._averages
        counts = self._counts
        return [(now + a * short[e] + b * middle[e] + c * long[e] + d * counts[e], e) for e in used]

    def ranked(self, experts: Iterable[int]) -> list[tuple[float, int]]:
        """(value, expert), least first, of those that the token to come will not use; after `settle`."""
        _, a, b, c, d = self._factors
        short, middle, long = self._averages
        counts = self._counts
        return sorted([(a * short[e] + b * middle[e] + c * long[e] + d * counts[e], e) for e in experts])

    def recency(self, expert: int) -> tuple[int, int]:
        """What LRU orders by: token of the last use, and within one token the router weight."""
        return self._last[expert], self._place[expert]
