"""One slot count on the real engine: N users, each with a job of the workload, all begun at the same moment."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import replace

from appliance.command import Command
from appliance.engines.engine import Completion, Engine
from appliance.errors import EngineNotReadyError
from appliance.plan import Plan
from appliance.tune.figures.slots import Concurrency, Job
from appliance.tune.figures.workload import Workload, scaled
from appliance.tune.trials.engine import Bench, in_time, running, unless_stalled
from appliance.tune.trials.run_trial import Probe, Step

SYSTEM = 32  # tokens that all users share, as a system prompt
TRIES = 64  # places at which a user's text may begin
CHANCE = 8  # tokens that two texts may share behind it
PILOT = 96  # tokens read to learn what a job will take
PILOT_MADE = 8
SHARE = 0.5  # of what is left, for the jobs: they are slower at depth, and together, than the pilot
LEAST = 96  # tokens of a job: fewer say nothing


async def measure_slots(
    plan: Plan,
    bench: Bench,
    *,
    users: int,
    workload: Workload,
    left_s: float,
    on_step: Callable[[Step], None],
    is_exact: bool = False,
) -> Concurrency | str:
    """Starts the plan with its `parallel` slots. The jobs are scaled to `left_s` and to each user's share of it,
    unless `is_exact`: that is for the workload of a measurement before, since only the same job can be compared. After
    `left_s` it is given up: why nothing was measured, in words. Raises the engine's error when it fails on the
    way."""

    async def measured() -> Concurrency | str:
        began = time.monotonic()
        on_step(Step(plan=plan, what="loading"))
        command = bench.start(plan)
        async with running(bench.engine, command) as supervisor:
            load_s = time.monotonic() - began
            work = drive(
                bench.engine,
                command,
                plan,
                users=users,
                workload=workload,
                left_s=left_s - load_s,
                on_step=on_step,
                is_exact=is_exact,
            )
            found = await unless_stalled(work, supervisor, command.stall_timeout_s)
        return found if isinstance(found, str) else replace(found, load_s=load_s)

    late = f"{left_s:.1f} s were not enough for {users} users with {plan.parallel} slots"
    return await in_time(left_s, measured()) or late


async def drive(
    engine: Engine,
    command: Command,
    plan: Plan,
    *,
    users: int,
    workload: Workload,
    left_s: float,
    on_step: Callable[[Step], None],
    is_exact: bool = False,
) -> Concurrency | str:
    """The same on an engine that is up: `plan` is what it was started with."""
    async with engine.client(command) as client:
        probe = await Probe.of(client)
        await probe.warm()
        job = workload
        if not is_exact:
            within = await _within(probe, workload, users=users, context=plan.context, left_s=left_s)
            if isinstance(within, str):
                return within
            job = within
        prompts = _prompts(probe, users, job.tokens_in)
        if job.tokens_reused:
            on_step(Step(plan=plan, what=f"filling {users} contexts of {job.tokens_reused:,} tokens"))
            for prompt in prompts:
                await probe.complete(prompt[: job.tokens_reused], 1)
        on_step(Step(plan=plan, what=f"{users} users at once in {plan.parallel} slots, {job.tokens_in:,} tokens each"))
        jobs = await _together(probe, prompts, job)
    return Concurrency(slots=plan.parallel, workload=job, jobs=jobs)


async def _together(probe: Probe, prompts: list[list[int]], job: Workload) -> tuple[Job, ...]:
    """The first failure ends the others."""
    tasks = [asyncio.create_task(_job(probe, prompt, job)) for prompt in prompts]
    try:
        return tuple(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _within(probe: Probe, workload: Workload, *, users: int, context: int, left_s: float) -> Workload | str:
    """As much of the job as fits the context beside the others', and as the time lets all users do; where that is too
    little to say anything, in words."""
    job = scaled(workload, context // users)
    point = await probe.run(min(PILOT, job.tokens_in), PILOT_MADE)
    each_s = (job.tokens_in * point.prefill_ms + job.tokens_out * point.decode_ms) / 1000
    whole = job.tokens_in + job.tokens_out
    fits = int(whole * max(0.0, left_s) * SHARE / (users * each_s))
    least = min(whole, LEAST)
    if fits < least:
        needed_s = users * each_s * least / whole
        return f"jobs of {least} tokens for {users} users would take {needed_s:.0f} s, of {left_s:.0f} s that are left"
    return scaled(workload, min(whole, fits))


def _prompts(probe: Probe, users: int, tokens: int) -> list[list[int]]:
    """One beginning for all, then another part of the text for each: its first token is neither the pilot's nor that of
    another user, as long as the text has others."""
    text = probe.prompt(SYSTEM + (users + 1) * tokens + TRIES)
    found: list[list[int]] = []
    seen = {text[SYSTEM]}
    for user in range(users):
        at = SYSTEM + user * tokens
        at += next((step for step in range(TRIES) if text[at + step] not in seen), 0)
        seen.add(text[at])
        found.append((text[:SYSTEM] + text[at:])[:tokens])
    return found


async def _job(probe: Probe, prompt: list[int], workload: Workload) -> Job:
    began = time.monotonic()
    found = await probe.complete(prompt, workload.tokens_out)
    return job_of(found, workload, time.monotonic() - began)


def job_of(found: Completion, workload: Workload, seconds: float) -> Job:
    """`seconds` by the caller's clock, the rest by the engine's. Raises EngineNotReadyError when it did other work than
    asked: what was read and cached is not the prompt, what was made not the answer, or more was cached than any turn
    before could have left."""
    read, cached, made = found.read, found.cached, found.made
    most = max(workload.tokens_reused, SYSTEM) + CHANCE
    if read + cached != workload.tokens_in or made != workload.tokens_out or cached > most:
        message = (
            f"engine did other work than asked: read {read} + cached {cached} of {workload.tokens_in} "
            f"(at most {most} cached), made {made} of {workload.tokens_out}"
        )
        raise EngineNotReadyError(message)
    decode_s = found.decode_ms / 1000
    if not 0 < decode_s < seconds:
        message = f"engine gave no times: {decode_s:g} s for {made} tokens of a job of {seconds:g} s"
        raise EngineNotReadyError(message)
    return Job(
        seconds=seconds,
        ttft_s=seconds - decode_s,  # waiting for a slot is in it
        decode_ms=1000 * decode_s / max(1, made - 1),
        tokens_read=read,
        tokens_cached=cached,
    )
