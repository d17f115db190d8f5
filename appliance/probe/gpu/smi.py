"""A second source: `nvidia-smi -q -x`, compared with what NVML told the child.

Both query the same driver through two libraries, which may come from different places in a container. A difference
becomes a warning with both values; NVML's value is used. It can take seconds, so only `probe`, `doctor` and a start
that measures run it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from xml.etree import ElementTree

from appliance.probe.gpu.driver import reaching
from appliance.probe.gpu.nvidia import is_narrowed
from appliance.probe.machine.hardware import Gpu, GpuProbe
from appliance.run import OUTPUT_LIMIT_BYTES, RunTimeout, run

COMMAND = ("nvidia-smi", "-q", "-x")
TIMEOUT_S = 10.0
ROUNDING_MIB = 1  # nvidia-smi may round up where we round down


@dataclass(frozen=True, kw_only=True)
class SmiGpu:
    """One GPU as nvidia-smi prints it; None for N/A."""

    pci_bus_id: str
    name: str | None
    vram_total_mib: int | None
    pcie_generation_max: int | None
    pcie_width_max: int | None


@dataclass(frozen=True, kw_only=True)
class SmiReport:
    driver: str | None
    cuda_driver: str | None
    gpus: tuple[SmiGpu, ...]


def parse_smi(text: str) -> SmiReport:
    """Parse the report. Raises ValueError, with the reason, for any other text."""
    if len(text) > OUTPUT_LIMIT_BYTES:
        message = f"it is longer than {OUTPUT_LIMIT_BYTES} characters"
        raise ValueError(message)
    # A real report names a DTD, which is never fetched, and declares no entities: with them a small document can grow
    # huge.
    if "<!ENTITY" in text:
        message = "it declares entities"
        raise ValueError(message)
    try:
        root = ElementTree.fromstring(text)  # noqa: S314 - size and entities are checked above
    except (ElementTree.ParseError, ValueError) as error:  # ValueError: unknown encoding
        message = f"it is not XML: {error}"
        raise ValueError(message) from error
    if root.tag != "nvidia_smi_log":
        message = f"it is another document: <{root.tag[:40]}>"
        raise ValueError(message)
    return SmiReport(
        driver=_words(root, "driver_version"),
        cuda_driver=_words(root, "cuda_version"),
        gpus=tuple(_gpu(gpu) for gpu in root.findall("gpu")),
    )


def disagreements(found: GpuProbe, report: SmiReport, *, is_filtered: bool = False) -> tuple[str, ...]:
    """List the differences between NVML and nvidia-smi, with both values; a missing value is not compared.

    `is_filtered` is True if some GPUs were left out of `found` on purpose.
    """
    gpus = {_bus(gpu.pci_bus_id): gpu for gpu in found.gpus if gpu.pci_bus_id}
    # Without NVML's address of a GPU, it is unknown which of nvidia-smi's GPUs is missing.
    is_filtered = is_filtered or any(gpu.pci_bus_id is None for gpu in found.gpus)
    said = [
        *_differ("the driver is", found.driver, report.driver),
        *_differ("the driver's CUDA is", found.cuda_driver, report.cuda_driver),
    ]
    for other in report.gpus:
        gpu = gpus.get(_bus(other.pci_bus_id))
        if gpu is not None:
            said += _compared(gpu, other)
        elif not is_filtered:
            said.append(f"nvidia-smi shows a GPU at {other.pci_bus_id} ({other.name}) that NVML does not show")
    shown = {_bus(other.pci_bus_id) for other in report.gpus}
    missing = [gpu for bus, gpu in gpus.items() if bus not in shown]
    said += [f"NVML shows a GPU at {gpu.pci_bus_id} ({gpu.name}) that nvidia-smi does not" for gpu in missing]
    return tuple(said)


def cross_check(
    found: GpuProbe,
    environment: Mapping[str, str],
    volume: Path | None = None,
    *,
    command: Sequence[str] = COMMAND,
    timeout_s: float = TIMEOUT_S,
) -> GpuProbe:
    """Return `found` with a warning for each difference; unchanged if there is no driver or no nvidia-smi."""
    if not found.gpus and found.problem is None:
        return found
    try:
        around = reaching(environment, found.driver_dir, volume)
        finished = run(command, timeout_s=timeout_s, environment=around)
    except FileNotFoundError:
        return found
    except (RunTimeout, OSError) as error:
        return _warned(found, f"nvidia-smi gave no answer: {error}")
    if finished.returncode != 0:
        last = ((finished.stdout + finished.stderr).strip().splitlines() or ["it printed nothing"])[-1]
        return _warned(found, f"nvidia-smi ended with {finished.returncode}: {last[:200]}")
    try:
        report = parse_smi(finished.stdout)
    except ValueError as error:
        return _warned(found, f"nvidia-smi printed no readable report: {error}")
    return _warned(found, *disagreements(found, report, is_filtered=is_narrowed(environment)))


def _compared(gpu: Gpu, other: SmiGpu) -> Iterator[str]:
    where = f"GPU {gpu.index}"
    if gpu.mig_profile is None:  # a slice has its own name and memory; nvidia-smi shows those of the whole GPU
        yield from _differ(f"{where} is", gpu.name, other.name)
        mine, theirs = gpu.vram_total_mib, other.vram_total_mib
        if mine is not None and theirs is not None and abs(mine - theirs) > ROUNDING_MIB:
            yield f"{where} has {mine} MiB by NVML and {theirs} MiB by nvidia-smi"
    yield from _differ(f"{where}'s PCIe generation is at most", gpu.pcie_generation_max, other.pcie_generation_max)
    yield from _differ(f"{where}'s PCIe width is at most", gpu.pcie_width_max, other.pcie_width_max)


def _differ(what: str, mine: object, theirs: object) -> Iterator[str]:
    if mine is not None and theirs is not None and mine != theirs:
        yield f"{what} {mine} by NVML and {theirs} by nvidia-smi"


def _warned(found: GpuProbe, *words: str) -> GpuProbe:
    return replace(found, warnings=(*found.warnings, *words))


def _gpu(element: ElementTree.Element) -> SmiGpu:
    return SmiGpu(
        pci_bus_id=element.get("id", ""),
        name=_words(element, "product_name"),
        vram_total_mib=_count(element, "fb_memory_usage/total"),
        pcie_generation_max=_count(element, "pci/pci_gpu_link_info/pcie_gen/max_link_gen"),
        pcie_width_max=_count(element, "pci/pci_gpu_link_info/link_widths/max_link_width"),
    )


def _words(element: ElementTree.Element, path: str) -> str | None:
    text = (element.findtext(path) or "").strip()
    return None if text in ("", "N/A", "[N/A]", "Not Supported", "[Not Supported]") else text


def _count(element: ElementTree.Element, path: str) -> int | None:
    """Return the number before the unit in "15360 MiB" or "16x"."""
    match = re.fullmatch(r"(\d{1,9})(?:x| MiB)?", _words(element, path) or "", re.ASCII)
    return int(match[1]) if match else None


def _bus(bus_id: str | None) -> str:
    """Normalise the address: NVML and nvidia-smi write the domain with eight digits, sysfs with four; case varies."""
    domain, _, rest = (bus_id or "").lower().partition(":")
    return f"{domain.zfill(8)}:{rest}"
