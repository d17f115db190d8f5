"""Long traces read with NumPy: some 500 MB for 54 K tokens of 48 layers.

Only what is regular is read here: plain digits, decoded tokens with their layers in the same order. For anything else,
damage above all, the answer is None, and `parse_trace` reads line by line and says what is wrong with which line.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Executor, Future
from dataclasses import dataclass, replace
from itertools import combinations, islice
from typing import IO

import numpy as np
from numpy.typing import NDArray

from appliance.moe.trace import COLUMNS, LAYERS_MAX, LINE_MAX, TOKENS_MAX, Trace, TraceError, Turn, parse_trace

BLOCK = 1 << 23  # bytes: what is worked on at once takes some ten times as much memory
_HEAD_LINES = LINE_MAX
_KEYS = 4  # turn, phase, step, layer
_CELLS = 9
_WEIGHT = 6
_DIGITS = 9
_LAYER_BITS = 30
_COMMA, _NEWLINE, _ZERO, _POINT = b",\n0."

Ints = NDArray[np.int64]


@dataclass(frozen=True, kw_only=True)
class Groups:
    """Rows of one layer and token each, in the order of the file."""

    keys: Ints  # a column for each of turn, phase, step and layer
    sizes: Ints  # experts
    experts: NDArray[np.uint16]  # of all, one after the other


Mapped = Callable[[Callable[[bytes], Groups | None], Iterable[bytes]], Iterable[Groups | None]]


class _IrregularError(Exception):
    """Not for this reader."""


def read_regular(
    opened: Callable[[], IO[bytes]],
    mapped: Mapped = map,
    *,
    block_bytes: int = BLOCK,
    tokens_max: int = TOKENS_MAX,
) -> Trace | None:
    """None where the file is not regular. `mapped` may work on blocks in several processes. Raises OSError."""
    try:
        with opened() as file:
            head = _head(file)
            found = _joined(mapped(groups_of, _blocks(file, block_bytes)), tokens_max)
        return _trace(found, opened, head, tokens_max)
    except (_IrregularError, TraceError):
        return None


def ahead(pool: Executor, workers: int) -> Mapped:
    """A `map` that holds no more than two blocks a worker."""

    def mapped(work: Callable[[bytes], Groups | None], blocks: Iterable[bytes]) -> Iterator[Groups | None]:
        waiting: deque[Future[Groups | None]] = deque()
        for block in blocks:
            waiting.append(pool.submit(work, block))
            if len(waiting) > 2 * workers:
                yield waiting.popleft().result()
        yield from (future.result() for future in waiting)

    return mapped


def _joined(parts: Iterable[Groups | None], tokens_max: int) -> Groups:
    """Ends early, in bounded memory, where a layer has more tokens than a trace may have."""
    kept: list[Groups] = []
    tokens = np.zeros(LAYERS_MAX, np.int64)
    for part in parts:
        if part is None or int(part.keys[:, 3].max()) >= LAYERS_MAX:
            raise _IrregularError
        tokens += np.bincount(part.keys[:, 3], minlength=LAYERS_MAX)
        _expect(int(tokens.max()) <= tokens_max)
        kept.append(part)
    _expect(bool(kept))
    names = ("keys", "sizes", "experts")
    return Groups(**{name: np.concatenate([getattr(part, name) for part in kept]) for name in names})


def _head(file: IO[bytes]) -> int:
    """Lines up to that of the names of columns, which is read as well."""
    for number in range(1, _HEAD_LINES):
        line = file.readline(LINE_MAX + 1)
        if line.strip() == COLUMNS.encode():
            return number
        if not line.startswith(b"#") or len(line) > LINE_MAX:
            break
    raise _IrregularError


def _blocks(file: IO[bytes], size: int) -> Iterator[bytes]:
    """Each ends where a layer's rows of a token do."""
    rest = b""
    while piece := file.read(size):
        piece = rest + piece
        end = _last_begin(piece)
        rest = piece[end:]
        yield piece[:end]
    yield rest


def _last_begin(piece: bytes) -> int:
    """Where the last row with slot 0 begins."""
    end = piece.rfind(b"\n") + 1
    while end:
        begin = piece.rfind(b"\n", 0, end - 1) + 1
        cells = piece[begin:end].split(b",", 5)
        if len(cells) > 5 and cells[4] == b"0":
            return begin
        end = begin
    raise _IrregularError


def groups_of(block: bytes) -> Groups | None:
    try:
        return _groups(np.frombuffer(block, np.uint8), block)
    except _IrregularError:
        return None


