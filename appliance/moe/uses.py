"""Predicts how often an expert will be used soon, learned while tokens are decoded: the value of having it in a slot.

Four figures describe an expert: whether the last token used it, its uses averaged exponentially over about 8 and 64
tokens (which combine age and count), and its share of all tokens. Expected uses are a weighted sum of these. The
weights are a least-squares fit to the uses that followed, shared by all layers.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from operator import mul

HORIZON = 6  # tokens ahead
_SPANS = (8, 64)  # tokens
_REBASED = 256  # tokens between rescalings: stored figures grow by (8/7)^256 at most
_SCALES = [tuple((span / (span - 1)) ** token for span in _SPANS) for token in range(_REBASED)]
_WHOLE = [tuple(span * scale for span, scale in zip(_SPANS, scales, strict=True)) for scales in _SCALES]
_SHARE_PRIOR = 6.0  # unused tokens added to each share as a prior
_PRIOR = (0.03, 0.25, 0.2, 0.5)  # prior weights: uses per token, for each of the four figures
_PRIOR_SQUARES = (0.5, 0.2, 0.1, 0.1)  # strength of the prior: that of ten samples of typical size
_SIZE = len(_PRIOR)
_SAMPLED = 8  # experts sampled per token
_SOLVED = 64  # samples between fits of the weights, at first
_LEARNED = 1024  # after so many tokens, samples are taken at long intervals
_FORGOTTEN = 1 << 17  # after so many samples, older ones count half
_KEPT = 512  # tokens that the uses of an earlier run count for at most

Sample = tuple[int, int, tuple[float, ...]]  # expert, its uses so far, its four figures
_Use = tuple[int, Sequence[int]]  # token number, counted from one, and the token's experts


class Uses:
    """The weights, shared by all layers of a model. Deterministic; constant memory."""

    def __init__(self, tokens_ahead: int = HORIZON) -> None:
        self.tokens_ahead = tokens_ahead
        self.weights = [tokens_ahead * each for each in _PRIOR]
        self._normal = [[_PRIOR_SQUARES[i] * (i == j) for j in range(_SIZE)] for i in range(_SIZE)]
        self._right = list(map(mul, _PRIOR_SQUARES, self.weights))
        self._samples = 0
        self._unsolved = 0

    def learn(self, samples: Sequence[Sample], counts: Sequence[int]) -> None:
        """Learn from `samples` taken `tokens_ahead` tokens ago; `counts` holds the uses of each expert so far."""
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
        """Solve by elimination without pivots: the prior makes the matrix positive definite."""
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

    def __init__(self, experts: int, uses: Uses, stagger: int, *, is_valued: bool = True) -> None:
        """`stagger` differs between layers, so that they do not all sample at the same token. `is_valued` False: the
        history is only learned from."""
        self._uses = uses
        self._is_valued = is_valued
        self._stagger = stagger
        self.tokens = 0
        self.used_now = 0.0  # value that an expert gains if the next token uses it
        self._last: list[_Use | None] = [None] * experts
        self._counts = [0] * experts
        # Averages multiplied by growth^token: only those of used experts change, and one common factor turns them back.
        self._short = [0.0] * experts
        self._long = [0.0] * experts
        self._next_sampled = 0
        self._due = 1  # token at which to learn or sample next
        self._waiting: deque[tuple[int, list[Sample]]] = deque()
        self._factor()

    def begin(self, tokens: int, counts: Sequence[int]) -> None:
        """Start from the uses of `tokens` tokens of an earlier run. Fewer than 256 tokens say too little and are left
        out; more than 512 count as 512, so that a new subject soon outweighs them."""
        kept = min(tokens, _KEPT) // _REBASED * _REBASED
        if not kept:
            return
        self.tokens = kept
        self._due = kept + 1
        self._counts = [count * kept // tokens for count in counts]
        self._factor()

    def counted(self) -> list[int]:
        """Return the uses of each expert so far."""
        return list(self._counts)

    def add(self, used: Sequence[int]) -> None:
        """Add the experts of one more token, by falling router weight. Learns from old samples."""
        last, counts, short, long = self._last, self._counts, self._short, self._long
        token = self.tokens
        a, b = _SCALES[token % _REBASED]
        self.tokens = token = token + 1
        use = token, used
        for expert in used:
            last[expert] = use
            counts[expert] += 1
            short[expert] += a
            long[expert] += b
        if token >= self._due:
            self._learn(token)
        if token % _REBASED == 0:
            a, b = (growth * scale for growth, scale in zip(_SCALES[1], _SCALES[-1], strict=True))
            self._short, self._long = [each / a for each in short], [each / b for each in long]
        if self._is_valued:
            self._factor()

    def _learn(self, token: int) -> None:
        waiting = self._waiting
        if waiting and waiting[0][0] == token:
            self._uses.learn(waiting.popleft()[1], self._counts)
        # Often at first, when each sample changes the weights, later less often: 1/16 after a thousand tokens.
        stride = 1 if token < 64 else 4 if token < _LEARNED else 16
        off = (token + self._stagger) % stride
        if not off:
            waiting.append((token + self._uses.tokens_ahead, self._sample()))
        following = token + 1 if token < _LEARNED else token + stride - off
        self._due = min(following, waiting[0][0]) if waiting else following

    def _factor(self) -> None:
        """Set the factors that turn stored figures into values for the next token, and the value that a use by it
        adds."""
        now, short, long, share = self._uses.weights
        tokens = self.tokens
        a, b = _WHOLE[tokens % _REBASED]
        rest = share / (tokens + 1 + _SHARE_PRIOR)
        self._factors = short / a, long / b, rest
        self.used_now = now + short / _SPANS[0] + long / _SPANS[1] + rest

    def _sample(self) -> list[Sample]:
        now, last, counts, short, long = self.tokens - 1, self._last, self._counts, self._short, self._long
        a, b = _WHOLE[now % _REBASED]
        share = now + 1 + _SHARE_PRIOR
        begin, size = self._next_sampled, len(last)
        self._next_sampled = (begin + _SAMPLED) % size
        return [
            (e, counts[e], (float(use[0] > now), short[e] / a, long[e] / b, counts[e] / share))
            for e in (at % size for at in range(begin, begin + min(_SAMPLED, size)))
            if (use := last[e])
        ]

    def valued(self, experts: Iterable[int], more: float = 0.0) -> list[tuple[float, int]]:
        """Return (expected uses in the `tokens_ahead` tokens after the next one, expert) in the order of `experts`.
        `more` is `used_now` for experts of the next token."""
        a, b, c = self._factors
        short, long, counts = self._short, self._long, self._counts
        return [(more + a * short[e] + b * long[e] + c * counts[e], e) for e in experts]

    def uses(self, expert: int) -> int:
        """Return the number of tokens so far that used an expert."""
        return self._counts[expert]

    def last_use(self, expert: int) -> tuple[int, int]:
        """Return LRU's sort key: later tokens are higher, and within a token a higher router weight."""
        use = self._last[expert]
        return (use[0], -use[1].index(expert)) if use else (0, 0)
