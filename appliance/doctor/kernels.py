"""Do the kernels compute what they should here? Run when asked for: seconds for the CPU, minutes for GPUs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from appliance.doctor.check import Check, failed, passed, warned
from appliance.engines.llama.devices import query_devices
from appliance.engines.llama.kernel_record import Checked, KernelStore
from appliance.engines.llama.kernels import (
    CPU_PROGRAM,
    GPU_PROGRAM,
    Asked,
    GpuReport,
    KernelReport,
    query_gpu_kernels,
    query_kernels,
)
from appliance.engines.llama.planning.cpu_variant import runnable_variants
from appliance.errors import CpuUnsupportedError, NoKernelError, VolumeError
from appliance.image_facts import EngineFacts, ImageFacts
from appliance.probe import Hardware
from appliance.settings import Settings
from appliance.volume import open_volume

TIMEOUT_S = 300.0  # all variants on a machine that is at work


@dataclass(frozen=True, kw_only=True)
class Subject:
    settings: Settings
    image: ImageFacts
    engine: EngineFacts
    hardware: Hardware
    asked: Asked
    cpu_variant: str | None  # that a start would serve with

    @property
    def cache_dir(self) -> Path:
        return self.settings.data_dir / "cache" / self.image.build_id


def kernel_checks(subject: Subject) -> Iterator[Check]:
    """What is found is kept as a start keeps it: a variant that fails is ruled out on this CPU."""
    yield from _cpu(subject)
    if subject.image.cuda is not None and subject.hardware.gpus.gpus and subject.settings.devices != "none":
        yield from _gpus(subject)


def _cpu(subject: Subject) -> Iterator[Check]:
    names = [variant.name for variant in runnable_variants(subject.engine, subject.hardware.cpu)]
    if not names:
        yield passed("kernels", "this image's engine has no CPU variants to choose from, or none that runs here")
        return
    said: list[str] = []
    store = KernelStore(subject.cache_dir, subject.image.build_id, subject.hardware.cpu, said.append)
    with suppress(VolumeError):  # which is a check of its own; here it is said that nothing is kept
        open_volume(subject.settings.data_dir, subject.image.build_id)
    reports = query_kernels(
        subject.settings.engine_dir,
        names,
        subject.asked,
        cache_dir=subject.cache_dir,
        threads=subject.hardware.cpu.cores,
        timeout_s=TIMEOUT_S,
    )
    for report in reports:
        if report.why_not:
            store.rule_out(report.variant, report.why_not)
        elif not report.problem:
            store.note(report.variant, Checked(asked=subject.asked))
        yield _of_variant(report, str(store.path))
    if said:
        yield warned("kernels kept", said[0], "the next start finds out again: see the check of the volume")


def _of_variant(report: KernelReport, path: str) -> Check:
    name = f"kernels {report.variant}"
    if report.problem:
        return warned(name, f"not checked: {report.problem}", f"an image of today carries {CPU_PROGRAM}; see its log")
    if report.why_not:
        hint = f"it is ruled out, and the next variant serves; after a repair remove {path}"
        return failed(name, CpuUnsupportedError(report.why_not, hint=hint))
    return passed(name, report.in_words())


def _gpus(subject: Subject) -> Iterator[Check]:
    if not (subject.settings.engine_dir / GPU_PROGRAM).exists():
        yield warned("kernels GPU", f"not checked: {GPU_PROGRAM} is not in this image", "use an image of today")
        return
    driver_dir, variant = subject.hardware.gpus.driver_folder, subject.cpu_variant
    engine_dir, cache_dir = subject.settings.engine_dir, subject.cache_dir
    for device in query_devices(engine_dir, cache_dir, driver_dir=driver_dir, cpu_variant=variant).names:
        yield _of_gpu(
            query_gpu_kernels(
                engine_dir, device, subject.asked, cache_dir=cache_dir, driver_dir=driver_dir, cpu_variant=variant
            )
        )


def _of_gpu(report: GpuReport) -> Check:
    name = f"kernels {report.device}"
    if report.problem:
        return warned(name, f"not checked: {report.problem}", "see the engine's own words in `docker logs`")
    if report.why_not:
        hint = "use an image with another CUDA release, or a model of another quantization, and report it"
        return failed(name, NoKernelError(report.why_not, hint=hint))
    return passed(name, "as the CPU's" if report.cases is None else f"{report.cases} cases as the CPU's")
