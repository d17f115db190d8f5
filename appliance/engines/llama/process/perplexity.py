"""llama-perplexity: its command for a plan, and the mean log-likelihood of each piece of a text that it prints.

It runs without a base file of log-probabilities. That file takes two bytes for each entry of the vocabulary and token
of text (2.5 GB for 8,000 tokens with a vocabulary of 152,000), and its values are rounded and cut off at 16 nats. The
table of means is enough to compare two runs over the same text.
"""

from __future__ import annotations

import re
from itertools import pairwise
from pathlib import Path

from appliance.engines.engine import ChunkSpec, Ending, Install
from appliance.engines.llama.planning.arguments.launch import launch_of
from appliance.engines.llama.process.endings import as_error
from appliance.engines.llama.process.server import command_of_job, metadata_arguments, placement_arguments
from appliance.errors import FatalError
from appliance.image_facts import EngineFacts
from appliance.plan import Plan, k_and_v

BINARY = "llama-perplexity"


def arguments(plan: Plan, facts: EngineFacts, text: Path, chunk_spec: ChunkSpec) -> tuple[str, ...]:
    """Return the arguments. All that the result may depend on comes from the plan, except the context: one piece."""
    launch = launch_of(plan)
    words = {
        "--model": plan.model_path,
        "--file": text,
        "--chunks": chunk_spec.chunks,
        "--ppl-output-type": 1,  # one line for each piece, with the mean in nats
        "--fit": "off",
        "--ctx-size": chunk_spec.chunk_tokens,
        "--batch-size": chunk_spec.chunk_tokens,  # one piece at a time, so that each has a line
        "--ubatch-size": min(launch.ubatch, chunk_spec.chunk_tokens),
        "--cache-type-k": k_and_v(plan.kv_type)[0],
        "--cache-type-v": k_and_v(plan.kv_type)[1],
        "--flash-attn": "on" if launch.flash_attention else "off",
        "--threads": launch.threads,
        "--threads-batch": launch.threads_batch,
        "--load-mode": launch.load_mode,
        "--log-colors": "off",
    }
    flags = [str(word) for flag, value in words.items() for word in (flag, value)]
    return (
        *flags,
        *metadata_arguments(plan, facts),
        *placement_arguments(plan, facts),
        "--no-warmup",
        "--offline",
        "--log-prefix",
    )


# The program prints `LOG("%8d  %.4lf  %4lf  %4lf\n", i*n_ctx, exp(nll/count), av, av2)`: av is the running mean.
_NUMBER = r"(-?\d+\.\d+|-?nan|-?inf)"
_ROW = re.compile(rf" *(\d+) +{_NUMBER} +{_NUMBER} +{_NUMBER}")
_PIECES = re.compile(r"calculating perplexity over (\d+) chunks, n_ctx=(\d+)")


class Table:
    """Means of each piece, computed from the running means that the program prints.

    These have six decimals, so the last of 100 pieces is exact within 0.0001. A value that is no number becomes nan. A
    row out of order ends the table.
    """

    def __init__(self) -> None:
        self.chunks: int | None = None  # number of pieces that the program said it would read; None: not said yet
        self._step = 0
        self._sums = [0.0]

    def add(self, line: str) -> None:
        if found := _PIECES.search(line):
            self.chunks, self._step = int(found[1]), int(found[2])
        elif self._step and (row := _ROW.fullmatch(line.rstrip())) and int(row[1]) == self._step * self.rows:
            self._sums.append(float(row[3]) * len(self._sums))

    @property
    def rows(self) -> int:
        return len(self._sums) - 1

    @property
    def nll(self) -> tuple[float, ...]:
        """Mean nats of a scored token, for each piece."""
        return tuple(after - before for before, after in pairwise(self._sums))


class Perplexity(Table):
    """One run of llama-perplexity, and the table from its log so far."""

    name = BINARY

    def __init__(self, plan: Plan, install: Install, chunk_spec: ChunkSpec, text: Path) -> None:
        super().__init__()
        argv = (str(install.engine_dir / BINARY), *arguments(plan, install.facts, text, chunk_spec))
        self.command = command_of_job(argv, plan, install)

    def as_error(self, ending: Ending) -> FatalError:
        return as_error(ending, name=BINARY)
