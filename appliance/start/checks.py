"""Check that this image can run on this machine, and refuse in clear words before the engine would fail in its own.

Pure: the devices that the engine lists are passed in.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from appliance.errors import (
    DriverTooOldError,
    FatalError,
    GpuUnusableError,
    NoKernelError,
)
from appliance.image_facts import CUDA_CHIPS, ImageFacts, runs_on
from appliance.probe import Gpu, Hardware
from appliance.settings import Settings


def check_supported(settings: Settings, image: ImageFacts, hardware: Hardware) -> tuple[str, ...]:
    """Return warnings: about GPUs that are left out, and about a CUDA image without a GPU.

    The engine's planner decides whether it serves on the CPU then. With `devices: none` no GPU is looked at.

    Raises NoKernelError (20) if this image has kernels for none of the GPUs, DriverTooOldError (21), and
    GpuUnusableError (23) if a GPU was given and none can be used: the CPU is never used in silence.
    """
    if settings.devices == "none":
        return ()
    if image.cuda is None:
        _refuse_idle_gpu(image, hardware)
        return ()
    if not hardware.gpus.gpus:
        if hardware.gpu_requested:
            raise _unusable(hardware)
        said = f" ({hardware.gpus.problem})" if hardware.gpus.problem else ""
        words = (
            f"no GPU was given to this container, and only the CPU is left{said}: start it with --gpus all to use one"
        )
        return (words,)
    check_driver(image, hardware)
    strangers = _without_kernels(image, hardware)
    return (*strangers, *_in_trouble(image, hardware, strangers))


def usable_gpus(image: ImageFacts, hardware: Hardware) -> tuple[Gpu, ...]:
    """Return the GPUs that the image has kernels for and that plans can use.

    A chip unknown to NVML is among them: the engine may know it.
    """
    return tuple(gpu for gpu in _with_kernels(image, hardware) if not gpu.problem)


def gpu_trouble(gpu: Gpu) -> tuple[str, str] | None:
    """Say why a GPU is left out in any image, and what to do; None for a usable one."""
    if not gpu.problem:
        return None
    index, problem = gpu.index, gpu.problem
    if "(15)" in problem or "(16)" in problem:  # NVML_ERROR_GPU_IS_LOST, NVML_ERROR_RESET_REQUIRED
        hint = (
            f"look for Xid in `dmesg` on the host, then reset the card with `nvidia-smi --gpu-reset -i {index}` or "
            "reboot; if it is lost again: power, cooling, riser"
        )
    elif "(4)" in problem:  # NVML_ERROR_NO_PERMISSION
        hint = "this container may not ask it: compare --gpus and NVIDIA_VISIBLE_DEVICES with the card"
    else:
        hint = (
            f"compare with `nvidia-smi -i {index}` on the host: if that does not tell it either, look for Xid in its "
            "`dmesg`, update the driver or reboot"
        )
    name = f" ({gpu.name})" if gpu.name else ""
    return f"GPU {index}{name} {problem}; it is left out", hint


def check_devices(image: ImageFacts, hardware: Hardware, devices: tuple[str, ...], said: str) -> None:
    """Raise GpuUnusableError (23) if the engine lists no GPU although NVML does; `said` is its last line."""
    if image.cuda is None or not hardware.gpus.gpus or devices:
        return
    seen = _names(usable_gpus(image, hardware))
    message = f"the engine sees no GPU, and NVML sees {seen}: {said or 'it does not say why'}"
    raise GpuUnusableError(message, hint=_cuda_remedy(said, hardware))


def why_fewer(image: ImageFacts, hardware: Hardware, devices: tuple[str, ...]) -> str | None:
    """Warn of an engine that sees only some of its GPUs; None if it sees all of them."""
    usable = usable_gpus(image, hardware)
    whole = [gpu for gpu in usable if gpu.mig_profile is None]
    # CUDA shows a process only one MIG slice unless one is named, so with slices a count means nothing.
    if len(whole) < len(usable) or len(devices) >= len(whole):
        return None
    return f"the engine sees {len(devices)} of {len(whole)} GPUs: {', '.join(devices)} of {_names(tuple(whole))}"


def tags_for(image: ImageFacts, sm: str) -> tuple[str, ...]:
    """Return the tags of images for one chip: of this CUDA release, else of all others, the newest first."""
    releases = [release for release, chips in CUDA_CHIPS.items() if sm in chips.split()]
    own = [release for release in releases if release == image.cuda]
    return tuple(f"{image.engine}-cu{release.replace('.', '')}-sm{sm}" for release in own or releases)


def select_command(hardware: Hardware, gpus: Sequence[Gpu]) -> str:
    """Return the command that names the image for these GPUs, or says why none exists."""
    chips = "".join(f" --sm {sm}" for sm in sorted({gpu.sm for gpu in gpus if gpu.sm}))
    driver = f" --driver {hardware.gpus.driver}" if hardware.gpus.driver else ""
    return f"`python -m images select{driver}{chips}`"


def _other_image(image: ImageFacts, hardware: Hardware, gpus: Sequence[Gpu]) -> str:
    """Name other images, only tags that can be built. A cell without a chip in its name has all chips."""
    sms = dict.fromkeys(gpu.sm for gpu in gpus if gpu.sm)
    tags = [tag for sm in sms for tag in tags_for(image, sm)[:1]] if image.cuda is None or "-sm" in image.cell else []
    use = f"use the image {' or '.join(tags)}; " if tags else "" if image.cuda else "use an image for this GPU; "
    return f"{use}{select_command(hardware, gpus)} says which there is, or why there is none"


def _refuse_idle_gpu(image: ImageFacts, hardware: Hardware) -> None:
    if not hardware.gpu_requested:
        return
    seen = _names(hardware.gpus.gpus) or hardware.gpus.problem or "a GPU"
    message = f"a GPU was asked for and this image has no GPU kernels: {image.cell}, given {seen}"
    hint = f"{_other_image(image, hardware, hardware.gpus.gpus)}, or start without --gpus to use the CPU"
    raise GpuUnusableError(message, hint=hint)


def _unusable(hardware: Hardware) -> FatalError:
    gpus = hardware.gpus
    if gpus.problem:
        cause, hint = gpus.problem, _driver_remedy(gpus.problem)
    elif gpus.driver is None:
        cause = "the driver's library libnvidia-ml.so.1 is not in this container"
        hint = "start it with --gpus all; without the NVIDIA Container Toolkit on the host only device files get in"
    else:
        cause = "; ".join((f"driver {gpus.driver} lists no device", *gpus.warnings))
        hint = "compare --gpus, NVIDIA_VISIBLE_DEVICES and CUDA_VISIBLE_DEVICES with `nvidia-smi -L` on the host"
    return GpuUnusableError(f"a GPU was asked for and cannot be used: {cause}", hint=hint)


def _driver_remedy(problem: str) -> str:
    if "(999)" in problem:  # NVML_ERROR_UNKNOWN
        return (
            "run `nvidia-smi` on the host. If it works there, this container has lost its devices, as after `systemctl "
            "daemon-reload`: create it anew (`docker restart` may do). To keep them name the device nodes (--device "
            "/dev/nvidia0 --device /dev/nvidiactl --device /dev/nvidia-uvm) or give the GPU by CDI (--device "
            "nvidia.com/gpu=all). If it fails there as well, repair the driver"
        )
    if "mismatch" in problem:
        return "kernel module and library of the driver differ, as after an update: reboot the host"
    if "hangs" in problem or "did not answer" in problem:
        return "`nvidia-smi` on the host hangs as well: look for Xid in its `dmesg`, and reboot it"
    if "--gpus" in problem:
        return "start it with --gpus all; the host needs the NVIDIA Container Toolkit"
    return "run `nvidia-smi` on the host: when it fails as well, repair the driver there"


def _cuda_remedy(said: str, hardware: Hardware) -> str:
    if "insufficient" in said:
        return f"the driver is too old for this CUDA: {hardware.gpus.driver or 'unknown'}; update it on the host"
    if "cannot open shared object" in said:
        return (
            "start it with --gpus all; if NVIDIA_DRIVER_CAPABILITIES is set, it must hold compute,utility; if "
            "the host mounts the driver elsewhere, LD_LIBRARY_PATH has to name its folder"
        )
    return "CUDA_VISIBLE_DEVICES may hide it; else run `nvidia-smi` on the host and look for Xid in its `dmesg`"


def check_driver(image: ImageFacts, hardware: Hardware) -> None:
    """Raise DriverTooOldError (21) for an old driver; one with an unknown version is not judged."""
    driver, floor = hardware.gpus.driver, image.driver_floor_sass
    if driver is None or floor is None or version_numbers(driver) >= version_numbers(floor):
        return
    message = f"the NVIDIA driver is too old for this image: {driver}, {image.cell} needs {floor} or newer"
    runs = f"This driver runs CUDA {hardware.gpus.cuda_driver}: " if hardware.gpus.cuda_driver else ""
    hint = (
        f"update the driver on the host, or take an image for an older CUDA. {runs}"
        f"{select_command(hardware, hardware.gpus.gpus)} names its tag"
    )
    raise DriverTooOldError(message, hint=hint)


def _in_trouble(image: ImageFacts, hardware: Hardware, strangers: tuple[str, ...]) -> tuple[str, ...]:
    """Return warnings about broken GPUs. Raises GpuUnusableError (23) if no other is left."""
    troubles = [trouble for gpu in hardware.gpus.gpus if (trouble := gpu_trouble(gpu))]
    if troubles and not usable_gpus(image, hardware):
        found = "; ".join((*(words for words, _ in troubles), *strangers))
        hint = f"{troubles[0][1]}; --devices none serves on the CPU, where the engine can"
        message = f"a GPU was given and none can be used: {found}"
        raise GpuUnusableError(message, hint=hint)
    return tuple(f"{words}; {hint}" for words, hint in troubles)


def _with_kernels(image: ImageFacts, hardware: Hardware) -> tuple[Gpu, ...]:
    gpus = hardware.gpus.gpus
    return tuple(gpu for gpu in gpus if gpu.sm is None or any(runs_on(form, gpu.sm) for form in image.sm))


def _without_kernels(image: ImageFacts, hardware: Hardware) -> tuple[str, ...]:
    usable = _with_kernels(image, hardware)
    strangers = [gpu for gpu in hardware.gpus.gpus if gpu not in usable]
    has = f"{image.cell} has kernels for SM {', '.join(image.sm) or 'none'}"
    if not usable:
        message = f"this image has no kernels for {_names(tuple(strangers))}: {has}"
        raise NoKernelError(message, hint=_other_image(image, hardware, strangers))
    return tuple(f"{_names((gpu,))} is left out: {has}" for gpu in strangers)


def _names(gpus: tuple[Gpu, ...]) -> str:
    return ", ".join((gpu.name or "unnamed GPU") + (f" (SM {gpu.sm})" if gpu.sm else "") for gpu in gpus)


def version_numbers(version: str) -> tuple[int, ...]:
    """Return a version as numbers, to compare: (580, 65, 6) for 580.65.06."""
    return tuple(int(number) for number in re.findall(r"\d+", version))
