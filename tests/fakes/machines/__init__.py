"""Described machines, as the lines that fakes/nvml/nvml.c reads and as the facts that a probe should find.

Both are made from the same YAML by different roads: the lines go through the C library, nvidia-ml-py and the real
child; `gpus_of` is what must come out. Tests that only plan use `hardware_of` and need no compiler.
"""

from __future__ import annotations

import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml

from appliance.probe import Cpu, Gpu, GpuHolder, GpuProbe, Hardware, Memory, NumaNode, Speeds, Volume
from appliance.probe.machine.sysfs import parse_cpulist

HERE = Path(__file__).parent
SOURCE = HERE.parent / "nvml" / "nvml.c"
CARDS: Mapping[str, Any] = yaml.safe_load((HERE / "cards.yaml").read_text("utf-8"))
MACHINES: Mapping[str, Any] = yaml.safe_load((HERE / "machines.yaml").read_text("utf-8"))
MIB = 1024 * 1024
A100_MEMORY_SLICES = 8
COMPILE = ("gcc", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC", "-Wl,-soname,libnvidia-ml.so.1")


def build_library(folder: Path) -> Path:
    """The fake NVML in `folder`, which is then what LD_LIBRARY_PATH names."""
    library = folder / "libnvidia-ml.so.1"
    subprocess.run(
        [*COMPILE, "-o", str(library), str(SOURCE)],
        check=True,
        capture_output=True,
        text=True,
    )
    return library


def describe(name: str, **knobs: object) -> str:
    """A machine's file. `knobs` are lines that come first and so count, with `__` for a dot: `gpu__0__name="x"`;
    None takes a line out, and what it said is NOT_SUPPORTED."""
    machine = MACHINES[name]
    lines = [f"driver={machine['driver']}", f"cuda={_cuda_number(machine['cuda'])}", f"gpus={len(machine['gpus'])}"]
    for index, entry in enumerate(machine["gpus"]):
        lines += [f"gpu.{index}.{key}={value}" for key, value in _lines(index, entry)]
        lines += [f"process.{pid}={program}" for pid, program in entry.get("processes", {}).items()]
    given = {key.replace("__", "."): value for key, value in knobs.items()}
    left = [line for line in lines if line.partition("=")[0] not in given]
    return "\n".join([*(f"{key}={value}" for key, value in given.items() if value is not None), *left]) + "\n"


def gpus_of(name: str) -> tuple[Gpu, ...]:
    """Every device that an engine could use; a GPU in MIG mode is represented by its slices."""
    return tuple(gpu for index, entry in enumerate(MACHINES[name]["gpus"]) for gpu in _gpus(index, entry))


def hardware_of(name: str) -> Hardware:
    """The whole machine, with its memory free but for 2 GiB."""
    machine, host = MACHINES[name], MACHINES[name]["host"]
    memory_mib = host["memory_mib"]
    return Hardware(
        cpu=Cpu(
            model_name="described",
            logical=host["logical"],
            physical=host["cores"],
            quota=None,
            isa=tuple(sorted(host["isa"])),
        ),
        memory=Memory(
            total_mib=memory_mib,
            available_mib=memory_mib - 2048,
            limit_mib=None,
            limit_used_mib=None,
            memlock_limit_mib=8,
        ),
        numa=tuple(
            NumaNode(id=at, cpus=parse_cpulist(node["cpus"]), memory_mib=node["memory_mib"])
            for at, node in enumerate(host.get("numa", ()))
        ),
        volume=Volume(path=Path("/data"), free_mib=100_000, total_mib=500_000, is_writable=True),
        gpus=GpuProbe(gpus=_on_nodes(name), driver=machine["driver"], cuda_driver=machine["cuda"]),
        gpu_requested=True,
        speeds=None if host["dram_gb_s"] is None else Speeds(dram_gb_s=float(host["dram_gb_s"])),
    )


def sm_count(card: Mapping[str, Any]) -> int:
    """Compute capabilities with 64 CUDA cores an SM, as NVIDIA's programming guide has them; the others have 128."""
    return int(card["cores"]) // (64 if card["sm"] in (60, 70, 72, 75, 80) else 128)


def _on_nodes(name: str) -> tuple[Gpu, ...]:
    """With the node of each slot, which sysfs tells and NVML does not."""
    nodes = [entry.get("numa_node") for entry in MACHINES[name]["gpus"]]
    return tuple(replace(gpu, numa_node=nodes[gpu.index]) for gpu in gpus_of(name))


def _cuda_number(release: str) -> int:
    major, minor = release.split(".")
    return int(major) * 1000 + int(minor) * 10


def _bus_id(index: int) -> str:
    return f"00000000:{index + 1:02X}:00.0"


def _uuid(index: int) -> str:
    return f"GPU-{index:08x}-0000-0000-0000-000000000000"


def _lines(index: int, entry: Mapping[str, Any]) -> Iterator[tuple[str, object]]:
    card = CARDS[entry["card"]]
    yield from {"name": card["name"], "uuid": _uuid(index), "sm": card["sm"], "pci_bus_id": _bus_id(index)}.items()
    yield from (("cores", card["cores"]), ("sm_clock_mhz", card["sm_clock"]))
    if "memory_total" in card:
        yield "memory_total", card["memory_total"] * MIB
        yield "memory_free", (card["memory_total"] - entry.get("used", 0)) * MIB
        yield "bus_bits", card["bus_bits"]
        yield "memory_clock_mhz", card["memory_clock"]
    if "pcie" in card:
        most = entry.get("pcie_slot", card["pcie"])
        now = entry.get("pcie_now", most)
        yield from (("pcie_generation", now[0]), ("pcie_width", now[1]))
        yield from (("pcie_generation_max", most[0]), ("pcie_width_max", most[1]))
    if "power_limit" in card:
        yield "power_limit_mw", int(entry.get("power_now", card["power_limit"]) * 1000)
        yield "power_limit_default_mw", int(card["power_limit"] * 1000)
    if "ecc" in card:
        yield "ecc", int(card["ecc"])
    yield "display_active", int(_has_display(card, entry))
    yield "display_mode", int(_has_display(card, entry))
    for link, peer in enumerate(entry.get("nvlink", ())):
        yield f"nvlink.{link}", _bus_id(peer)
    for kind in ("compute", "graphics"):
        for place, (pid, mib) in enumerate(entry.get(kind, ())):
            yield f"{kind}.{place}", f"{pid}:{mib * MIB}"
    slices = entry.get("mig", ())
    if slices:
        yield from (("mig_mode", 1), ("mig_max", 7))
    for place, cut in enumerate(slices):
        head = f"mig.{place}"
        yield f"{head}.uuid", f"MIG-{place:08x}-0000-0000-0000-000000000000"
        yield f"{head}.name", f"{card['name']} MIG {cut['profile']}"
        yield f"{head}.memory_total", cut["mib"] * MIB
        yield f"{head}.memory_free", cut["mib"] * MIB
        yield f"{head}.slice_mib", cut["mib"]
        yield f"{head}.slice_sms", cut["sms"]
        yield f"{head}.slice_gpu_slices", cut["gpu_slices"]
        yield f"{head}.gpu_instance", place + 1


def _has_display(card: Mapping[str, Any], entry: Mapping[str, Any]) -> bool:
    return bool(entry.get("display", card.get("display", False)))


def _gpus(index: int, entry: Mapping[str, Any]) -> Iterator[Gpu]:
    card = CARDS[entry["card"]]
    whole = _whole(index, entry, card)
    if not entry.get("mig"):
        yield whole
    for place, cut in enumerate(entry.get("mig", ())):
        assert whole.bandwidth_gb_s is not None
        yield Gpu(
            index=index,
            name=f"{card['name']} MIG {cut['profile']}",
            uuid=f"MIG-{place:08x}-0000-0000-0000-000000000000",
            sm=str(card["sm"]),
            sm_count=cut["sms"],
            sm_clock_mhz=whole.sm_clock_mhz,
            vram_total_mib=cut["mib"],
            vram_free_mib=cut["mib"],
            pci_bus_id=whole.pci_bus_id,
            bus_bits=whole.bus_bits,
            memory_clock_mhz=whole.memory_clock_mhz,
            bandwidth_gb_s=whole.bandwidth_gb_s * cut["memory_slices"] / A100_MEMORY_SLICES,
            bandwidth_source="memory clock x bus width, this slice's share",
            pcie_generation=whole.pcie_generation,
            pcie_width=whole.pcie_width,
            pcie_generation_max=whole.pcie_generation_max,
            pcie_width_max=whole.pcie_width_max,
            mig_profile=cut["profile"],
            mig_parent=whole.uuid,
            ecc=whole.ecc,
            display=whole.display,
            power_limit_w=whole.power_limit_w,
            power_limit_default_w=whole.power_limit_default_w,
        )


def _whole(index: int, entry: Mapping[str, Any], card: Mapping[str, Any]) -> Gpu:
    has_memory = "memory_total" in card
    most = entry.get("pcie_slot", card.get("pcie", (None, None)))
    now = entry.get("pcie_now", most)
    power = card.get("power_limit")
    return Gpu(
        index=index,
        name=card["name"],
        uuid=_uuid(index),
        sm=str(card["sm"]),
        sm_count=sm_count(card),
        sm_clock_mhz=card["sm_clock"],
        vram_total_mib=card.get("memory_total"),
        vram_free_mib=card["memory_total"] - entry.get("used", 0) if has_memory else None,
        pci_bus_id=_bus_id(index),
        is_unified=not has_memory,
        bus_bits=card.get("bus_bits"),
        memory_clock_mhz=card.get("memory_clock"),
        bandwidth_gb_s=2 * card["memory_clock"] * card["bus_bits"] / 8000 if has_memory else 273.0,
        bandwidth_source="memory clock x bus width" if has_memory else "table: NVIDIA GB10",
        pcie_generation=now[0],
        pcie_width=now[1],
        pcie_generation_max=most[0],
        pcie_width_max=most[1],
        nvlink_peers=tuple(sorted(set(entry.get("nvlink", ())))),
        ecc=card.get("ecc"),
        display=_has_display(card, entry),
        power_limit_w=None if power is None else float(entry.get("power_now", power)),
        power_limit_default_w=None if power is None else float(power),
        holders=tuple(
            GpuHolder(pid=pid, name=entry.get("processes", {}).get(pid), used_mib=mib)
            for kind in ("compute", "graphics")
            for pid, mib in entry.get(kind, ())
        ),
    )
