"""Measure the loss of a quantized file: the engine's own program reads one text with it and with its origin.

Both runs are on the CPU, whatever serves: beside an engine GPUs have no room, and only the weights differ. Both predict
the same tokens, so they are compared chunk by chunk, as `tune/figures/perplexity.py` compares KV cache types.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import fmean, stdev

from appliance.engines.engine import ChunkSpec, TextReader
from appliance.errors import EngineNotReadyError
from appliance.model.files.quantized import Loss
from appliance.quantize.pauses import Pauses, run_to_end
from appliance.supervisor import Supervisor
from appliance.tune.trials.kv_quality import SILENT_TRIES, SPARE, TEXT
from appliance.values import dataclass

CHUNKS = ChunkSpec(chunk_tokens=256, chunks=16)  # 4,096 tokens; 16 means tell their own scatter
WORK_S = 1800.0  # of one run, pauses not counted


@dataclass(frozen=True, kw_only=True)
class Run:
    """A run over a text. `name` is that of the model's file; `start` makes the program's command and reads its log."""

    name: str
    start: Callable[[ChunkSpec, Path], TextReader]


async def measure_loss(origin: Run, other: Run, pauses: Pauses | None) -> Loss:
    """Measure what `other` loses against `origin`.

    Raises EngineNotReadyError (43) or the program's own error if there is no figure.
    """
    exact = await _read(origin, pauses)
    return compare(exact, await _read(other, pauses))


def compare(exact: Sequence[float], other: Sequence[float]) -> Loss:
    """Return the loss from the mean nats of each chunk. A value that is no finite number makes the loss infinite."""
    differences = [after - before for before, after in zip(exact, other, strict=True)]
    if not all(math.isfinite(nats) for nats in exact):
        message = "the original's probabilities of the text are not finite numbers"
        raise EngineNotReadyError(message)
    is_finite = all(math.isfinite(nats) for nats in differences)
    return Loss(
        difference=fmean(differences) if is_finite else math.inf,
        standard_error=stdev(differences) / math.sqrt(len(differences)) if is_finite else math.inf,
        tokens=CHUNKS.chunk_tokens * len(differences),
        perplexity=math.exp(min(100.0, fmean(other))) if is_finite else math.inf,
        origin_perplexity=math.exp(min(100.0, fmean(exact))),
    )


async def _read(run: Run, pauses: Pauses | None) -> tuple[float, ...]:
    """Read the text and return the mean nats of each chunk."""
    log: tuple[str, ...] = ()
    for _ in range(SILENT_TRIES):
        # One chunk more: the program may lose its last rows at its end.
        reader = run.start(ChunkSpec(chunk_tokens=CHUNKS.chunk_tokens, chunks=CHUNKS.chunks + SPARE), TEXT)
        is_enough = asyncio.Event()

        def on_line(line: str, reader: TextReader = reader, is_enough: asyncio.Event = is_enough) -> None:
            reader.add(line)
            if reader.rows >= CHUNKS.chunks:
                is_enough.set()

        supervisor = Supervisor(on_line=on_line)
        crash = await run_to_end(supervisor, reader.command, pauses, is_enough, work_s=WORK_S)
        if reader.rows >= CHUNKS.chunks:
            return reader.nll[: CHUNKS.chunks]
        if crash is None:
            message = f"{reader.name} read {reader.rows} of {CHUNKS.chunks} chunks of {run.name} in {WORK_S:,.0f} s"
            raise EngineNotReadyError(message)
        if crash.exit_code != 0 and crash.first_error:
            raise reader.as_error(crash)
        log = crash.log
    message = f"{reader.name} read {reader.rows} of {CHUNKS.chunks} chunks of {run.name} and ended without an error"
    raise EngineNotReadyError(message, log=log)
