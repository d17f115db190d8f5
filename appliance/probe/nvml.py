"""The child that talks to the NVIDIA driver: `python -m appliance.probe.nvml` prints what NVML says as JSON.

It is a process of its own because a driver may hang or crash it. Each fact is asked for by itself and is null where
NVML does not tell it: "not supported" of one must not cost the others.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from typing import Any, Protocol, TypeVar

import pynvml  # type: ignore[import-untyped]

T = TypeVar("T")
MIB = 1024 * 1024


class Nvml(Protocol):
    """The part of nvidia-ml-py that is used."""

    def nvmlSystemGetDriverVersion(self) -> str: ...  # noqa: N802
    def nvmlSystemGetCudaDriverVersion_v2(self) -> int: ...  # noqa: N802
    def nvmlDeviceGetCount(self) -> int: ...  # noqa: N802
    def nvmlDeviceGetHandleByIndex(self, index: int) -> Any: ...  # noqa: N802, ANN401
    def nvmlDeviceGetName(self, handle: Any) -> str: ...  # noqa: N802, ANN401
    def nvmlDeviceGetUUID(self, handle: Any) -> str: ...  # noqa: N802, ANN401
    def nvmlDeviceGetCudaComputeCapability(self, handle: Any) -> tuple[int, int]: ...  # noqa: N802, ANN401
    def nvmlDeviceGetMemoryInfo(self, handle: Any) -> Any: ...  # noqa: N802, ANN401
    def nvmlDeviceGetPciInfo(self, handle: Any) -> Any: ...  # noqa: N802, ANN401


def collect(nvml: Nvml) -> dict[str, Any]:
    """The report of an initialised NVML. Raises NVMLError when not even the devices can be counted."""
    cuda = _fact(nvml.nvmlSystemGetCudaDriverVersion_v2)
    return {
        "driver": _fact(nvml.nvmlSystemGetDriverVersion),
        "cuda_driver": None if cuda is None else f"{cuda // 1000}.{cuda % 1000 // 10}",
        "gpus": [_gpu(nvml, index) for index in range(nvml.nvmlDeviceGetCount())],
    }


def _gpu(nvml: Nvml, index: int) -> dict[str, Any]:
    handle = _fact(lambda: nvml.nvmlDeviceGetHandleByIndex(index))
    if handle is None:
        return {"index": index}
    capability = _fact(lambda: nvml.nvmlDeviceGetCudaComputeCapability(handle))
    memory = _fact(lambda: nvml.nvmlDeviceGetMemoryInfo(handle))
    return {
        "index": index,
        "name": _fact(lambda: nvml.nvmlDeviceGetName(handle)),
        "uuid": _fact(lambda: nvml.nvmlDeviceGetUUID(handle)),
        "sm": None if capability is None else f"{capability[0]}{capability[1]}",
        "vram_total_mib": None if memory is None else int(memory.total) // MIB,
        "vram_free_mib": None if memory is None else int(memory.free) // MIB,
        "pci_bus_id": _fact(lambda: _text(nvml.nvmlDeviceGetPciInfo(handle).busId)),
    }


def _fact(ask: Callable[[], T]) -> T | None:
    try:
        return ask()
    except (pynvml.NVMLError, UnicodeDecodeError):  # a name that is not UTF-8 is unknown, too
        return None


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value


def main() -> int:
    try:
        pynvml.nvmlInit()
        report = collect(pynvml)
    except pynvml.NVMLError as error:
        report = {"problem": f"NVML: {error}"}
    json.dump(report, sys.stdout)
    return 0


if __name__ == "__main__":
    sys.exit(main())
