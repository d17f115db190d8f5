"""The child process that queries the NVIDIA driver: `python -m appliance.probe.gpu.nvml` prints NVML's answers as JSON.

A separate process, because a driver may hang or crash it. Each fact is queried alone and is null if NVML does not
report it, so that one "not supported" does not lose the others. Names are those of `Gpu`.
"""

from __future__ import annotations

import ctypes
import json
import re
import sys
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

import pynvml  # type: ignore[import-untyped]

T = TypeVar("T")
MIB = 1024 * 1024
# More than any machine has: a driver that miscounts must not keep the child busy until its time limit.
GPUS_MAX, SLICES_MAX = 256, 64
# A MIG slice has this many eighths of the memory and of its bandwidth (NVIDIA MIG User Guide, "GPU slices").
MEMORY_SLICES = 8
COMPUTE_SLICES = 7
MEMORY_OF_COMPUTE = {1: 1, 2: 2, 3: 4, 4: 4, 7: 8}  # eighths of the memory by sevenths of the compute, same guide
CHIPS = Path(__file__).with_name("chips.json")
FROM_CLOCK = "memory clock x bus width"
LIBCUDA = "libcuda.so.1"
_CU_DEVICE_ATTRIBUTE_INTEGRATED = 18  # cuda.h
# "GRID A100-10C", "NVIDIA A40-24Q": size in GB and series of a vGPU (NVIDIA vGPU user guide, "Virtual GPU types").
_VGPU_NAME = re.compile(r"-\d+[ABCQ](?:ME)?$")
_OF_A_CARD = (
    "bus_bits", "memory_clock_mhz", "pcie_generation", "pcie_width", "pcie_generation_max", "pcie_width_max",
)  # fmt: skip
_SAYS_0 = "NVML says 0"
_SHARES_HOST = 0.9  # of the host's memory: a driver that reports it as the GPU's own may subtract a reserved part


def collect() -> dict[str, Any]:
    """Return the report of an initialised NVML. Raises NVMLError if the devices cannot even be counted."""
    cuda = fact(pynvml.nvmlSystemGetCudaDriverVersion_v2)
    count = pynvml.nvmlDeviceGetCount()
    answers = [_answer(pynvml.nvmlDeviceGetHandleByIndex, index) for index in range(min(count, GPUS_MAX))]
    handles = [handle for handle, _ in answers]
    gpus = [_gpu(handle, index) if handle else _silent(index, why) for index, (handle, why) in enumerate(answers)]
    by_bus = {gpu["pci_bus_id"]: gpu["index"] for gpu in gpus if gpu.get("pci_bus_id")}
    warnings = [f"NVML counts {count} GPUs: only the first {GPUS_MAX} are queried"] if count > GPUS_MAX else []
    devices: list[dict[str, Any]] = []
    for gpu, handle in zip(gpus, handles, strict=True):
        if handle is not None:
            gpu["nvlink_peers"] = sorted({by_bus[bus] for bus in _nvlinks(handle) if bus in by_bus})
        if not is_cut(handle):
            devices.append(gpu)
            continue
        slices = list(_slices(gpu, handle))
        devices += slices
        if not slices:
            warnings.append(f"GPU {gpu['index']} is in MIG mode and has no slices: it cannot be used")
    return {
        "driver": fact(pynvml.nvmlSystemGetDriverVersion),
        "cuda_driver": None if cuda is None else f"{cuda // 1000}.{cuda % 1000 // 10}",
        "gpus": devices,
        "warnings": warnings,
    }


def _silent(index: int, why: str) -> dict[str, Any]:
    return {"index": index, "problem": f"does not answer: {why}"}


