"""Check whether a smaller KV cache type is harmless for this model: the real engine reads one text with both types.

A type is refused unless harmlessness was shown: after a crash, a stall, too little time or text, or an inconclusive
result. The check covers depths up to 1,024 tokens. Deeper contexts are not checked, since each of a dozen chunks would
take minutes.
"""

from __future__ import annotations

import asyncio
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path

from appliance.engines.engine import ChunkSpec, TextReader
from appliance.errors import EngineError, EngineNotReadyError
from appliance.plan import KvCheck, Plan
from appliance.race import first_of
from appliance.supervisor import Crash, Supervisor
from appliance.tune.figures.measurement import TRIES
from appliance.tune.figures.perplexity import (
    BYTES_PER_TOKEN,
    CHUNKS_MIN,
    ScoredChunk,
    extent_for,
    judge,
    next_gap,
    perplexity,
    refused,
)
from appliance.tune.trials.run_trial import Step

TEXT = Path(__file__).with_name("addresses.txt")  # its source is in addresses.md
EXACT = "f16"
# The program does not flush its log at its end, so the last row may be lost on a busy machine. With one chunk more, the
# last wanted row comes before the end, and the program is stopped then.
SPARE = 1
# For the same reason a program that fails at once may not log its error: seen in 14 of 60 runs on a busy machine.
SILENT_TRIES = 5
Start = Callable[[Plan, ChunkSpec, Path], TextReader]


async def check(
    plan: Plan,
    kinds: Sequence[str],
    start: Start,
    *,
    budget_s: float,
    prefill_tokens_per_s: float,
    on_step: Callable[[Step], None],
    kept: Sequence[ScoredChunk] = (),
    on_result: Callable[[ScoredChunk], None] = lambda _: None,
) -> tuple[KvCheck, ...]:
    """Return one verdict for each KV cache type, in the given order, up to the first accepted one; the rest are smaller
    or worse.

    It takes at most `budget_s` plus the time to end the engine. Nothing else may use the devices meanwhile. An error
    that another type may not have is a refusal; errors of the model, a GPU or the CPU are raised as FatalError.

    `on_result` gets what each run has read, even if it was interrupted. `kept` are results of earlier checks; only
    missing chunks are read. So a series of interrupted checks completes if each one has time for one load and one
    chunk. An interruption loses the load, the current chunk, and f16 chunks that the other type has not read yet.
    Verdicts are always computed from what was read, so a refusal for lack of time is not kept.
    """
    if plan.is_embedding:
        return tuple(refused(kind, "the model gives vectors and generates no text") for kind in kinds)
    chunk_spec = extent_for(
        seconds=budget_s,
        prefill_tokens_per_s=prefill_tokens_per_s,
        text_bytes=TEXT.stat().st_size,
        context=plan.context,
    )
    if chunk_spec is None:
        why = f"{budget_s:.0f} s are too short at {prefill_tokens_per_s:,.0f} tokens a second of prefill"
        return tuple(refused(kind, why) for kind in kinds)
    checking = _Check(plan, chunk_spec, start, budget_s=budget_s, on_step=on_step, kept=kept, on_result=on_result)
    kv_checks: list[KvCheck] = []
    for kind in kinds:
        kv_checks.append(await checking.judged(kind))
        if kv_checks[-1].is_accepted:
            break
    return tuple(kv_checks)


