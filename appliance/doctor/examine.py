"""Runs all checks in one pass. No failed check ends the pass, so that several faults are reported at once."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from concurrent.futures import wait
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from appliance.doctor.check import Check, failed, judged, passed, warned
from appliance.doctor.gpu import gpu_checks
from appliance.doctor.host import host_checks
from appliance.doctor.keys import key_check, named_keys_check
from appliance.doctor.losses import energy_check, running_checks, speed_checks
from appliance.doctor.other_work import other_work_check, query_work
from appliance.doctor.parts import engine_check, model_checks, port_check, settings_checks, volume_check
from appliance.engines.engine import Devices, Engine, Inputs, Install, KernelResult
from appliance.errors import FatalError, VolumeError
from appliance.image_facts import EngineFacts, ImageFacts
from appliance.model import Model
from appliance.plan import Kernels, Plan, RuledOut
from appliance.preview.preview import Preview, preview_of
from appliance.probe import SPEEDS_FOLDER, Hardware, probe
from appliance.probe.bandwidth.speeds import why_unreadable
from appliance.probe.gpu.smi import cross_check
from appliance.selection.select import load_model
from appliance.settings import Settings
from appliance.start.checks import usable_gpus
from appliance.start.image import ImageContents, load_engine, load_facts, load_recipe
from appliance.start.inputs import StartInputs, inputs_of, key_of
from appliance.start.machine import UsableMachine, install_of
from appliance.system.detached import HANGS_S, begin, no_answer
from appliance.volume import open_volume

_ROOT = Path("/")


@dataclass(frozen=True, kw_only=True)
class Findings:
    """Results of all checks. `plan` is the plan that a start would begin with; None without a model, or if nothing
    fits."""

    checks: tuple[Check, ...]
    hardware: Hardware
    image: ImageFacts | None
    engine: EngineFacts | None
    plan: Plan | None

    @property
    def will_start(self) -> bool | None:
        """True if a start would succeed, False if a check failed, None if there is no model to tell."""
        return False if self.exit_code else True if self.plan else None

    @property
    def exit_code(self) -> int:
        """Exit code of the first check that failed; 0 if none did."""
        return next((check.exit_code for check in self.checks if check.status == "fail"), 0)


@dataclass(frozen=True, kw_only=True)
class Subject:
    """The image on this machine. `kernels` are those that a start would use, or the error that it would end with."""

    settings: Settings
    environment: Mapping[str, str]
    hardware: Hardware
    image: ImageFacts
    facts: EngineFacts
    engine: Engine
    install: Install
    kernels: Kernels | FatalError
    ruled_out: RuledOut

    @property
    def variant(self) -> str | None:
        return self.kernels.variant if isinstance(self.kernels, Kernels) else None

    def load_model(self) -> Model:
        """Return the model that a start would serve. Raises ModelAwayError if a start would download it first."""
        contents = replace(self._contents, recipe=load_recipe(self.settings, self.image))
        return load_model(contents, self.environment)

    @property
    def _contents(self) -> ImageContents:
        return ImageContents(settings=self.settings, image=self.image, facts=self.facts, engine=self.engine)

    def inputs(self, model: Model) -> Inputs:
        """Return a start's inputs for `model`. If no kernels are usable, take those that the engine would choose
        itself, so that other faults are found too. Raises ConfigError (10) or ModelUnreadableError (30) for a draft
        model."""
        usable = self.kernels if isinstance(self.kernels, Kernels) else None
        kernels = usable or Kernels(variant=None, isa=self.hardware.cpu.isa)
        machine = UsableMachine(hardware=self.hardware, install=self.install, kernels=kernels, warnings=())
        return inputs_of(self._contents, machine, model)

    def preview(self, model: Model) -> Preview:
        """Return the plan that a start would serve, from a profile or predicted."""
        inputs = self.inputs(model)
        return preview_of(StartInputs(engine=self.engine, install=self.install, inputs=inputs, key=key_of(inputs)))


def examine(settings: Settings, environment: Mapping[str, str], *, with_kernels: bool = False) -> Findings:
    """Run all checks. An error that a start would end with becomes a check instead of being raised. `with_kernels` also
    runs the engine's kernels, which takes time. Raises VolumeError if the volume does not answer: all would hang."""
    _ask_volume(settings.data_dir)
    before = query_work()
    found = _examine(settings, environment, with_kernels=with_kernels)
    return replace(found, checks=(*found.checks, other_work_check(before, query_work())))


def _ask_volume(folder: Path) -> None:
    asking = begin(partial(open_volume, folder))  # as `volume_check`, which tells what is wrong with one that answers
    wait((asking,), HANGS_S)
    if not asking.done():
        raise no_answer(folder, HANGS_S)


