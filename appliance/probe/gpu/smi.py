"""A second witness: `nvidia-smi -q -x`, compared with what NVML told the child.

Both ask the same driver, but by two libraries that a container may have from two places. What they disagree on becomes
a warning with both values, and NVML's reading stands. It can take seconds: `probe` and `doctor` ask it, a start
only before it measures.
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
ROUNDING_MIB = 1  # nvidia-smi may round up what is cut off here


@dataclass(frozen=True, kw_only=True)
class SmiGpu:
    """One GPU as nvidia-smi prints it; None where it says N/A."""

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
    """The report in `text`; raises ValueError for anything else, saying what it is instead."""
    if len(text) > OUTPUT_LIMIT_BYTES:
        message = f"it is longer than {OUTPUT_LIMIT_BYTES} characters"
        raise ValueError(message)
    # The true document names a DTD, which is never fetched, and declares nothing: entities are how a small one grows.
    if "<!ENTITY" in text:
        message = "it declares entities"
        raise ValueError(message)
    try:
        root = ElementTree.fromstring(text)  # noqa: S314 - bounded, and without entities, above
    except (ElementTree.ParseError, ValueError) as error:  # ValueError: an encoding that there is not
        message = f"it is no XML: {error}"
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
    """In words, with both values, what NVML and nvidia-smi say differently; what one does not tell is not compared.

    `is_filtered`: some GPUs were left out of `found` on purpose.
    """
    gpus = {_bus(gpu.pci_bus_id): gpu for gpu in found.gpus if gpu.pci_bus_id}
    # Where NVML does not tell an address, nobody can say which of nvidia-smi's GPUs is missing.
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
            said.append(f"nvidia-smi shows a GPU at {other.pci_bus_id} ({other.name}) that NVML does not give")
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
    """`found` with a warning for each disagreement; as it is without nvidia-smi, and where there is no driver."""
    if not found.gpus and found.problem is None:
        return found
    try:
        around = reaching(environment, found.driver_dir, volume)
        finished = run(command, timeout_s=timeout_s, environment=around)
    except FileNotFoundError:
        return found
    except (RunTimeout, OSError) as error:
        return _warned(found, f"nvidia-smi cannot be compared with: {error}")
    if finished.returncode != 0:
        last = ((finished.stdout + finished.stderr).strip().splitlines() or ["it printed nothing"])[-1]
        return _warned(found, f"nvidia-smi ended with {finished.returncode}: {last[:200]}")
    try:
        report = parse_smi(finished.stdout)
    except ValueError as error:
        return _warned(found, f"nvidia-smi printed no report that can be read: {error}")
    return _warned(found, *disagreements(found, report, is_filtered=is_narrowed(environment)))


def _compared(gpu: Gpu, other: SmiGpu) -> Iterator[str]:
    where = f"GPU {gpu.index}"
    if gpu.mig_profile is None:  # a slice has its own name and memory, and nvidia-smi's are its parent's
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
    """The number before the unit, as in "15360 MiB" and "16x"."""
    match = re.fullmatch(r"(\d{1,9})(?:x| MiB)?", _words(element, path) or "", re.ASCII)
    return int(match[1]) if match else None


def _bus(bus_id: str | None) -> str:
    """NVML and nvidia-smi write the domain with eight digits, sysfs with four; letters in either case."""
    domain, _, rest = (bus_id or "").lower().partition(":")
    return f"{domain.zfill(8)}:{rest}"
