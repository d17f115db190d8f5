"""Which GPUs a plan may use, for the planners of all engines: pure."""

from __future__ import annotations

from collections.abc import Iterator

from appliance.image_facts import ImageFacts, runs_on
from appliance.probe import Gpu, Hardware


def device_id(gpu: Gpu) -> str:
    """What a `Device` and a plan's share are known by."""
    return gpu.uuid or str(gpu.index)


def judged(hardware: Hardware, image: ImageFacts) -> Iterator[tuple[Gpu, str | None]]:
    """Each with why it cannot be used, in words; None: it can."""
    sliced = {gpu.mig_parent for gpu in hardware.gpus.gpus if gpu.mig_parent}
    for gpu in hardware.gpus.gpus:
        yield gpu, _why_not(gpu, image, sliced)


def _why_not(gpu: Gpu, image: ImageFacts, sliced: set[str]) -> str | None:
    if gpu.uuid in sliced:
        return "it is cut into slices (MIG), and those are used"
    if image.sm and gpu.sm is not None and not any(runs_on(form, gpu.sm) for form in image.sm):
        return f"this image has kernels for SM {', '.join(image.sm)} and none for SM {gpu.sm}"
    if not gpu.is_unified and gpu.vram_free_mib is None:
        return "nobody says how much of its memory is free"
    return None
