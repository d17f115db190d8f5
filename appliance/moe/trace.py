"""Recorded routing: the experts that each layer chose for each token. Parses lines that the caller passes in; opens no
file.

Format: route_trace v1 of BigMoeOnEdge. Comment lines with `n_layer=`, `n_expert=` and the like, one line of column
names, then `turn,phase,step,layer,slot,expert,weight,residency,expert_bytes`, one row per expert, by falling router
weight. Phase 0 is the prompt, 1 decoding. Layers without rows are dense.
"""

from __future__ import annotations

import math
import re
import statistics
from array import array
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

TOKENS_MAX = 262_144  # tokens of all turns, prompt and decoded: 54 K need 35 MB
LINE_MAX = 4096  # characters
LAYERS_MAX = 1024
EXPERTS_MAX = 4096
COLUMNS = "turn,phase,step,layer,slot,expert,weight,residency,expert_bytes"
_FACT = re.compile(r"(\w+)=(\S+)")


class TraceError(ValueError):
    """The trace is incomplete or damaged; the message begins with the line number."""

    def __init__(self, line: int, words: str) -> None:
        super().__init__(f"line {line}: {words}")
        self.line = line


@dataclass(kw_only=True)
class Turn:
    """One turn of a conversation. Maps each layer to the experts of its tokens one after the other, top_k each."""

    prompt: dict[int, array[int]] = field(default_factory=dict)
    decode: dict[int, array[int]] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Trace:
    """A recorded trace. `top_k` maps each layer with routed experts to its number of experts per token. A prompt may be
    shorter in some layers, since an engine needs the last layer's output for one token only; decoded tokens are
    complete."""

    name: str  # name of the model's file, as recorded
    architecture: str
    layers: int  # number of layers, dense ones included
    experts: int
    top_k: dict[int, int]
    turns: tuple[Turn, ...]
    expert_mb: float | None = None  # mean over layers; None if the head names no sizes

    @property
    def dense_layers(self) -> int:
        return self.layers - len(self.top_k)

    @property
    def decoded(self) -> int:
        """Number of decoded tokens of all turns."""
        first = next(iter(self.top_k))
        return sum(len(turn.decode.get(first, ())) for turn in self.turns) // self.top_k[first]

    def tokens(self, turn: Turn, *, is_prompt: bool, layer: int) -> list[tuple[int, ...]]:
        """Return the experts of each token of one layer and turn, in order."""
        return list(self.each_token(turn, is_prompt=is_prompt, layer=layer))

    def each_token(self, turn: Turn, *, is_prompt: bool, layer: int) -> Iterator[tuple[int, ...]]:
        """Yield what `tokens` returns, one by one: a list would take many times the trace's size in memory."""
        flat = (turn.prompt if is_prompt else turn.decode).get(layer, array("H"))
        return zip(*[iter(flat)] * self.top_k[layer], strict=True)

    def half(self, *, is_second: bool) -> Trace:
        """Return the trace with the first or the second half of the decoded tokens of each turn, with every prompt."""
        turns = []
        for turn in self.turns:
            cut = {}
            for layer, flat in turn.decode.items():
                middle = len(flat) // self.top_k[layer] // 2 * self.top_k[layer]
                cut[layer] = flat[middle:] if is_second else flat[:middle]
            turns.append(Turn(prompt=turn.prompt, decode=cut))
        return Trace(
            name=self.name,
            architecture=self.architecture,
            layers=self.layers,
            experts=self.experts,
            top_k=self.top_k,
            turns=tuple(turns),
            expert_mb=self.expert_mb,
        )


def parse_trace(lines: Iterable[str], *, tokens_max: int = TOKENS_MAX) -> Trace:
    """Return the trace; reads line by line and keeps two bytes for each row. Raises TraceError with the line number for
    anything that is cut, out of range, missing, repeated, out of order, or longer than `tokens_max` tokens."""
    reader = _Reader(tokens_max)
    number = 0
    for number, line in enumerate(lines, 1):
        reader.read(number, line)
    return reader.trace(number)