def _groups(text: NDArray[np.uint8], block: bytes) -> Groups:
    special = np.flatnonzero(text - np.uint8(_ZERO) > 9)  # wraps below "0": whatever is no digit
    letters = text[special]
    is_end = (letters == _COMMA) | (letters == _NEWLINE)
    ends, others = special[is_end], special[~is_end]
    _expect(len(ends) > 0 and ends[-1] == len(text) - 1 and len(ends) % _CELLS == 0)
    starts = np.concatenate(([0], ends[:-1] + 1)).reshape(-1, _CELLS)
    ends = ends.reshape(-1, _CELLS)
    _expect(bool((text[ends] == np.frombuffer(b",,,,,,,,\n", np.uint8)).all()))
    lengths = ends - starts
    _expect(int(lengths.min()) > 0 and int((ends[:, -1] - starts[:, 0]).max()) < LINE_MAX)
    _check_weights(block, others, text[others] == _POINT, starts[:, _WEIGHT], ends[:, _WEIGHT])
    columns = [_numbers(text, starts[:, at], lengths[:, at]) for at in range(_KEYS + 2)]
    keys, slots, experts = columns[:_KEYS], columns[_KEYS], columns[_KEYS + 1]
    first = np.flatnonzero(slots == 0)
    sizes = np.diff(np.append(first, len(slots)))
    _expect(len(first) > 0 and bool((slots == np.arange(len(slots)) - np.repeat(first, sizes)).all()))
    begin = np.repeat(first, sizes)
    _expect(all(bool((column == column[begin]).all()) for column in keys) and int(experts.max()) < 1 << 16)
    experts = experts.astype(np.uint16)
    for size in np.unique(sizes):
        of_size = experts[np.repeat(sizes == size, sizes)].reshape(-1, size).T
        _expect(all(bool((of_size[a] != of_size[b]).all()) for a, b in combinations(range(size), 2)))
    return Groups(keys=np.stack([column[first] for column in keys], axis=1), sizes=sizes, experts=experts)


def _expect(is_regular: bool) -> None:
    if not is_regular:
        raise _IrregularError


def _numbers(text: NDArray[np.uint8], starts: Ints, lengths: Ints) -> Ints:
    """Parse fields of digits alone."""
    least, most = int(lengths.min()), int(lengths.max())
    _expect(most <= _DIGITS)
    found = (text[starts] - np.uint8(_ZERO)).astype(np.int64)
    for at in range(1, most):
        if at < least:
            found = 10 * found + (text[starts + at] - np.uint8(_ZERO))
        else:
            rows = np.flatnonzero(lengths > at)
            found[rows] = 10 * found[rows] + (text[starts[rows] + at] - np.uint8(_ZERO))
    return found


def _check_weights(block: bytes, others: Ints, is_point: NDArray[np.bool_], starts: Ints, ends: Ints) -> None:
    """`others`: where something is neither a digit nor the end of a cell. Only weights have that: one point each, else
    they are read one by one, as those with an exponent."""
    rows = np.searchsorted(ends, others)
    _expect(not len(rows) or int(rows[-1]) < len(ends))
    _expect(bool((starts[rows] <= others).all()))
    points = np.bincount(rows[is_point], minlength=len(ends))
    is_odd = (points != 1) | (ends - starts < 2) | (ends - starts > 4 * _DIGITS)
    is_odd[rows[~is_point]] = True
    for row in np.flatnonzero(is_odd):
        try:
            weight = float(block[starts[row] : ends[row]])
        except ValueError as error:
            raise _IrregularError from error
        _expect(bool(np.isfinite(weight)))


def _trace(found: Groups, opened: Callable[[], IO[bytes]], head: int, tokens_max: int) -> Trace:
    turn, phase, _, layer = found.keys.T
    is_decoded = phase == 1
    layers = _decoded_layers(found.keys[is_decoded])
    _expect(bool((phase <= 1).all()) and set(np.unique(layer)) <= set(layers))
    order = np.diff(2 * turn + phase)
    _expect(bool((order >= 0).all()))
    own = found.keys[np.argsort(layer, kind="stable")]
    is_later = (np.diff(own[:, 0]) > 0) | (np.diff(own[:, 2]) > 0)  # turns do not fall, by the order above
    _expect(bool((is_later | (np.diff(own[:, 3]) != 0)).all()))
    prompts = np.unique(found.keys[~is_decoded][:, (0, 2)], axis=0)
    _expect(len(prompts) + int(is_decoded.sum()) // len(layers) <= tokens_max)
    begin = int(np.flatnonzero(is_decoded)[0])
    with opened() as file:  # the head and the first decoded token, read as strictly as ever
        rows = head + int(found.sizes[: begin + len(layers)].sum())
        first = parse_trace(line.decode() for line in islice(file, rows))
    sizes = np.zeros(int(layer.max()) + 1, np.int64)
    sizes[list(first.top_k)] = list(first.top_k.values())
    _expect(bool((found.sizes == sizes[layer]).all()) and int(found.experts.max()) < first.experts)
    return replace(first, turns=tuple(_turns(found)))


def _decoded_layers(keys: Ints) -> list[int]:
    """The layers of each decoded token, in their order."""
    _expect(len(keys) > 0)
    ends = np.flatnonzero(np.any(keys[1:, :3] != keys[:-1, :3], axis=1))
    size = int(ends[0]) + 1 if len(ends) else len(keys)
    _expect(len(keys) % size == 0)
    tokens = keys.reshape(-1, size, _KEYS)
    layers = tokens[:, :, 3]
    _expect(bool((tokens[:, :, :3] == tokens[:, :1, :3]).all() and (layers == layers[:1]).all()))
    _expect(len(np.unique(layers[0])) == size)
    return [int(each) for each in layers[0]]


def _turns(found: Groups) -> Iterator[Turn]:
    turn, phase, _, layer = found.keys.T
    begins = np.cumsum(found.sizes) - found.sizes
    kinds = (2 * turn + phase) << _LAYER_BITS | layer
    order = np.argsort(kinds, kind="stable")
    turns: dict[int, Turn] = {}
    for own in np.split(order, np.flatnonzero(np.diff(kinds[order])) + 1):
        first = own[0]
        experts = array("H")
        experts.frombytes(found.experts[begins[own][:, None] + np.arange(found.sizes[first])].tobytes())
        place = turns.setdefault(int(turn[first]), Turn())
        (place.decode if phase[first] else place.prompt)[int(layer[first])] = experts
    yield from turns.values()
