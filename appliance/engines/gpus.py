"""GPUs that a plan may use, for the planners of all engines. Pure: no input or output."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from appliance.errors import ConfigError
from appliance.image_facts import ImageFacts, runs_on
from appliance.probe import Gpu, Hardware
from appliance.settings import Settings


def device_id(gpu: Gpu) -> str:
    """Return the id of a GPU in `Device` and in a plan's shares: its UUID, else its index."""
    return gpu.uuid or str(gpu.index)


def judged(hardware: Hardware, image: ImageFacts) -> Iterator[tuple[Gpu, str | None]]:
    """Yield each GPU with the reason why it cannot be used, or None if it can."""
    sliced = {gpu.mig_parent for gpu in hardware.gpus.gpus if gpu.mig_parent}
    for gpu in hardware.gpus.gpus:
        yield gpu, _why_not(gpu, image, sliced)


def asked_for(settings: Settings, usable: Sequence[Gpu]) -> tuple[Gpu, ...]:
    """Return the GPUs that the setting `devices` names. Raises ConfigError (10) if one is not usable."""
    if settings.devices == "auto":
        return tuple(usable)
    names = [name.strip() for name in settings.devices.split(",") if name.strip()]
    by_name = {key: gpu for gpu in usable for key in (device_id(gpu), str(gpu.index))}
    missing = [name for name in names if name not in by_name]
    if missing:
        there = ", ".join(f"{gpu.index} ({gpu.name}, {device_id(gpu)})" for gpu in usable) or "none"
        message = (
            f"setting devices names GPUs that cannot be used: {', '.join(missing)} ({settings.sources['devices']})"
        )
        raise ConfigError(message, hint=f"usable GPUs here: {there}")
    return tuple({device_id(by_name[name]): by_name[name] for name in names}.values())


def _why_not(gpu: Gpu, image: ImageFacts, sliced: set[str]) -> str | None:
    if gpu.uuid in sliced:
        return "it is in MIG mode, and its slices are used"
    if image.sm and gpu.sm is not None and not any(runs_on(form, gpu.sm) for form in image.sm):
        return f"this image has kernels for SM {', '.join(image.sm)} and none for SM {gpu.sm}"
    if gpu.problem:
        return f"it {gpu.problem}"
    if not gpu.is_unified and gpu.vram_free_mib is None:
        return "the driver does not report its free memory"
    return None
