"""Checks of the GPUs: can this image use them, and what makes them slower than they could be."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from appliance.doctor.check import Check, failed, judged, passed, warned
from appliance.engines.engine import Devices
from appliance.errors import FatalError
from appliance.image_facts import ImageFacts
from appliance.probe import Gpu, Hardware
from appliance.probe.gpu.driver import CUDA, PLACES
from appliance.settings import Settings
from appliance.start.checks import check_devices, check_driver, check_supported, gpu_trouble, why_fewer

_HINT = "if it is mounted elsewhere, LD_LIBRARY_PATH must name its folder, which must not be on the volume"


def gpu_checks(
    settings: Settings, image: ImageFacts | None, hardware: Hardware, ask_engine: Callable[[], Devices] | None
) -> Iterator[Check]:
    """Yield the checks of all GPUs. `ask_engine` is called only if this image can use a GPU at all; None: the engine
    cannot be asked."""
    gpus = hardware.gpus
    if gpus.driver:
        yield _driver(image, hardware)
        if image is None or image.cuda is not None:
            yield _library(hardware)
    yield from _usable(settings, image, hardware, ask_engine)
    for warning in gpus.warnings:
        yield warned("gpu readings", warning, "trust the driver's own nvidia-smi on the host")
    for gpu in gpus.gpus:
        yield from _one(gpu)


def _driver(image: ImageFacts | None, hardware: Hardware) -> Check:
    try:
        if image is not None:
            check_driver(image, hardware)
    except FatalError as error:
        return failed("driver", error)
    newest = f", runs CUDA up to {hardware.gpus.cuda_driver}" if hardware.gpus.cuda_driver else ""
    floor = f"; needed: {image.driver_floor_sass}" if image is not None and image.driver_floor_sass else ""
    return passed("driver", f"{hardware.gpus.driver}{newest}{floor}")


def _library(hardware: Hardware) -> Check:
    gpus = hardware.gpus
    if gpus.libcuda is None:
        remedy = f"compute programs need it: set NVIDIA_DRIVER_CAPABILITIES=compute,utility; {_HINT}"
        return warned("driver library", f"{CUDA} was not found in any searched folder", remedy)
    if gpus.driver_dir is None:
        return passed("driver library", gpus.libcuda)
    known = (place.used_by for place in PLACES if gpus.driver_dir == f"/{place.folder}")
    why = next(known, "named by LD_LIBRARY_PATH")
    return passed("driver library", f"{gpus.libcuda} ({why}); the loader does not look there: the engine is told")


def _usable(
    settings: Settings, image: ImageFacts | None, hardware: Hardware, ask_engine: Callable[[], Devices] | None
) -> Iterator[Check]:
    if image is None:
        return
    try:
        told_below = [trouble[0] for gpu in hardware.gpus.gpus if (trouble := gpu_trouble(gpu))]
        for warning in check_supported(settings, image, hardware):
            if not warning.startswith(tuple(told_below)):
                yield warned("gpu", warning, "`python -m images select` names the image for each GPU")
        if image.cuda is None or not hardware.gpus.gpus or settings.devices == "none":
            yield passed("gpu", "no GPU is requested" + (": devices is none" if settings.devices == "none" else ""))
            return
        if ask_engine is None:
            yield passed("gpu", "the image has kernels for it; the engine was not asked")
            return
        devices = ask_engine()
        check_devices(image, hardware, devices.names, devices.said)
    except FatalError as error:
        yield failed("gpu", error)
        return
    if words := why_fewer(image, hardware, devices.names):
        yield warned("gpu", words, "CUDA_VISIBLE_DEVICES may hide one; else look for Xid in `dmesg` on the host")
        return
    yield passed("gpu", f"the engine sees {', '.join(devices.names)}")


def _one(gpu: Gpu) -> Iterator[Check]:
    name = f"gpu {gpu.index}" + (f" {gpu.mig_profile}" if gpu.mig_profile else "")
    if trouble := gpu_trouble(gpu):
        yield warned(name, *trouble)
        return
    yield passed(name, f"{gpu.name or 'unnamed'}, SM {gpu.sm or 'unknown'}, {_memory(gpu)}, {_bandwidth(gpu)}")
    yield from _link(name, gpu)
    yield from _power(name, gpu)
    if gpu.ecc is not None:
        yield passed(f"{name} ecc", "on" if gpu.ecc else "off")
    if gpu.display:
        yield warned(
            f"{name} display", "a desktop takes some of its memory", "move the desktop to another GPU if there is one"
        )
    if gpu.holders:
        yield warned(
            f"{name} in use", _holders(gpu), "plans use only free memory: stop these programs for a larger context"
        )


def _memory(gpu: Gpu) -> str:
    if gpu.is_unified:
        return "shares the host's memory"
    if gpu.vram_total_mib is None:
        return "memory unknown"
    free = "unknown" if gpu.vram_free_mib is None else f"{gpu.vram_free_mib:,}"
    return f"{free} MiB free of {gpu.vram_total_mib:,}"


def _bandwidth(gpu: Gpu) -> str:
    if gpu.bandwidth_gb_s is None:
        return "bandwidth unknown"
    return f"{gpu.bandwidth_gb_s:,.0f} GB/s by {gpu.bandwidth_source or 'an unknown source'}"


def _link(name: str, gpu: Gpu) -> Iterator[Check]:
    now, most = (gpu.pcie_generation, gpu.pcie_width), (gpu.pcie_generation_max, gpu.pcie_width_max)
    if None in now or None in most:
        return
    seen = f"PCIe {now[0]} x{now[1]}, at most {most[0]} x{most[1]}"
    is_narrow = gpu.pcie_width != gpu.pcie_width_max
    slot = "fewer lanes than the card has: use another slot, or take out what shares its lanes"
    asleep = "an idle card lowers its link speed: `appliance probe --measure` shows the speed under load"
    yield judged(f"{name} link", seen, None if now == most else slot if is_narrow else asleep)


def _power(name: str, gpu: Gpu) -> Iterator[Check]:
    if gpu.power_limit_w is None:
        return
    usual = gpu.power_limit_default_w
    seen = f"{gpu.power_limit_w:g} W" + (f", by default {usual:g} W" if usual else "")
    is_capped = usual is not None and gpu.power_limit_w < usual
    remedy = f"capped: `nvidia-smi -i {gpu.index} -pl {usual:g}` on the host removes the cap" if is_capped else None
    yield judged(f"{name} power", seen, remedy)


def _holders(gpu: Gpu) -> str:
    rows = []
    for holder in gpu.holders:
        used = "an unknown amount" if holder.used_mib is None else f"{holder.used_mib:,} MiB"
        rows.append(f"{holder.name or 'a process'} (pid {holder.pid}): {used}")
    return ", ".join(rows)
