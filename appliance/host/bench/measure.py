"""Measures the rows of a benchmark in order: a warm-up, then each prompt length at each concurrency."""

from __future__ import annotations

import time
from asyncio import TaskGroup
from collections.abc import AsyncIterator, Callable
from dataclasses import replace

from appliance.errors import ConfigError, EngineNotReadyError, FatalError
from appliance.host.bench.client import Client
from appliance.host.bench.figures import Row, Sample, row_of, skipped
from appliance.host.bench.prompts import Prompts, TokensPerWord, calibrate
from appliance.values import dataclass

WARM_UP_WORDS = (32, 256)
WARM_UP_TOKENS = 8
READ_SHARE = 0.8  # a server that reads a smaller share of a prompt has cut it


@dataclass(frozen=True, kw_only=True)
class Workload:
    prompts: tuple[int, ...]  # tokens
    concurrency: tuple[int, ...]
    tokens: int  # tokens of each answer
    requests: int  # requests of each row, multiplied by its concurrency
    limit_s: float  # no request of a row starts later than this
    seed: int

    @property
    def rows(self) -> int:
        return len(self.prompts) * len(self.concurrency)


@dataclass(frozen=True, kw_only=True)
class Doing:
    """What is being measured now, for the progress display."""

    row: int
    rows: int
    prompt: int
    concurrency: int
    done: int
    of: int


async def measure(client: Client, workload: Workload, tell: Callable[[Doing], None]) -> AsyncIterator[Row]:
    """Yield each row when it is done; stops after a row in which every request failed. Raises EngineNotReadyError or
    ConfigError if the warm-up fails."""
    prompts = Prompts(workload.seed)
    scale = await _warm_up(client, prompts)
    number = 0
    for tokens in workload.prompts:
        reason: str | None = None
        for concurrency in workload.concurrency:
            number += 1
            doing = Doing(row=number, rows=workload.rows, prompt=tokens, concurrency=concurrency, done=0, of=0)
            row = (
                skipped(tokens, concurrency, reason)
                if reason
                else await _row(client, workload, prompts, scale, doing, tell)
            )
            reason = row.skipped
            yield row
            if row.failed and not row.answered:
                return


async def _warm_up(client: Client, prompts: Prompts) -> TokensPerWord:
    """Return the tokens per word. The times are dropped: the first request after a start has costs that later ones do
    not have."""
    pairs = []
    for words in WARM_UP_WORDS:
        sample = await client.ask(prompts.make(words), WARM_UP_TOKENS)
        if sample.answer is None:
            raise _warm_up_failed(sample)
        pairs.append((words, sample.answer.prompt_tokens))
    try:
        return calibrate(*pairs)
    except ValueError as error:
        message = f"the endpoint's token counts make no sense: {error}"
        raise ConfigError(message, hint="the counts are `usage.prompt_tokens` of its answers") from error


def _warm_up_failed(sample: Sample) -> FatalError:
    if sample.too_long:
        message = f"the endpoint's context is too small to measure anything: {sample.too_long}"
        return ConfigError(message, hint=f"{WARM_UP_WORDS[-1]} words must fit")
    message = f"the first request failed: {sample.failure}"
    return EngineNotReadyError(message, hint="see the server's log; `appliance status` shows whether it is ready")


async def _row(
    client: Client,
    workload: Workload,
    prompts: Prompts,
    scale: TokensPerWord,
    doing: Doing,
    tell: Callable[[Doing], None],
) -> Row:
    words = scale.words(doing.prompt)
    of = workload.requests * doing.concurrency
    # All prompts are made before the clock starts: a long one takes milliseconds, which would delay other requests.
    waiting = [prompts.make(words) for _ in range(of)]
    until = time.perf_counter() + workload.limit_s
    samples: list[Sample] = []

    async def work() -> None:
        is_first = True
        while waiting and (is_first or time.perf_counter() < until) and not any(sample.too_long for sample in samples):
            is_first = False
            samples.append(_checked(await client.ask(waiting.pop(), workload.tokens), doing.prompt))
            tell(replace(doing, done=len(samples), of=of))

    tell(replace(doing, of=of))
    try:
        async with TaskGroup() as group:
            for _ in range(doing.concurrency):
                group.create_task(work())
    except ExceptionGroup as errors:
        raise errors.exceptions[0] from None  # all have the same reason: the key is refused
    too_long = next((sample.too_long for sample in samples if sample.too_long), None)
    return (
        skipped(doing.prompt, doing.concurrency, too_long)
        if too_long
        else row_of(doing.prompt, doing.concurrency, samples)
    )


def _checked(sample: Sample, tokens: int) -> Sample:
    """Return the sample, marked as too long if the server cut the prompt without a message, as some servers do."""
    if sample.answer is None or sample.answer.prompt_tokens >= READ_SHARE * tokens:
        return sample
    said = f"the server read only {sample.answer.prompt_tokens:,} of about {tokens:,} tokens"
    return Sample(started_s=sample.started_s, ended_s=sample.ended_s, too_long=said)
