"""The CPU variant of the engine's kernels: checked before its first use, and replaced if it fails."""

from __future__ import annotations

from appliance.console.progress import Phase
from appliance.errors import CpuBackendError, FatalError, KernelsError
from appliance.plan import Plan, RuledOut
from appliance.profile import best_of
from appliance.serve.model.served_model import ServedModel

UNLOADABLE = "its file cannot be loaded: it is missing or damaged"


async def check_kernels(served: ServedModel) -> None:
    """Check the kernels before their first use. A variant that fails is ruled out; raises if none is left."""
    while True:
        served.guard.begin(served.inputs)
        if served.guard.is_checking:
            served.report.phase(Phase.STARTING, f"checking the CPU's kernels: {served.inputs.kernels.variant}")
        failed = await served.guard.finish()
        if failed is None:
            return
        _rule_out(served, *failed)


async def plan_without(served: ServedModel, variant: str | None, error: FatalError) -> Plan:
    """Return the plan for the next CPU variant. Raises `error` unless the kernels caused it."""
    if variant is None or not isinstance(error, KernelsError):
        raise error
    variant = error.variant or variant
    _rule_out(served, variant, UNLOADABLE if isinstance(error, CpuBackendError) else error.message)
    await check_kernels(served)
    return best_of(served.profile, served.settings.mode, served.space_of_profile)


async def check_runner_up(served: ServedModel) -> None:
    """Check the second CPU variant before measuring, which tries only checked kernels. A failing one is ruled out."""
    runner_up = served.inputs.kernels.runner_up
    if runner_up is None:
        return
    served.guard.begin(served.inputs.with_kernels(runner_up))
    failed = await served.guard.finish()
    if failed is not None:
        served.guard.rule_out(*failed)
    _choose_again(served, served.guard.known)


def _rule_out(served: ServedModel, variant: str, seen: str) -> None:
    """Plan with the next variant from here on.

    Raises CpuUnsupportedError (22) if none is left, ConfigError (10) if a setting asks for this one.
    """
    _choose_again(served, served.guard.rule_out(variant, seen))


def _choose_again(served: ServedModel, ruled_out: RuledOut) -> None:
    inputs, engine = served.inputs, served.start.engine
    kernels = engine.choose_kernels(served.settings, inputs.facts, inputs.hardware.cpu, ruled_out)
    if kernels != inputs.kernels:
        served.set_start(served.start.with_kernels(kernels))
