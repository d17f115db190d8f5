"""llama-perplexity: Plan -> Command, and how well the model foretold a text, piece by piece. Its flags live here.

Without a base of log-probabilities: that file takes two bytes for each word of the vocabulary and token of text, 2.5 GB
for 8,000 tokens of a vocabulary of 152,000, and keeps them rounded and cut off at 16 nats. Its table of means is enough
to pair two runs over the same text.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from appliance.command import Command
from appliance.engines.llama.server import command_of_job, placement_arguments
from appliance.image_facts import EngineFacts
from appliance.plan import Plan

BINARY = "llama-perplexity"


@dataclass(frozen=True, kw_only=True)
class Extent:
    """How much text is read: pieces of the same number of tokens, each from an empty cache."""

    piece_tokens: int
    pieces: int

    @property
    def scored_in_piece(self) -> int:
        """The first half of a piece only fills the cache, and its last token has no next (perplexity.cpp)."""
        return self.piece_tokens - self.piece_tokens // 2 - 1

    @property
    def read(self) -> int:
        return self.piece_tokens * self.pieces


@dataclass(frozen=True, kw_only=True)
class Reading:
    """`nll`: nats for each scored token, the mean of each piece; `pieces`: how many the program said it would read."""

    pieces: int | None
    nll: tuple[float, ...]


def arguments(plan: Plan, facts: EngineFacts, text: Path, extent: Extent) -> tuple[str, ...]:
    """Everything that the outcome may depend on is the plan's, but for a window of one piece."""
    words = {
        "--model": plan.model_path,
        "--file": text,
        "--chunks": extent.pieces,
        "--ppl-output-type": 1,  # a line a piece, with the mean in nats
        "--fit": "off",
        "--ctx-size": extent.piece_tokens,
        "--batch-size": extent.piece_tokens,  # one piece at a time, and so one line for each
        "--ubatch-size": min(plan.ubatch, extent.piece_tokens),
        "--cache-type-k": plan.kv_type,
        "--cache-type-v": plan.kv_type,
        "--flash-attn": "on" if plan.flash_attention else "off",
        "--threads": plan.threads,
        "--threads-batch": plan.threads_batch,
        "--load-mode": plan.load_mode,
        "--log-colors": "off",
    }
    flags = [str(word) for flag, value in words.items() for word in (flag, value)]
    return (*flags, *placement_arguments(plan, facts), "--no-warmup", "--offline", "--log-prefix")


def command(
    plan: Plan,
    facts: EngineFacts,
    extent: Extent,
    *,
    text: Path,
    engine_dir: Path,
    cache_dir: Path,
    stall_timeout_s: float,
    driver_dir: Path | None = None,
    oom_kills: Callable[[], int | None] | None = None,
) -> Command:
    """Ready for a supervisor."""
    argv = (str(engine_dir / BINARY), *arguments(plan, facts, text, extent))
    return command_of_job(
        argv,
        plan,
        cache_dir=cache_dir,
        stall_timeout_s=stall_timeout_s,
        driver_dir=driver_dir,
        oom_kills=oom_kills,
    )


# `LOG("%8d  %.4lf  %4lf  %4lf\n", i*n_ctx, exp(nll/count), av, av2)`: av is the mean of all pieces so far.
_NUMBER = r"(-?\d+\.\d+|-?nan|-?inf)"
_ROW = re.compile(rf" *(\d+) +{_NUMBER} +{_NUMBER} +{_NUMBER}")
_PIECES = re.compile(r"calculating perplexity over (\d+) chunks, n_ctx=(\d+)")


class Table:
    """The mean of each piece out of the running means, line by line: six decimals, so that of 100 pieces the last is
    within 0.0001. What is no number comes as nan; a row that is out of its order ends the table."""

    def __init__(self) -> None:
        self.pieces: int | None = None
        self._step = 0
        self._sums = [0.0]

    def add(self, line: str) -> None:
        if found := _PIECES.search(line):
            self.pieces, self._step = int(found[1]), int(found[2])
        elif self._step and (row := _ROW.fullmatch(line.rstrip())) and int(row[1]) == self._step * self.rows:
            self._sums.append(float(row[3]) * len(self._sums))

    @property
    def rows(self) -> int:
        return len(self._sums) - 1

    @property
    def reading(self) -> Reading:
        return Reading(pieces=self.pieces, nll=tuple(after - before for before, after in pairwise(self._sums)))


def parse_reading(lines: Iterable[str]) -> Reading:
    table = Table()
    for line in lines:
        table.add(line)
    return table.reading