def _examine(settings: Settings, environment: Mapping[str, str], *, with_kernels: bool) -> Findings:
    hardware = probe(settings.data_dir, environment)
    hardware = replace(hardware, gpus=cross_check(hardware.gpus, environment, settings.data_dir))
    checks = [volume_check(settings, hardware), key_check(settings), named_keys_check(settings)]
    port = port_check(settings)  # same order as a start: it listens after it has read its model and before it plans
    try:
        image, facts = load_facts(settings)
    except FatalError as error:
        checks += [failed("image", error), *_machine_checks(settings, hardware, None, None), port]
        return Findings(checks=tuple(checks), hardware=hardware, image=None, engine=None, plan=None)
    checks.append(passed("image", f"{image.cell}, build {image.build_id}"))
    best: Preview | None = None
    try:
        subject = _subject(settings, environment, image, facts, load_engine(image), hardware)
    except FatalError as error:
        checks += [*_machine_checks(settings, hardware, image, None), failed("engine", error), port]
    else:
        checks += _machine_checks(settings, hardware, image, subject)
        checks += settings_checks(settings, subject.engine)
        checks.append(engine_check(subject.engine, subject.install, image, hardware.gpus, subject.variant))
        for check, found in model_checks(settings, image, subject.engine, subject.load_model, subject.preview):
            checks += [check, port] if check.name == "model" else [check]
            best = found or best
        checks += _engine_notes(subject, best.plan if best else None)
        checks += speed_checks(settings, best)
        checks.append(energy_check(hardware, environment, usable_gpus(image, hardware)))
        checks += running_checks(settings)
        if with_kernels:
            checks += _kernel_checks(subject)
    return Findings(
        checks=tuple(checks), hardware=hardware, image=image, engine=facts, plan=best.plan if best else None
    )


def _subject(
    settings: Settings,
    environment: Mapping[str, str],
    image: ImageFacts,
    facts: EngineFacts,
    engine: Engine,
    hardware: Hardware,
) -> Subject:
    install = install_of(settings, image, facts, hardware)
    ruled_out = engine.ruled_out(install.cache_dir, image, hardware.cpu)
    kernels: Kernels | FatalError
    try:
        kernels = engine.choose_kernels(settings, facts, hardware.cpu, ruled_out)
    except FatalError as error:
        kernels = error
    return Subject(
        settings=settings,
        environment=environment,
        hardware=hardware,
        image=image,
        facts=facts,
        engine=engine,
        install=install,
        kernels=kernels,
        ruled_out=ruled_out,
    )


def _machine_checks(
    settings: Settings, hardware: Hardware, image: ImageFacts | None, subject: Subject | None
) -> Iterator[Check]:
    """Yield the checks of host and GPUs. `subject` None: there is no engine to ask."""
    kernels, ruled_out = (subject.kernels, subject.ruled_out) if subject else (None, None)
    yield from host_checks(_ROOT, settings, hardware, kernels, ruled_out)
    yield from gpu_checks(settings, image, hardware, partial(_devices, subject) if subject else None)
    yield _speeds(settings, hardware)


def _devices(subject: Subject) -> Devices:
    return subject.engine.query_devices(subject.install, subject.hardware, cpu_variant=subject.variant)


def _engine_notes(subject: Subject, plan: Plan | None) -> Iterator[Check]:
    """Yield the engine's own notes on the plan that a start would serve."""
    for result in subject.engine.examine(subject.install, plan) if plan else ():
        yield _as_check(result)


def _as_check(result: KernelResult) -> Check:
    if result.error is not None:
        return failed(result.name, result.error)
    return warned(result.name, result.problem, result.hint) if result.problem else passed(result.name, result.words)


def _kernel_checks(subject: Subject) -> Iterator[Check]:
    """Check the kernels for the data types of the model that a start would serve."""
    settings, image = subject.settings, subject.image
    try:
        inputs = subject.inputs(subject.load_model())
    except FatalError as error:
        yield warned(
            "kernels", f"not checked, since there is no model: {error.message}", "name one with APPLIANCE_MODEL"
        )
        return
    with suppress(VolumeError):  # the volume has a check of its own; here the results are just not kept
        open_volume(settings.data_dir, image.build_id)
    yield from map(_as_check, subject.engine.check_kernels(subject.install, inputs))


def _speeds(settings: Settings, hardware: Hardware) -> Check:
    if why := why_unreadable(settings.data_dir / SPEEDS_FOLDER, hardware):
        return judged("speeds", f"cannot be read: {why}", "measure them again: appliance probe --measure")
    if hardware.speeds is None:
        return passed("speeds", "not measured; `appliance probe --measure` takes some seconds")
    dram = "unknown" if hardware.speeds.dram_gb_s is None else f"{hardware.speeds.dram_gb_s:,.1f} GB/s"
    return passed("speeds", f"measured: memory {dram}, {len(hardware.speeds.gpus)} GPUs")