class _Reader:
    def __init__(self, tokens_max: int) -> None:
        self._tokens_max = tokens_max
        self._facts: dict[str, str] = {}
        self._expert_bytes: list[int] = []
        self._experts = self._layers = 0
        self._has_columns = False
        self._top_k: dict[int, int] = {}
        self._turns: list[Turn] = []
        self._tokens = 0
        self._key: tuple[int, int, int, int] = (-1, -1, -1, -1)  # turn, phase, step, layer of the rows being read
        self._used: list[int] = []
        self._weight = math.inf
        self._last_step: dict[int, tuple[int, int]] = {}  # layer -> turn and step of its last token
        self._decoding: set[int] = set()  # layers of the current decoded token
        self._whole: set[int] | None = None  # layers that every decoded token must have
        self._prompt_steps: set[int] = set()

    def read(self, number: int, line: str) -> None:
        if len(line) > LINE_MAX:
            raise TraceError(number, f"longer than {LINE_MAX} characters")
        if line.startswith("#"):
            if not self._has_columns:
                self._read_comment(number, dict(_FACT.findall(line)))
            return
        if not self._has_columns:
            self._begin(number, line.strip())
            return
        cells = line.split(",")
        if len(cells) != 9:
            raise TraceError(number, f"cut or damaged: {len(cells)} columns instead of 9")
        try:
            turn, phase, step, layer, slot, expert = map(int, cells[:6])
            weight = float(cells[6])
            int(cells[8])
        except ValueError as error:
            raise TraceError(number, f"not a number: {error}") from error
        key = (turn, phase, step, layer)
        if key != self._key:
            self._check(number, key)
            self._finish(number)
            self._start(number, key)
        self._add(number, slot, expert, weight)

    def _begin(self, number: int, line: str) -> None:
        if line != COLUMNS:
            raise TraceError(number, f"the line of column names is missing or of another format: {line[:80]!r}")
        self._has_columns = True
        self._experts = self._count(number, "n_expert", EXPERTS_MAX)
        self._layers = self._count(number, "n_layer", LAYERS_MAX)

    def _count(self, number: int, name: str, most: int) -> int:
        text = self._facts.get(name, "")
        if not text.isdecimal() or not 0 < int(text) <= most:
            raise TraceError(number, f"the comments above name no {name} between 1 and {most}: {text!r}")
        return int(text)

    def _read_comment(self, number: int, facts: dict[str, str]) -> None:
        """Read one comment of the head: facts of the model, or the sizes of one layer."""
        if "layer" not in facts:
            self._facts.update(facts)
            return
        text = facts.get("expert_bytes", "0")
        if not text.isascii() or not text.isdigit() or len(self._expert_bytes) == LAYERS_MAX:
            raise TraceError(number, f"not the size of an expert, or of too many layers: {text!r}")
        if int(text):
            self._expert_bytes.append(int(text))

    def _start(self, number: int, key: tuple[int, int, int, int]) -> None:
        turn, phase, step, layer = key
        before = self._key
        if turn != before[0]:
            self._next_turn(number, turn, before[0])
        elif phase < before[1]:
            raise TraceError(number, f"a prompt row after decoded tokens of turn {turn}")
        if self._last_step.get(layer, (-1, -1)) >= (turn, step):
            raise TraceError(number, f"token twice or out of order: turn {turn}, step {step}, layer {layer}")
        if phase:
            if self._decoding and (turn, 1, step) != before[:3]:
                self._end_token(number)
            if before[:3] != (turn, 1, step):
                self._count_token(number)
        elif step not in self._prompt_steps:
            self._prompt_steps.add(step)
            self._count_token(number)
        self._last_step[layer] = (turn, step)
        self._key = key
        self._weight = math.inf

    def _check(self, number: int, key: tuple[int, int, int, int]) -> None:
        turn, phase, step, layer = key
        if phase not in (0, 1):
            raise TraceError(number, f"phase is neither 0 nor 1: {phase}")
        if not 0 <= layer < self._layers:
            raise TraceError(number, f"layer out of range 0 to {self._layers - 1}: {layer}")
        if turn < 0 or step < 0:
            raise TraceError(number, f"turn and step cannot be below 0: {turn}, {step}")

    def _next_turn(self, number: int, turn: int, before: int) -> None:
        if turn < before:
            raise TraceError(number, f"turn {turn} after turn {before}")
        self._end_token(number)
        self._turns.append(Turn())
        self._prompt_steps = set()

    def _count_token(self, number: int) -> None:
        self._tokens += 1
        if self._tokens > self._tokens_max:
            raise TraceError(number, f"more than {self._tokens_max:,} tokens")

    def _add(self, number: int, slot: int, expert: int, weight: float) -> None:
        used = self._used
        if slot != len(used):
            raise TraceError(number, f"slot {slot} where {len(used)} was expected: a row is missing or twice")
        if not 0 <= expert < self._experts:
            raise TraceError(number, f"expert out of range 0 to {self._experts - 1}: {expert}")
        if expert in used:
            raise TraceError(number, f"expert {expert} twice in one token")
        if not math.isfinite(weight):
            raise TraceError(number, f"weight is not finite: {weight}")
        used.append(expert)

    def _finish(self, number: int) -> None:
        """Store the rows of one layer and token."""
        if not self._used:
            return
        turn, phase, step, layer = self._key
        expected = self._top_k.setdefault(layer, len(self._used))
        if len(self._used) != expected:
            where = f"turn {turn}, step {step}, layer {layer}"
            words = f"before this line: {len(self._used)} experts instead of {expected}: {where}"
            raise TraceError(number, words)
        place = self._turns[-1].decode if phase else self._turns[-1].prompt
        place.setdefault(layer, array("H")).extend(self._used)
        if phase:
            self._decoding.add(layer)
        self._used = []

    def _end_token(self, number: int) -> None:
        """Check that the decoded token has the same layers as all others."""
        if not self._decoding:
            return
        if self._whole is None:
            self._whole = set(self._decoding)
        missing = self._whole.symmetric_difference(self._decoding) | (set(self._top_k) - self._whole)
        if missing:
            raise TraceError(number, f"before this line: layer {min(missing)} is missing in a decoded token")
        self._decoding = set()

    def trace(self, number: int) -> Trace:
        """Return the trace; call it after the last line."""
        self._finish(number)
        self._end_token(number)
        if not self._has_columns:
            raise TraceError(number, "the line of column names is missing")
        if self._whole is None:
            raise TraceError(number, "no decoded token")
        return Trace(
            name=self._facts.get("model", "").rpartition("/")[2],
            architecture=self._facts.get("arch", ""),
            layers=self._layers,
            experts=self._experts,
            top_k={layer: self._top_k[layer] for layer in sorted(self._whole)},
            turns=tuple(self._turns),
            expert_mb=statistics.fmean(self._expert_bytes) / 1e6 if self._expert_bytes else None,
        )