class _Check:
    """Chunks read so far with each type, and the time that is left."""

    def __init__(
        self,
        plan: Plan,
        chunk_spec: ChunkSpec,
        start: Start,
        *,
        budget_s: float,
        on_step: Callable[[Step], None],
        kept: Sequence[ScoredChunk],
        on_result: Callable[[ScoredChunk], None],
    ) -> None:
        # The key must not contain the served context: it follows the free memory and differs at nearly every start.
        self._plan = replace(plan, context=chunk_spec.chunk_tokens)
        self._extent = chunk_spec
        self._pieces = chunk_spec.chunks
        self._start = start
        self._budget_s = budget_s
        self._deadline = time.monotonic() + budget_s
        self._on_step = on_step
        self._on_result = on_result
        alike = [scored_chunk for scored_chunk in kept if scored_chunk.chunk_tokens == chunk_spec.chunk_tokens]
        self._read = [scored_chunk for scored_chunk in alike if scored_chunk.error is None]
        errors = [(scored_chunk.key, scored_chunk.error) for scored_chunk in alike if scored_chunk.error is not None]
        keys = [key for key, _ in errors]
        self._failed = {key: words for key, words in errors if keys.count(key) >= TRIES}

    async def judged(self, kind: str) -> KvCheck:
        try:
            while (gap := next_gap(self._pairs(kind), self._pieces)) and self._left_s > 0:
                await self._read_on(kind, gap)
        except EngineError as error:
            return refused(kind, error.message)
        pairs = self._pairs(kind)
        if len(pairs) < min(CHUNKS_MIN, self._pieces):
            words = f"engine did not read the text within {self._budget_s:.0f} s"
            return refused(kind, f"{words}: {len(pairs)} chunks of at least {CHUNKS_MIN}")
        seconds = sum(scored_chunk.seconds for each in (EXACT, kind) for scored_chunk in self._of(each))
        return judge(kind, self._extent, pairs.values(), seconds=seconds)

    @property
    def _left_s(self) -> float:
        return self._deadline - time.monotonic()

    def _key(self, kind: str) -> str:
        return replace(self._plan, kv_type=kind).key

    def _of(self, kind: str) -> list[ScoredChunk]:
        return [scored_chunk for scored_chunk in self._read if scored_chunk.key == self._key(kind)]

    def _pairs(self, kind: str) -> dict[int, tuple[float, float]]:
        return perplexity(self._of(EXACT), self._of(kind))

    async def _read_on(self, kind: str, gap: range) -> None:
        """Read a gap with f16 if f16 has not read from its beginning, else with the other type."""
        exact = max(
            (len(scored_chunk.nll) for scored_chunk in self._of(EXACT) if scored_chunk.first == gap.start), default=0
        )
        if exact:
            await self._run(kind, gap.start, min(len(gap), exact))
            return
        try:
            await self._run(EXACT, gap.start, len(gap))
        except EngineError as error:
            message = f"with {EXACT} {error.message}"
            raise EngineNotReadyError(message) from error

    async def _run(self, kind: str, first: int, chunks: int) -> None:
        """Run the program once; what it read is kept even if time is up or it is cancelled.

        Raises the program's error if it fails, and EngineNotReadyError (43) if it read fewer chunks than announced,
        which it does with exit code 0.
        """
        plan = replace(self._plan, kv_type=kind)
        if plan.key in self._failed:
            raise EngineNotReadyError(self._failed[plan.key])
        chunk_spec = replace(self._extent, chunks=chunks)
        self._on_step(Step(plan=plan, what=f"reading {chunk_spec.read:,} tokens of text with a KV cache of {kind}"))
        for _ in range(SILENT_TRIES):
            began = time.monotonic()
            crash, reader = await self._read_once(plan, chunk_spec, first)
            if crash is None or not crash.exit_code or crash.first_error:
                break
        if crash is not None and reader is not None:
            self._pass_ending(plan, chunk_spec, crash, reader)
            self._keep(plan, chunk_spec, first, reader, began)
            self._pieces = min(self._pieces, first + reader.rows)  # the text has no more chunks

    async def _read_once(self, plan: Plan, chunk_spec: ChunkSpec, first: int) -> tuple[Crash | None, TextReader | None]:
        """Run the program. Returns how it ended by itself, and its reader. If it was stopped, the ending is None and
        what it read is kept here."""
        began = time.monotonic()
        is_enough = asyncio.Event()
        reader: TextReader | None = None

        def on_line(line: str) -> None:
            if reader is not None:
                reader.add(line)
                if reader.rows >= chunk_spec.chunks:
                    is_enough.set()

        crash: Crash | None = None
        supervisor = Supervisor(on_line=on_line)
        try:
            with _text_from(int(first * chunk_spec.chunk_tokens * BYTES_PER_TOKEN)) as path:
                reader = self._start(plan, replace(chunk_spec, chunks=chunk_spec.chunks + SPARE), path)
                supervisor.start(reader.command)
                async with asyncio.timeout(max(0.0, self._left_s)):
                    crash = await _ending(supervisor, is_enough)
        except TimeoutError:
            pass  # time is up; what was read is kept below
        except EngineError as error:
            self._note_failure(plan, chunk_spec, error)
            raise
        finally:
            await supervisor.stop()
            if crash is None and reader is not None:
                self._keep(plan, chunk_spec, first, reader, began)
        return crash, reader

    def _pass_ending(self, plan: Plan, chunk_spec: ChunkSpec, crash: Crash, reader: TextReader) -> None:
        """Return if the program read all of the text. Raises its error for any other ending."""
        if crash.exit_code != 0 or crash.stalled:
            error = reader.as_error(crash)
        elif reader.chunks is not None and 0 < reader.chunks <= reader.rows:
            return
        else:
            of = "an unknown number of" if reader.chunks is None else min(reader.chunks, chunk_spec.chunks)
            message = f"engine {reader.name} read {reader.rows} of {of} chunks of text and ended"
            error = EngineNotReadyError(message, hint="the log has its last lines", log=crash.log)
        if isinstance(error, EngineError):
            self._note_failure(plan, chunk_spec, error)
        raise error

    def _keep(self, plan: Plan, chunk_spec: ChunkSpec, first: int, reader: TextReader, began: float) -> None:
        nll = reader.nll[: chunk_spec.chunks]
        if not nll:
            return
        seconds = time.monotonic() - began
        found = ScoredChunk(key=plan.key, chunk_tokens=chunk_spec.chunk_tokens, first=first, nll=nll, seconds=seconds)
        self._read.append(found)
        self._on_result(found)

    def _note_failure(self, plan: Plan, chunk_spec: ChunkSpec, error: EngineError) -> None:
        self._failed[plan.key] = error.message
        self._on_result(ScoredChunk(key=plan.key, chunk_tokens=chunk_spec.chunk_tokens, first=0, error=error.message))


async def _ending(supervisor: Supervisor, is_enough: asyncio.Event) -> Crash | None:
    """Wait for the end of the program and return it; None as soon as enough was read."""
    _, ending = await first_of(is_enough.wait(), supervisor.wait_ended())
    return None if is_enough.is_set() else ending.result()


@contextmanager
def _text_from(at: int) -> Iterator[Path]:
    """Provide the text from the first word after byte `at`, followed by its beginning: the program refuses a text
    shorter than two chunks. Raises EngineNotReadyError (43) if /tmp has no room for it."""
    if not at:
        yield TEXT
        return
    whole = TEXT.read_bytes()
    cut = whole.index(b" ", at) + 1
    with ExitStack() as stack:
        try:
            folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="text-"))
            path = Path(folder) / TEXT.name
            path.write_bytes(whole[cut:] + whole[:cut])
        except OSError as error:
            message = f"a part of the text cannot be written: {tempfile.gettempdir()}: {error.strerror}"
            raise EngineNotReadyError(message, hint="give /tmp some room") from error
        yield path
