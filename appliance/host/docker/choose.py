"""The cell for this machine's GPUs, chosen among published ones as `python -m images select` chooses in a clone. Pure.

A difference remains: the memory of GPUs is not weighed, so of unlike GPUs the newest ones decide.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from appliance.errors import ConfigError, DriverTooOldError, FatalError, NoKernelError
from appliance.host.docker.gpus import HostGpu
from appliance.host.docker.inventory import Choice

REMEDY = "in a clone of the project `make up` builds one; or name one: --image REGISTRY/NAME:TAG"


def choose(choices: Sequence[Choice], gpus: Sequence[HostGpu], platform: str) -> Choice:
    """Return the best cell; without GPUs one for the CPU. Raises NoKernelError or DriverTooOldError if no cell serves
    any of the GPUs, ConfigError if none is for the platform. The CPU never takes over for a GPU."""
    here = [each for each in choices if platform in each.platforms]
    fits = [each for each in here if (bool(_served(each, gpus)) if gpus else each.cuda is None)]
    if not fits:
        raise _nothing(here, gpus, platform)
    return max(fits, key=lambda each: _rank(each, gpus))


def _served(choice: Choice, gpus: Sequence[HostGpu]) -> list[HostGpu]:
    return [gpu for gpu in gpus if _runs(choice, gpu) and _is_new_enough(gpu.driver, choice.drivers[gpu.sm or ""])]


def _runs(choice: Choice, gpu: HostGpu) -> bool:
    return (gpu.sm or "") in choice.drivers


def _rank(choice: Choice, gpus: Sequence[HostGpu]) -> tuple[int, int, int, int, int, bool, tuple[int, ...]]:
    """Rank by: newest chip, most GPUs, code nearest to the chips, fewest other chips, then the newest CUDA that is not
    newer than the driver."""
    sms = [int(gpu.sm or "0") for gpu in _served(choice, gpus)]
    is_of_the_driver = all(_is_new_enough(gpu.driver, choice.cuda_driver or "0") for gpu in gpus)
    distance = sum(sm - max(int(each) for each in choice.built_for if int(each) <= sm) for sm in sms)
    cuda = _numbers(choice.cuda or "0")
    return max(sms, default=0), len(sms), sum(sms), -distance, -len(choice.built_for), is_of_the_driver, cuda


def _nothing(here: Sequence[Choice], gpus: Sequence[HostGpu], platform: str) -> FatalError:
    if not gpus:
        message = f"no image for the CPU is published for this platform: {platform}"
        return ConfigError(message, hint=REMEDY)
    # A driver that tells no SM is older than all that do.
    floors = [floor for gpu in gpus for each in here for sm, floor in each.drivers.items() if gpu.sm in (None, sm)]
    if floors:
        message = f"the driver is too old for every published image: {gpus[0].driver}, {gpus[0].name} needs "
        hint = "install a newer driver, or run on the CPU: --cpu"
        return DriverTooOldError(message + min(floors, key=_numbers), hint=hint)
    named = ", ".join(f"{gpu.name} (sm_{gpu.sm})" for gpu in gpus)
    message = f"no image is published for this machine's GPU: {named}"
    return NoKernelError(message, hint=f"{REMEDY}; or run on the CPU: --cpu")


def _is_new_enough(driver: str, floor: str) -> bool:
    return _numbers(driver) >= _numbers(floor)


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version))
