"""Whether this image can run on this machine: refused at the start, in words, and never later in the engine's."""

from __future__ import annotations

from appliance.errors import ConfigError, GpuUnusableError
from appliance.image_facts import ImageFacts
from appliance.probe import Hardware

SERVED_ENGINES = ("llama",)


def check_engine(image: ImageFacts) -> None:
    """Raises ConfigError for an image whose engine this appliance cannot start."""
    if image.engine not in SERVED_ENGINES:
        message = f"the engine of this image cannot be served yet: {image.engine} {image.engine_version} ({image.cell})"
        raise ConfigError(message, hint=f"use an image of {', '.join(SERVED_ENGINES)}: python -m images select")


def check_supported(image: ImageFacts, hardware: Hardware) -> None:
    """Raises GpuUnusableError when a GPU was given to an image without GPU kernels: never the CPU in silence."""
    if image.cuda is None and hardware.gpu_requested:
        seen = ", ".join(gpu.name or "unnamed GPU" for gpu in hardware.gpus.gpus) or hardware.gpus.problem or "a GPU"
        message = f"a GPU was asked for and this image has no GPU kernels: {image.cell}, given {seen}"
        raise GpuUnusableError(message, hint="use an image for this GPU, or start without --gpus to use the CPU")