def _gpu(handle: Any, index: int) -> dict[str, Any]:  # noqa: ANN401 - NVML's opaque pointer
    capability = fact(pynvml.nvmlDeviceGetCudaComputeCapability, handle)
    sm = None if capability is None else f"{capability[0]}{capability[1]}"
    name, ecc = fact(pynvml.nvmlDeviceGetName, handle), fact(pynvml.nvmlDeviceGetEccMode, handle)
    gpu = {
        "index": index,
        "name": name,
        "uuid": fact(pynvml.nvmlDeviceGetUUID, handle),
        "sm": sm,
        "pci_bus_id": fact(lambda: _text(pynvml.nvmlDeviceGetPciInfo(handle).busId)),
        "pcie_generation": fact(pynvml.nvmlDeviceGetCurrPcieLinkGeneration, handle),
        "pcie_width": fact(pynvml.nvmlDeviceGetCurrPcieLinkWidth, handle),
        "pcie_generation_max": fact(pynvml.nvmlDeviceGetMaxPcieLinkGeneration, handle),
        "pcie_width_max": fact(pynvml.nvmlDeviceGetMaxPcieLinkWidth, handle),
        "ecc": None if ecc is None else bool(ecc[0]),
        "display": _display(handle),
        "power_limit_w": _watts(fact(pynvml.nvmlDeviceGetPowerManagementLimit, handle)),
        "power_limit_default_w": _watts(fact(pynvml.nvmlDeviceGetPowerManagementDefaultLimit, handle)),
        "holders": holders_of(handle),
    }
    gpu |= memory_of(handle) | _compute(handle, sm) | _bandwidth(handle, name, sm)
    if sm in _chips()["unified"] or _shares_host_memory(gpu, handle):
        # Some drivers report the host's memory as the GPU's own; it must not be counted twice.
        return gpu | {"is_unified": True, "vram_total_mib": None, "vram_free_mib": None, "problem": None}
    return gpu | (_UNKNOWN_SHARE if _is_virtual(handle, name) else {})


def memory_of(handle: Any) -> dict[str, Any]:  # noqa: ANN401
    """Total and free MiB, or `problem` with the reason why they are unknown.

    A total of 0 means that the driver does not know.
    """
    # Version 2 subtracts the driver's own reserve from the free memory; old drivers lack it.
    memory = fact(pynvml.nvmlDeviceGetMemoryInfo, handle, pynvml.nvmlMemory_v2)
    memory, why = (memory, "") if memory else _answer(pynvml.nvmlDeviceGetMemoryInfo, handle)
    if memory is not None and int(memory.total) < MIB:
        memory, why = None, _SAYS_0
    return {
        "vram_total_mib": None if memory is None else int(memory.total) // MIB,
        "vram_free_mib": None if memory is None else int(memory.free) // MIB,
        "problem": f"does not report its memory: {why}" if memory is None else None,
    }


def _shares_host_memory(gpu: dict[str, Any], handle: Any) -> bool:  # noqa: ANN401
    """True for an integrated GPU that is not in the table of chips.

    Its driver reports no memory bus and no PCIe link, and either no memory or the host's. If the CUDA driver can be
    queried, its answer decides, as it does for the engines.
    """
    if gpu["sm"] is None or any(gpu[name] for name in _OF_A_CARD) or is_cut(handle) or _is_virtual(handle, gpu["name"]):
        return False
    if (by_cuda := _is_integrated(gpu["pci_bus_id"])) is not None:
        return by_cuda
    host_mib, own_mib = _host_mib(), gpu["vram_total_mib"]
    if own_mib is None:
        return str(gpu["problem"]).endswith((_SAYS_0, f"({pynvml.NVML_ERROR_NOT_SUPPORTED})"))
    return host_mib is not None and _SHARES_HOST * host_mib <= own_mib <= host_mib


def _host_mib() -> int | None:
    try:
        found = re.search(r"^MemTotal:\s+(\d{1,20}) kB$", Path("/proc/meminfo").read_text("utf-8"), re.MULTILINE)
    except OSError:
        return None
    return int(found[1]) // 1024 if found else None


def _is_integrated(bus_id: str | None) -> bool | None:
    """Ask the CUDA driver whether the device is integrated. None if it cannot be asked or does not show the device."""
    device, value = ctypes.c_int(), ctypes.c_int()
    try:
        cuda = ctypes.CDLL(LIBCUDA)
        failed = (
            bus_id is None
            or cuda.cuInit(0)
            or cuda.cuDeviceGetByPCIBusId(ctypes.byref(device), bus_id.encode())
            or cuda.cuDeviceGetAttribute(ctypes.byref(value), _CU_DEVICE_ATTRIBUTE_INTEGRATED, device)
        )
    except (OSError, AttributeError):  # no driver library, or one without these calls
        return None
    return None if failed else bool(value.value)


# A virtual GPU is a share of a card in space or time. NVML reports the whole card and not the size of the share.
_UNKNOWN_SHARE = {
    "sm_count": None,
    "bus_bits": None,
    "memory_clock_mhz": None,
    "bandwidth_gb_s": None,
    "bandwidth_source": None,
}


