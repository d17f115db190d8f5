"""Choice of the engine's CPU variant: the fastest that this CPU can run and that is not ruled out. Pure.

The CPU's flags come from the kernel, which leaves out instructions that the operating system does not support. The
engine's own loader goes by cpuid alone, and does not remember which variants failed.
"""

from __future__ import annotations

from dataclasses import replace

from appliance.errors import ConfigError, CpuUnsupportedError
from appliance.image_facts import CpuVariant, EngineFacts
from appliance.plan import Kernels, RuledOut
from appliance.plan.parts.choice import Choice
from appliance.probe import Cpu
from appliance.settings import Settings


def choose_kernels(settings: Settings, engine: EngineFacts, cpu: Cpu, ruled_out: RuledOut | None = None) -> Kernels:
    """Return the CPU variant that serves, with the next fastest as `runner_up` if nobody asked for a variant.

    Raises ConfigError (10) if the variant that was asked for cannot be used, CpuUnsupportedError (22) if none is left.
    """
    out = ruled_out or RuledOut()
    if not engine.cpu_variants:
        if settings.cpu_variant != "auto":
            raise _not_offered(settings, "this image's engine has no CPU variants to choose from", ())
        return Kernels(variant=None, isa=cpu.isa)
    runnable = runnable_variants(engine, cpu)
    left = [variant for variant in runnable if variant.name not in out.seen]
    if settings.cpu_variant != "auto":
        asked = _asked(settings, engine, cpu, runnable, out)
        source = settings.sources["cpu_variant"]
        return _kernels(asked, Choice(name="cpu_variant", value=asked.name, reason="asked for", source=source))
    if not runnable:
        raise _below_all(engine, cpu)
    if not left:
        raise _all_ruled_out(runnable, cpu, out)
    best = left[-1]
    why = _why(engine, cpu, best, out)
    found = _kernels(best, Choice(name="cpu_variant", value=best.name, reason=why, source="probe"))
    return replace(found, runner_up=_runner_up(left[-2], best, out)) if len(left) > 1 else found


def _runner_up(variant: CpuVariant, best: CpuVariant, out: RuledOut) -> Kernels:
    why = f"the fastest of this image that runs here but for {best.name}"
    kernels = _kernels(variant, Choice(name="cpu_variant", value=variant.name, reason=why, source="probe"))
    return replace(kernels, is_checked=variant.name in out.checked)


def runnable_variants(engine: EngineFacts, cpu: Cpu) -> tuple[CpuVariant, ...]:
    """Return the variants whose instructions this CPU has, also those that are ruled out, the fastest last."""
    return tuple(variant for variant in engine.cpu_variants if not _lacking(variant, cpu))


def _kernels(variant: CpuVariant, choice: Choice) -> Kernels:
    return Kernels(variant=variant.name, isa=variant.isa, choice=choice)


def _lacking(variant: CpuVariant, cpu: Cpu) -> list[str]:
    return [flag for flag in variant.isa if flag not in cpu.isa]


def _why(engine: EngineFacts, cpu: Cpu, best: CpuVariant, out: RuledOut) -> str:
    """Return the reason for `best`: it also says why each faster variant is ruled out or cannot run here."""
    faster = engine.cpu_variants[engine.cpu_variants.index(best) + 1 :]
    words = ["the fastest CPU variant of this image that runs here"]
    words += [f"{each.name} is ruled out: {out.seen[each.name]}" for each in faster if each.name in out.seen]
    lacking = next(((each.name, flags) for each in faster if (flags := _lacking(each, cpu))), None)
    words += [f"{lacking[0]} needs {', '.join(lacking[1])}"] if lacking else []
    return "; ".join(words)


def _asked(
    settings: Settings, engine: EngineFacts, cpu: Cpu, runnable: tuple[CpuVariant, ...], out: RuledOut
) -> CpuVariant:
    asked = settings.cpu_variant
    variant = next((each for each in engine.cpu_variants if each.name == asked), None)
    names = tuple(each.name for each in runnable if each.name not in out.seen)
    if variant is None:
        raise _not_offered(settings, "this image has no such variant", names)
    if lacking := _lacking(variant, cpu):
        raise _not_offered(settings, f"this CPU lacks {', '.join(lacking)}", names)
    if asked in out.seen:
        error = _not_offered(settings, f"it was ruled out on this CPU: {out.seen[asked]}", names)
        error.hint = f"{error.hint}; remove {out.where} to try it again"
        raise error
    return variant


def _not_offered(settings: Settings, why: str, names: tuple[str, ...]) -> ConfigError:
    message = f"setting cpu_variant cannot be used: '{settings.cpu_variant}' ({settings.sources['cpu_variant']}): {why}"
    there = f"this CPU runs {', '.join(names)}" if names else "leave it out"
    return ConfigError(message, hint=f"{there}; auto takes the fastest" if names else there)


def _below_all(engine: EngineFacts, cpu: Cpu) -> CpuUnsupportedError:
    lowest: list[str] = min((_lacking(variant, cpu) for variant in engine.cpu_variants), key=lambda flags: len(flags))
    lacking = ", ".join(sorted(lowest))
    message = f"this CPU lacks what the engine's kernels need: {lacking} ({cpu.model_name or 'unnamed CPU'})"
    hint = "a virtual machine may hide it: give it the host's CPU model; else take an image with the variant x64"
    return CpuUnsupportedError(message, hint=hint)


def _all_ruled_out(runnable: tuple[CpuVariant, ...], cpu: Cpu, out: RuledOut) -> CpuUnsupportedError:
    seen = "; ".join(f"{variant.name}: {out.seen[variant.name]}" for variant in reversed(runnable))
    message = f"none of the engine's CPU variants works on this CPU ({cpu.model_name or 'unnamed CPU'}): {seen}"
    hint = f"use another image or machine; remove {out.where} to try them again, for example after an update"
    return CpuUnsupportedError(message, hint=hint)
