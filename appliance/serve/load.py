"""Loads the engine, with a smaller plan where memory runs out and with other kernels where these fail."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict
from functools import partial

from appliance.console.progress import Phase
from appliance.engines.engine import Space
from appliance.errors import FatalError, KernelsError, ModelDoesNotFitError
from appliance.plan import Allocated, Plan, explain_memory
from appliance.profile import best_of
from appliance.serve.kernels import plan_without
from appliance.serve.served_model import ServedModel
from appliance.settings import Settings
from appliance.system.lack import outlast

FALLBACKS_MAX = 3  # to smaller plans, when memory runs out as the engine loads
# Settings that keep a plan from becoming smaller.
SIZED_BY = ("ctx_size", "kv_type", "ubatch", "parallel", "users", "cache_ram_mib", "devices", "gpu_layers", "n_cpu_moe",
            "draft_model")  # fmt: skip


def launch(served: ServedModel, plan: Plan) -> None:
    """Spawns the engine at once; `wait_loaded` waits for it."""
    for choice in plan.choices:
        if choice.is_refusal:
            served.report.warning("not_as_asked", f"{choice.name} is {choice.value}: {choice.reason}")
    served.report.phase(Phase.LOADING, served.inputs.model.title)
    served.report.info("engine_start", f"starting the engine: {explain_memory(plan)}", context=plan.context)
    served.host.launch(plan)


async def wait_loaded(served: ServedModel) -> None:
    """Steps down where memory runs out: it may have been claimed since the probe, or the plan was never measured.
    Raises the error of the last ending."""
    space, steps = served.space_of_profile, 0
    while True:
        supervisor, before = served.host.supervisor, served.host.plan
        crash = await supervisor.wait_ready() if supervisor else None
        if crash is None:
            await outlast(partial(on_ready, served), "looking at the engine")
            return
        error = served.start.engine.as_error(crash)
        await served.memory_watch.on_death(before, error)
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
        await served.host.detach()
        launch(served, plan)


async def on_ready(served: ServedModel) -> None:
    """The engine that serves answers: the first one, one that was restarted, or another that took its place."""
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
        served.memory_watch.begin(plan, supervisor.pid, served.host.socket_path)
    served.report.phase(Phase.READY)
    seconds = (supervisor.ready_seconds if supervisor else None) or 0.0
    words = f"ready: the engine loaded in {seconds:.1f} s and allocated {allocated.total:,.0f} MiB"
    room = _kv_room(served, allocated)
    served.report.info("ready", words + room, seconds=round(seconds, 3), allocated_mib=asdict(allocated))
    if disagreements:
        words = f"the engine's KV cache is not as it should be: {'; '.join(disagreements)}"
        served.report.warning("allocated_otherwise", words)


def _kv_room(served: ServedModel, allocated: Allocated) -> str:
    """In words, with the prediction. Empty for an engine that does not count its KV cache in tokens."""
    plan = served.host.plan
    if plan is None or not allocated.kv_tokens:
        return ""
    predicted = served.space_of_profile.kv_tokens(plan)
    compared = "as predicted" if predicted == allocated.kv_tokens else f"{predicted or 0:,} were predicted"
    return f"; its KV cache has room for {allocated.kv_tokens:,} tokens, {compared}"


def report_variant(served: ServedModel, plan: Plan) -> None:
    words = f"serving with the CPU variant {plan.cpu_variant}"
    served.report.info("cpu_variant", words, variant=plan.cpu_variant)


def after_kills(served: ServedModel, before: Plan, error: FatalError) -> Plan:
    """A plan that holds less of host memory than those that the kernel's memory killer ended, for this load and later
    starts. Raises the error where there is none."""
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
    """What to serve in the memory that there was by the engine's log. Only for the load that comes: what is kept, shown
    or measured later goes by the real machine. `space` is that of the step before. Raises the error where nothing
    smaller may be served."""
    shortage = served.start.engine.shortage(error, lines)
    less = space.after(before, shortage) if shortage else None
    if less is None:
        raise error
    try:
        plan = best_of(served.profile, served.settings.mode, less.space)
    except ModelDoesNotFitError:  # what the engine lacked says more
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
