"""Measurement of one number of slots on the real engine: N users, each with one job, all begun at the same moment."""

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

SYSTEM = 32  # tokens at the beginning that all users share, like a system prompt
TRIES = 64  # number of positions at which a user's text may begin
CHANCE = 8  # tokens after the shared beginning that two texts may have in common by chance
PILOT = 96  # prompt tokens of a first request, from which the time of a job is estimated
PILOT_MADE = 8
SHARE = 0.5  # share of the time left that is planned for the jobs: together and at depth they are slower than the pilot
LEAST = 96  # minimum tokens of a job for a meaningful result


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
    """Start the plan with its `parallel` slots and measure. Returns the result, or why nothing was measured, also if it
    takes longer than `left_s`. Raises the engine's error if it fails.

    Jobs are scaled so that all users finish within `left_s`. With `is_exact` they are not scaled: the workload is that
    of an earlier measurement, and only identical jobs can be compared.
    """

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
    """Measure on a running engine that was started with `plan`. Returns as `measure_slots` does."""
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
    """Run all jobs at once. The first failure cancels the others."""
    tasks = [asyncio.create_task(_job(probe, prompt, job)) for prompt in prompts]
    try:
        return tuple(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _within(probe: Probe, workload: Workload, *, users: int, context: int, left_s: float) -> Workload | str:
    """Return the job scaled to each user's part of the context and to the time left; a sentence if so little is
    meaningless."""
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
    """Return one prompt for each user: a shared beginning, then a different part of the text. Each part begins with a
    token that neither the pilot nor another user has there, if the text allows, so that no cached prefix is reused."""
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
    """Return the job's figures. `seconds` is from the caller's clock, the rest from the engine's.

    Raises EngineNotReadyError if the engine did other work than asked: read and cached tokens do not add up to the
    prompt, the answer has another length, or more was cached than earlier turns can have left.
    """
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
        ttft_s=seconds - decode_s,  # includes waiting for a slot
        decode_ms=1000 * decode_s / max(1, made - 1),
        tokens_read=read,
        tokens_cached=cached,
    )
