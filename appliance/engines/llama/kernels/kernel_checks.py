"""Check of all kernels that this machine can run, for one model's types: seconds for CPUs, minutes for GPUs."""

from __future__ import annotations

from collections.abc import Iterator

from appliance.engines.engine import Inputs, Install, KernelResult
from appliance.engines.llama.kernels.kernel_guard import asked_for
from appliance.engines.llama.kernels.kernel_record import Checked, KernelStore
from appliance.engines.llama.kernels.kernels import (
    CPU_PROGRAM,
    GPU_PROGRAM,
    Asked,
    GpuReport,
    KernelReport,
    query_gpu_kernels,
    query_kernels,
)
from appliance.engines.llama.planning.hardware.cpu_variant import runnable_variants
from appliance.engines.llama.process.devices import query_devices
from appliance.errors import CpuUnsupportedError, NoKernelError

TIMEOUT_S = 300.0  # for all variants on a busy machine


def check_kernels(install: Install, inputs: Inputs) -> Iterator[KernelResult]:
    """Yield the result for each CPU variant and GPU. A CPU variant that fails is ruled out here, as at a start."""
    asked = asked_for(inputs)
    yield from _cpu(install, inputs, asked)
    if inputs.image.cuda is not None and inputs.hardware.gpus.gpus and inputs.settings.devices != "none":
        yield from _gpus(install, inputs, asked)


def _cpu(install: Install, inputs: Inputs, asked: Asked) -> Iterator[KernelResult]:
    cpu = inputs.hardware.cpu
    names = [variant.name for variant in runnable_variants(inputs.facts, cpu)]
    if not names:
        words = "this image's engine has no CPU variants to choose from, or none that runs here"
        yield KernelResult(name="kernels", words=words)
        return
    said: list[str] = []
    store = KernelStore(install.cache_dir, inputs.image.build_id, cpu, said.append)
    reports = query_kernels(
        install.engine_dir, names, asked, cache_dir=install.cache_dir, threads=cpu.cores, timeout_s=TIMEOUT_S
    )
    for report in reports:
        if report.why_not:
            store.rule_out(report.variant, report.why_not)
        elif not report.problem:
            store.note(report.variant, Checked(asked=asked))
        yield _of_variant(report, str(store.path))
    if said:
        hint = "the next start repeats the check: see the check of the volume"
        yield KernelResult(name="kernels kept", problem=said[0], hint=hint)


def _of_variant(report: KernelReport, path: str) -> KernelResult:
    name = f"kernels {report.variant}"
    if report.problem:
        hint = f"see the log; if {CPU_PROGRAM} is missing, use a newer image"
        return KernelResult(name=name, problem=f"not checked: {report.problem}", hint=hint)
    if report.why_not:
        hint = f"it is ruled out, and the next variant serves; after a repair remove {path}"
        return KernelResult(name=name, error=CpuUnsupportedError(report.why_not, hint=hint))
    return KernelResult(name=name, words=report.describe())


def _gpus(install: Install, inputs: Inputs, asked: Asked) -> Iterator[KernelResult]:
    if not (install.engine_dir / GPU_PROGRAM).exists():
        problem = f"not checked: {GPU_PROGRAM} is not in this image"
        yield KernelResult(name="kernels GPU", problem=problem, hint="use a newer image")
        return
    for device in query_devices(
        install.engine_dir, install.cache_dir, driver_dir=install.driver_dir, cpu_variant=inputs.kernels.variant
    ).names:
        yield _of_gpu(
            query_gpu_kernels(
                install.engine_dir,
                device,
                asked,
                cache_dir=install.cache_dir,
                driver_dir=install.driver_dir,
                cpu_variant=inputs.kernels.variant,
            )
        )


def _of_gpu(report: GpuReport) -> KernelResult:
    name = f"kernels {report.device}"
    if report.problem:
        hint = "see the engine's own words in `docker logs`"
        return KernelResult(name=name, problem=f"not checked: {report.problem}", hint=hint)
    if report.why_not:
        hint = "use an image with another CUDA release, or a model of another quantization, and report it"
        return KernelResult(name=name, error=NoKernelError(report.why_not, hint=hint))
    return KernelResult(
        name=name, words="as the CPU's" if report.cases is None else f"{report.cases} cases as the CPU's"
    )
