"""All checks in one pass. None ends it: a machine that is ill in three places is told so at once."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from appliance.boot import load_facts, look_at_draft
from appliance.checks import check_supported
from appliance.doctor.check import Check, failed, judged, passed, warned
from appliance.doctor.gpu import gpu_checks
from appliance.doctor.host import host_checks
from appliance.doctor.kernels import Subject, kernel_checks
from appliance.doctor.parts import engine_check, key_check, model_checks, port_check, volume_check
from appliance.engines.llama.devices import query_devices
from appliance.engines.llama.kernel_record import KernelStore
from appliance.engines.llama.planning.cpu_variant import Kernels, RuledOut, choose_kernels
from appliance.errors import FatalError
from appliance.house import asked_for
from appliance.image_facts import EngineFacts, ImageFacts
from appliance.model import read_model, resolve_model
from appliance.plan import Plan
from appliance.probe import SPEEDS_FOLDER, Hardware, probe
from appliance.probe.smi import cross_check
from appliance.probe.speeds import why_unreadable
from appliance.settings import Settings

_ROOT = Path("/")


@dataclass(frozen=True, kw_only=True)
class Findings:
    """`plan` is what a start would begin with; None without a model, or where nothing fits."""

    checks: tuple[Check, ...]
    hardware: Hardware
    image: ImageFacts | None
    engine: EngineFacts | None
    plan: Plan | None

    @property
    def exit_code(self) -> int:
        """Of the first check that failed; 0 when none did."""
        return next((check.exit_code for check in self.checks if check.status == "fail"), 0)


def examine(settings: Settings, environment: Mapping[str, str], *, with_kernels: bool = False) -> Findings:
    """Raises nothing that a start would end with: it becomes a check. `with_kernels` runs them, which takes time."""
    hardware = probe(settings.data_dir, environment)
    hardware = replace(hardware, gpus=cross_check(hardware.gpus, environment, settings.data_dir))
    facts = _facts(settings)
    image, engine = (None, None) if isinstance(facts, Check) else facts
    kernels, ruled_out = _kernels(settings, image, engine, hardware)
    usable = kernels if isinstance(kernels, Kernels) else None
    checks = [
        volume_check(settings, hardware),
        key_check(settings),
        port_check(settings),
        facts if isinstance(facts, Check) else passed("image", f"{facts[0].cell}, build {facts[0].build_id}"),
        *host_checks(_ROOT, settings, hardware, kernels, ruled_out),
        *_gpu_checks(settings, image, hardware, usable.variant if usable else None),
        _speeds(settings, hardware),
    ]
    best = None
    if image is not None and engine is not None:
        checks.append(engine_check(settings, image, engine, usable.variant if usable else None))
        for check, found in model_checks(settings, image, engine, _as_usable(settings, image, hardware), usable):
            checks.append(check)
            best = found or best
        if with_kernels:
            checks += _kernel_checks(settings, image, engine, hardware, usable.variant if usable else None)
    return Findings(checks=tuple(checks), hardware=hardware, image=image, engine=engine, plan=best)


def _facts(settings: Settings) -> tuple[ImageFacts, EngineFacts] | Check:
    try:
        return load_facts(settings)
    except FatalError as error:
        return failed("image", error)


def _kernels(
    settings: Settings, image: ImageFacts | None, engine: EngineFacts | None, hardware: Hardware
) -> tuple[Kernels | FatalError | None, RuledOut]:
    """As a start chooses them, or what it would end with."""
    if image is None or engine is None:
        return None, RuledOut()
    store = KernelStore(settings.data_dir / "cache" / image.build_id, image.build_id, hardware.cpu)
    ruled_out = store.ruled_out(store.load(may_set_aside=False))
    try:
        return choose_kernels(settings, engine, hardware.cpu, ruled_out), ruled_out
    except FatalError as error:
        return error, ruled_out


def _kernel_checks(
    settings: Settings, image: ImageFacts, engine: EngineFacts, hardware: Hardware, cpu_variant: str | None
) -> Iterator[Check]:
    """For the types of the model that a start would serve."""
    try:
        recipe = image.recipe.file if image.recipe else None
        model = read_model(resolve_model(settings.model, recipe, settings.models_dir))
        draft = look_at_draft(settings, model)
    except FatalError as error:
        yield warned(
            "kernels", f"not checked, since there is no model: {error.message}", "name one with APPLIANCE_MODEL"
        )
        return
    asked = asked_for(settings, engine, model, draft)
    subject = Subject(
        settings=settings, image=image, engine=engine, hardware=hardware, asked=asked, cpu_variant=cpu_variant
    )
    yield from kernel_checks(subject)


def _gpu_checks(
    settings: Settings, image: ImageFacts | None, hardware: Hardware, cpu_variant: str | None
) -> Iterator[Check]:
    cache_dir = settings.data_dir / "cache" / (image.build_id if image else "unknown")
    driver_dir = hardware.gpus.driver_folder
    ask = partial(query_devices, settings.engine_dir, cache_dir, driver_dir=driver_dir, cpu_variant=cpu_variant)
    return gpu_checks(settings, image, hardware, ask)


def _as_usable(settings: Settings, image: ImageFacts, hardware: Hardware) -> Hardware:
    """As a start plans; where it would refuse the machine, that is said already, and the whole of it is planned."""
    try:
        return check_supported(settings, image, hardware)
    except FatalError:
        return hardware


def _speeds(settings: Settings, hardware: Hardware) -> Check:
    if why := why_unreadable(settings.data_dir / SPEEDS_FOLDER, hardware):
        return judged("speeds", f"cannot be read: {why}", "measure them again: appliance probe --measure")
    if hardware.speeds is None:
        return passed("speeds", "not measured; `appliance probe --measure` takes some seconds")
    dram = "unknown" if hardware.speeds.dram_gb_s is None else f"{hardware.speeds.dram_gb_s:,.1f} GB/s"
    return passed("speeds", f"measured: memory {dram}, {len(hardware.speeds.gpus)} GPUs")