def _is_virtual(handle: Any, name: str | None) -> bool:  # noqa: ANN401
    mode = fact(pynvml.nvmlDeviceGetVirtualizationMode, handle)
    return mode == pynvml.NVML_GPU_VIRTUALIZATION_MODE_VGPU or _VGPU_NAME.search(name or "") is not None


def _compute(handle: Any, sm: str | None) -> dict[str, Any]:  # noqa: ANN401
    """SM count and clock. NVML counts CUDA cores; their number per SM follows from the compute capability."""
    cores, a_sm = fact(pynvml.nvmlDeviceGetNumGpuCores, handle) or None, _chips()["cores_of_sm"].get(sm, 128)
    clock_mhz = fact(pynvml.nvmlDeviceGetMaxClockInfo, handle, pynvml.NVML_CLOCK_SM) or None
    return {"sm_count": cores // a_sm or None if cores and sm else None, "sm_clock_mhz": clock_mhz}


def _bandwidth(handle: Any, name: str | None, sm: str | None) -> dict[str, Any]:  # noqa: ANN401
    """2 x clock x bus width (double data rate), or the value of `chips.json` if NVML does not report them."""
    clock_mhz = fact(pynvml.nvmlDeviceGetMaxClockInfo, handle, pynvml.NVML_CLOCK_MEM) or None
    bits = fact(pynvml.nvmlDeviceGetMemoryBusWidth, handle) or None
    gb_s = 2 * clock_mhz * bits / 8000 if clock_mhz and bits else None
    source = FROM_CLOCK if gb_s else None
    chips = _chips()
    if gb_s is None and name in chips["bandwidths"]:
        gb_s, source = float(chips["bandwidths"][name]["gb_s"]), f"table: {name}"
    elif gb_s is None and "gb_s" in (chip := chips["unified"].get(sm, {})):
        cores = fact(pynvml.nvmlDeviceGetNumGpuCores, handle)
        gb_s, source = float(chip["gb_s_by_cores"].get(str(cores), chip["gb_s"])), f"table: {chip['chip']}"
    return {"bus_bits": bits, "memory_clock_mhz": clock_mhz, "bandwidth_gb_s": gb_s, "bandwidth_source": source}


@cache
def _chips() -> dict[str, Any]:
    chips: dict[str, Any] = json.loads(CHIPS.read_text("utf-8"))
    return chips


def _nvlinks(handle: Any) -> Iterator[str]:  # noqa: ANN401
    """Yield the bus ids at the other end of active links; an NVSwitch is such an end too."""
    for link in range(pynvml.NVML_NVLINK_MAX_LINKS):
        is_active = fact(pynvml.nvmlDeviceGetNvLinkState, handle, link)
        if is_active is None:
            return
        if is_active and (bus := fact(lambda n: _text(pynvml.nvmlDeviceGetNvLinkRemotePciInfo(handle, n).busId), link)):
            yield bus


def is_cut(handle: Any) -> bool:  # noqa: ANN401
    mode = None if handle is None else fact(pynvml.nvmlDeviceGetMigMode, handle)
    return bool(mode and mode[0] == pynvml.NVML_DEVICE_MIG_ENABLE)


def slices_of(handle: Any) -> Iterator[Any]:  # noqa: ANN401
    for place in range(min(fact(pynvml.nvmlDeviceGetMaxMigDeviceCount, handle) or 0, SLICES_MAX)):
        cut = fact(pynvml.nvmlDeviceGetMigDeviceHandleByIndex, handle, place)
        if cut is not None:
            yield cut


def _slices(parent: dict[str, Any], handle: Any) -> Iterator[dict[str, Any]]:  # noqa: ANN401
    for cut in slices_of(handle):
        name = fact(pynvml.nvmlDeviceGetName, cut)
        profile = re.search(r"MIG (\S+)$", name or "")
        facts = memory_of(cut)
        attributes = fact(pynvml.nvmlDeviceGetAttributes_v2, cut)
        if facts["vram_total_mib"] is None:
            told = int(attributes.memorySizeMB) if attributes is not None else 0
            facts["vram_total_mib"] = told or _named_mib(f"MIG {profile[1]}" if profile else None)
        yield (
            parent
            | facts
            | _share(parent, facts["vram_total_mib"], profile[1] if profile else "")
            | {
                "name": name,
                "uuid": fact(pynvml.nvmlDeviceGetUUID, cut),
                "mig_profile": profile[1] if profile else "unknown",
                "mig_parent": parent["uuid"],
                "sm_count": _slice_sms(parent, attributes, profile[1] if profile else ""),
                "nvlink_peers": [],  # MIG slices have no NVLink
                "holders": holders_of(cut),
            }
        )


def _share(parent: dict[str, Any], slice_mib: int | None, profile: str) -> dict[str, Any]:
    # A container that has only slices may not read the whole GPU's memory. It then comes from a table or from the GPU's
    # name, else from the profile, whose first number counts the sevenths of the compute.
    whole_mib, gb_s = parent["vram_total_mib"] or _whole_mib(parent["name"]), parent["bandwidth_gb_s"]
    if whole_mib and slice_mib:
        eighths = min(MEMORY_SLICES, max(1, round(slice_mib / whole_mib * MEMORY_SLICES)))
    else:
        eighths = MEMORY_OF_COMPUTE.get(_slices_of(profile)[1], 0)
    if not (gb_s and eighths):
        return {"bandwidth_gb_s": None, "bandwidth_source": None}
    return {
        "bandwidth_gb_s": gb_s * eighths / MEMORY_SLICES,
        "bandwidth_source": f"{parent['bandwidth_source']}, this slice's share",
    }


def _slice_sms(parent: dict[str, Any], attributes: Any, profile: str) -> int | None:  # noqa: ANN401
    """SM count as NVML reports it, else the share that the profile's name gives."""
    told = int(attributes.multiprocessorCount) if attributes is not None else 0
    sms = (parent.get("sm_count") or 0) * _slices_of(profile)[0] // COMPUTE_SLICES
    return told or sms or None


def _slices_of(profile: str) -> tuple[int, int]:
    """Return the sevenths of the compute, and those of the enclosing GPU instance, whose memory it shares.

    (3, 3) for "3g.40gb", (1, 3) for "1c.3g.40gb", (0, 0) for other texts.
    """
    found = re.match(r"(?:(\d)c\.)?(\d)g\.", profile)
    return (int(found[1] or found[2]), int(found[2])) if found else (0, 0)


def _whole_mib(name: str | None) -> int | None:
    memories = _chips()["memories"]
    return int(memories[name]["gb"]) * 1024 if name in memories else _named_mib(name)


def _named_mib(name: str | None) -> int | None:
    """Memory size from a name such as "NVIDIA A100-SXM4-80GB" or "… MIG 1g.20gb", MiB; accurate enough for eighths."""
    size = re.search(r"(\d+)\s?GB\b", name or "", re.IGNORECASE)
    return int(size[1]) * 1024 if size else None


def holders_of(handle: Any) -> list[dict[str, Any]]:  # noqa: ANN401
    running = [
        process
        for ask in (pynvml.nvmlDeviceGetComputeRunningProcesses, pynvml.nvmlDeviceGetGraphicsRunningProcesses)
        for process in fact(ask, handle) or ()
    ]
    return [
        {
            "pid": process.pid,
            "name": fact(lambda pid: _text(pynvml.nvmlSystemGetProcessName(pid)), process.pid),
            "used_mib": None if process.usedGpuMemory is None else int(process.usedGpuMemory) // MIB,
        }
        # a desktop's program may be in both lists
        for process in {process.pid: process for process in running}.values()
    ]


def _display(handle: Any) -> bool | None:  # noqa: ANN401
    known = [fact(ask, handle) for ask in (pynvml.nvmlDeviceGetDisplayActive, pynvml.nvmlDeviceGetDisplayMode)]
    told = [bool(each) for each in known if each is not None]
    return any(told) if told else None


def _watts(milliwatts: int | None) -> float | None:
    return None if milliwatts is None else milliwatts / 1000


def fact(ask: Callable[..., T], *arguments: object) -> T | None:
    return _answer(ask, *arguments)[0]


def _answer(ask: Callable[..., T], *arguments: object) -> tuple[T | None, str]:
    """Return the answer, or None with the reason and NVML's error number."""
    try:
        return ask(*arguments), ""
    except pynvml.NVMLError as error:
        return None, _said(error)
    # ValueError: a name is not UTF-8. The other two: a list of processes too large for memory.
    except (ValueError, MemoryError, OverflowError) as error:
        return None, f"NVML: {error}"


def _said(error: Any) -> str:  # noqa: ANN401 - pynvml has no types
    return f"NVML: {error} ({error.value})"


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value


def main() -> int:
    try:
        pynvml.nvmlInit()
        report = collect()
    except pynvml.NVMLError as error:
        report = {"problem": _said(error)}
    json.dump(report, sys.stdout)
    return 0


if __name__ == "__main__":
    sys.exit(main())
