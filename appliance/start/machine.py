"""The machine as this image can use it: hardware, where the engine lies, and its CPU kernels."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from appliance.engines.engine import Install
from appliance.image_facts import EngineFacts, ImageFacts
from appliance.plan import Kernels, RuledOut
from appliance.probe import Cpu, Hardware, count_oom_kills, probe
from appliance.settings import Settings
from appliance.start.checks import check_supported
from appliance.start.image import ImageContents
from appliance.values import dataclass

OPT = Path("/opt")  # an image has its engine in a folder of the engine's name there


@dataclass(frozen=True, kw_only=True)
class UsableMachine:
    """Hardware that this image runs on. `warnings` name what the image leaves unused."""

    hardware: Hardware
    install: Install
    kernels: Kernels
    warnings: tuple[str, ...]


def look_at_machine(contents: ImageContents, environment: Mapping[str, str]) -> UsableMachine:
    """Probe the machine. Raises an error with code 20 to 23 if this image cannot run here.

    Free memory is part of the result, so each load needs a look of its own.
    """
    hardware = probe(contents.settings.data_dir, environment)
    return machine_of(contents, hardware, ruled_out=contents.engine.ruled_out)


def machine_of(
    contents: ImageContents, hardware: Hardware, *, ruled_out: Callable[[Path, ImageFacts, Cpu], RuledOut] | None = None
) -> UsableMachine:
    """Judge hardware that was probed, or described: then no kernels were ruled out. Raises as `look_at_machine`."""
    settings, image = contents.settings, contents.image
    warnings = check_supported(settings, image, hardware)
    install = install_of(settings, image, contents.facts, hardware)
    seen = ruled_out(install.cache_dir, image, hardware.cpu) if ruled_out else None
    kernels = contents.engine.choose_kernels(settings, contents.facts, hardware.cpu, seen)
    return UsableMachine(hardware=hardware, install=install, kernels=kernels, warnings=warnings)


def install_of(settings: Settings, image: ImageFacts, facts: EngineFacts, hardware: Hardware) -> Install:
    """Return where engine, cache and driver lie."""
    return Install(
        engine_dir=settings.engine_dir or OPT / image.engine,
        facts=facts,
        cache_dir=settings.data_dir / "cache" / image.build_id,
        driver_dir=hardware.gpus.driver_folder,
        stall_timeout_s=settings.stall_timeout_s,
        oom_kills=count_oom_kills,
    )
