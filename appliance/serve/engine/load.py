"""Load the engine; with a smaller plan if memory runs out, with other kernels if these fail."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict
from functools import partial

from appliance.console.progress import Phase
from appliance.engines.engine import Space
from appliance.errors import EngineError, FatalError, KernelsError, ModelDoesNotFitError, VolumeError
from appliance.plan import Allocated, Plan, explain_memory
from appliance.profile import best_of
from appliance.serve.engine.kernels import plan_without
from appliance.serve.model.served_model import ReadyEngine, ServedModel
from appliance.settings import Settings
from appliance.system.detached import detached
from appliance.system.lack import outlast

FALLBACKS_MAX = 3  # to smaller plans, when memory runs out as the engine loads
# Settings that keep a plan from becoming smaller.
SIZED_BY = ("ctx_size", "kv_type", "ubatch", "parallel", "users", "cache_ram_mib", "devices", "gpu_layers", "n_cpu_moe",
            "draft_model")  # fmt: skip


def launch(served: ServedModel, plan: Plan) -> None:
    """Spawn the engine at once; `wait_loaded` waits for it."""
    for choice in plan.choices:
        if choice.is_refusal:
            served.report.warning("not_as_asked", f"{choice.name} is {choice.value}: {choice.reason}")
    served.report.phase(Phase.LOADING, served.inputs.model.title)
    served.report.info("engine_start", f"starting the engine: {explain_memory(plan)}", context=plan.context)
    served.host.launch(plan)


async def wait_loaded(served: ServedModel) -> None:
    """Wait until the engine is ready. Steps down to smaller plans if memory runs out.

    Memory may have been taken since the probe, or the plan was never measured. Raises the error of the last ending.
    """
    space, steps = served.space_of_profile, 0
    while True:
        supervisor, before = served.host.supervisor, served.host.plan
        crash = await supervisor.wait_ready() if supervisor else None
        if crash is None:
            await outlast(partial(on_ready, served), "looking at the engine")
            return
        error = served.start.engine.as_error(crash)
        await doubt_peak(served, before, error)
        was_killed = await served.memory_kills.note(served.start, before, crash)
        lines = served.logs.take(supervisor) if supervisor else ()
        if isinstance(error, KernelsError):
            plan = await plan_without(served, before.cpu_variant if before else None, error)
            space = served.space_of_profile
            report_variant(served, plan)
        elif before is None or steps == FALLBACKS_MAX:
            raise error
        elif was_killed:
            steps += 1
            plan = after_kills(served, before, error)
            space = served.space_of_profile
        else:
            steps += 1
            space, plan = fallback(served, space, before, error, lines)
        await served.host.stop_current()
        launch(served, plan)


async def on_ready(served: ServedModel) -> None:
    """Note that the engine answers: the first one, a restarted one, or another that took its place."""
    supervisor = served.host.supervisor
    lines = served.logs.take(supervisor) if supervisor else ()
    engine, plan = served.start.engine, served.host.plan
    allocated = engine.allocated(lines)
    disagreements: tuple[str, ...] = ()
    if plan and served.host.socket_path:
        engine.loaded(plan, lines, served.start.install)
        allocated, disagreements = await engine.confirm_allocated(plan, allocated, served.host.socket_path)
    served.allocated = allocated
    if plan and supervisor and served.host.socket_path:
        served.set_ready(ReadyEngine(plan=plan, pid=supervisor.pid, socket_path=served.host.socket_path))
    served.report.phase(Phase.READY)
    seconds = (supervisor.ready_seconds if supervisor else None) or 0.0
    words = f"ready: the engine loaded in {seconds:.1f} s and allocated {allocated.total:,.0f} MiB"
    room = _kv_room(served, allocated)
    served.report.info("ready", words + room, seconds=round(seconds, 3), allocated_mib=asdict(allocated))
    if disagreements:
        words = f"the engine's KV cache is not as it should be: {'; '.join(disagreements)}"
        served.report.warning("allocated_otherwise", words)


async def doubt_peak(served: ServedModel, plan: Plan | None, error: FatalError) -> None:
    """Mark the peak of a plan that ran out of memory as not whole: more would have been needed."""
    if plan is None or not plan.placement.shares or not (isinstance(error, EngineError) and error.was_memory):
        return
    try:
        await detached(served.store.doubt_peak, served.key, plan)
    except (VolumeError, RuntimeError) as failure:  # RuntimeError: no thread is left. Loading goes on
        served.report.warning("memory_not_kept", str(failure))


def _kv_room(served: ServedModel, allocated: Allocated) -> str:
    """Describe the KV cache with its prediction; empty for an engine that does not count it in tokens."""
    plan = served.host.plan
    if plan is None or not allocated.kv_tokens:
        return ""
    predicted = served.space_of_profile.kv_tokens(plan)
    compared = "as predicted" if predicted == allocated.kv_tokens else f"{predicted or 0:,} were predicted"
    return f"; its KV cache has room for {allocated.kv_tokens:,} tokens, {compared}"


def report_variant(served: ServedModel, plan: Plan) -> None:
    """Log which CPU variant serves instead."""
    words = f"serving with the CPU variant {plan.cpu_variant}"
    served.report.info("cpu_variant", words, variant=plan.cpu_variant)


def after_kills(served: ServedModel, before: Plan, error: FatalError) -> Plan:
    """Return a plan with less host memory than those that the kernel's memory killer ended.

    Later starts keep to it. Raises `error` if no such plan fits.
    """
    start = served.start.after_memory_kills(served.memory_kills.seen)
    most_mib = start.inputs.host_mib_max
    if most_mib >= served.start.inputs.host_mib_max:
        error.hint = f"{error.hint}; {_why_not_smaller(served.settings)}"
        raise error
    served.set_start(start)
    plan = best_of(served.profile, served.settings.mode, served.space_of_profile)
    words = f"{served.memory_kills.words(most_mib)}; serving {plan.key} instead of {before.key}"
    contexts = {"context_before": before.context, "context": plan.context}
    served.report.warning("stepped_down", words, where="the host", most_mib=round(most_mib), **contexts)
    return plan


def fallback(
    served: ServedModel, space: Space, before: Plan, error: FatalError, lines: Iterable[str]
) -> tuple[Space, Plan]:
    """Return the next smaller plan, sized by the memory that the engine's log reported, and its space.

    Only the next load uses it: what is kept, shown or measured later goes by the real machine. `space` is that of the
    step before. Raises `error` if nothing smaller may be served.
    """
    shortage = served.start.engine.shortage(error, lines)
    less = space.after(before, shortage) if shortage else None
    if less is None:
        raise error
    try:
        plan = best_of(served.profile, served.settings.mode, less.space)
    except ModelDoesNotFitError:  # the engine's own error says more
        plan = before
    if not less.is_smaller(plan, before):
        error.hint = f"{error.hint}; {_why_not_smaller(served.settings)}"
        raise error
    words = (
        f"the engine ran out of memory as it loaded: {less.missing_mib:,.0f} MiB too few on {less.where}; "
        f"serving {plan.key} instead of {before.key}"
    )
    contexts = {"context_before": before.context, "context": plan.context}
    served.report.warning("stepped_down", words, where=less.where, missing_mib=round(less.missing_mib), **contexts)
    return less.space, plan


def _why_not_smaller(settings: Settings) -> str:
    sources = settings.sources
    requested = [name for name in SIZED_BY if sources.get(name, "default") != "default"]
    if not requested:
        return "no smaller plan fits either"
    words = ", ".join(f"{name} '{getattr(settings, name)}' ({sources[name]})" for name in requested)
    return f"no smaller plan keeps what was asked for: {words}"
