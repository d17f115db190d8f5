"""The GPUs of this machine, and how Docker gives them to a container."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from appliance.errors import DriverTooOldError, GpuUnusableError, NoKernelError, UsageError
from appliance.host.docker.launch import GpuRequest
from appliance.run import Finished, RunTimeout, run
from appliance.values import dataclass

FIELDS = ("name", "driver_version", "compute_cap")
OLD_FIELDS = FIELDS[:2]  # driver 470 does not have compute_cap
UNKNOWN_FIELD = 'Field "compute_cap" is not a valid field to query'
# Lines that are no rows: for a GPU that fell off the bus, between the rows of the others; and warnings below the rows.
NO_ROW = re.compile(r"^(?:Unable to determine the device handle for GPU|WARNING: )")
QUERY_S = 20.0  # a driver that must be loaded first takes seconds
NO_DEVICES = "no devices were found"
CDI_KIND = "nvidia.com/gpu"
CDI_NAME = re.compile(r"[\w.-]+/[\w.-]+=[\w.:-]+")
HOOK = "nvidia-container-runtime-hook"  # the program that --gpus runs, whether or not a runtime is configured
TOOLKIT = "https://docs.nvidia.com/datacenter/cloud-native/container-toolkit/latest/install-guide.html"


@dataclass(frozen=True, kw_only=True)
class HostGpu:
    name: str
    driver: str
    sm: str | None  # "89"; None: the driver does not report it


@dataclass(frozen=True, kw_only=True)
class Ways:
    """Ways in which Docker can give GPUs to a container, as far as it reports them."""

    has_runtime: bool
    cdi: tuple[str, ...]  # names of CDI devices, including "nvidia.com/gpu=all" if it is known


def query_gpus() -> tuple[HostGpu, ...]:
    """Return the GPUs; empty without a driver. Raises GpuUnusableError if the driver fails, which differs from having
    no GPU."""
    try:
        finished = run(_query(FIELDS), timeout_s=QUERY_S)
        if UNKNOWN_FIELD in f"{finished.stdout}{finished.stderr}":
            return parse_smi(run(_query(OLD_FIELDS), timeout_s=QUERY_S))
        return parse_smi(finished)
    except FileNotFoundError:
        return ()
    except (OSError, RunTimeout) as error:
        message = f"nvidia-smi failed: {error}"
        raise GpuUnusableError(message, hint="repair the driver, or run on the CPU: --cpu") from error


def _query(fields: Sequence[str]) -> tuple[str, ...]:
    return ("nvidia-smi", f"--query-gpu={','.join(fields)}", "--format=csv,noheader")


def parse_smi(finished: Finished) -> tuple[HostGpu, ...]:
    """Return the GPUs that answer. Raises GpuUnusableError if none does, or if nvidia-smi printed something else."""
    said = f"{finished.stdout}\n{finished.stderr}".strip()
    if NO_DEVICES in said.casefold():
        return ()
    lines = [line for line in finished.stdout.splitlines() if line.strip()]
    rows = [[field.strip() for field in line.split(",")] for line in lines if not NO_ROW.match(line)]
    is_whole = bool(rows) and all(len(row) in (len(FIELDS), len(OLD_FIELDS)) for row in rows)
    # If a GPU is lost, nvidia-smi exits with an error although it lists the others.
    if not is_whole or (finished.returncode != 0 and len(rows) == len(lines)):
        message = (
            f"nvidia-smi failed with exit {finished.returncode}: {' '.join(said.split())[:300] or 'it said nothing'}"
        )
        raise GpuUnusableError(message, hint="repair the driver, or run on the CPU: --cpu")
    return tuple(HostGpu(name=row[0], driver=row[1], sm=_sm("".join(row[2:]))) for row in rows)


def _sm(capability: str) -> str | None:
    digits = capability.replace(".", "")
    return digits if digits.isdecimal() else None


def ways(info: Mapping[str, Any], *, which: Callable[[str], str | None]) -> Ways:
    """Return the ways to give GPUs to a container. `info` is Docker's; it lists devices since Docker 28.2, before that
    only the folders of their files."""
    found = [str(each.get("ID", "")) for each in info.get("DiscoveredDevices") or () if each.get("Source") == "cdi"]
    names = [name for name in found if name.startswith(CDI_KIND)]
    if not names and any(_names_gpus(Path(folder)) for folder in info.get("CDISpecDirs") or ()):
        names = [f"{CDI_KIND}=all"]
    has_runtime = "nvidia" in (info.get("Runtimes") or {}) or which(HOOK) is not None
    return Ways(has_runtime=has_runtime, cdi=tuple(names))


def _names_gpus(folder: Path) -> bool:
    """True if a CDI file in the folder names GPUs. Only the files of a daemon on this machine can be seen."""
    files = [path for path in (folder.iterdir() if folder.is_dir() else ()) if path.suffix in {".json", ".yaml"}]
    return any(CDI_KIND in path.read_text(encoding="utf-8", errors="replace") for path in files)


def request(asked: str | None, gpus: Sequence[HostGpu], by: Ways) -> GpuRequest | None:
    """Return the request for GPUs, or None for none. `asked` is --gpus; None takes all. Raises GpuUnusableError if GPUs
    are wanted and cannot be used: there is no silent fallback to the CPU."""
    if asked == "none" or (asked is None and not gpus):
        return None
    names = tuple(word.strip() for word in ("all" if asked is None else asked).split(","))
    if not all(names):
        message = f"--gpus has an empty name: {asked!r}"
        raise UsageError(
            message, hint="all, none, indices or UUIDs separated by commas (0,1), or CDI names (nvidia.com/gpu=0)"
        )
    if all(CDI_NAME.fullmatch(name) for name in names):
        return _of_cdi(names, by)
    if not gpus:
        message = f"GPUs were requested, but nvidia-smi shows none: --gpus {asked}"
        raise GpuUnusableError(message, hint="install the NVIDIA driver, or run on the CPU: --cpu")
    if by.has_runtime:
        return GpuRequest(driver="nvidia", devices=() if names == ("all",) else names)
    if by.cdi:
        return GpuRequest(driver="cdi", devices=tuple(f"{CDI_KIND}={name}" for name in names))
    message = f"Docker cannot give containers this machine's GPU: {gpus[0].name}: no NVIDIA runtime and no CDI devices"
    hint = (
        f"install the NVIDIA Container Toolkit ({TOOLKIT}), then: "
        "sudo nvidia-ctk runtime configure --runtime=docker && sudo systemctl restart docker; or run on the CPU: --cpu"
    )
    raise GpuUnusableError(message, hint=hint)


def _of_cdi(names: tuple[str, ...], by: Ways) -> GpuRequest:
    """Return the request for named CDI devices. A daemon that lists its devices would refuse an unknown name; any other
    daemon decides at the start."""
    unknown = [name for name in names if len(by.cdi) > 1 and name not in by.cdi]
    if unknown or not by.cdi:
        known = f"known are {', '.join(by.cdi)}" if by.cdi else "Docker knows no CDI devices"
        message = f"no such CDI device: {', '.join(unknown or names)}"
        raise GpuUnusableError(message, hint=f"{known}; sudo nvidia-ctk cdi generate --output=/etc/cdi/nvidia.yaml")
    return GpuRequest(driver="cdi", devices=names)


def check_image(image: str, labels: Mapping[str, str], gpus: Sequence[HostGpu], asked: GpuRequest | None) -> None:
    """Check before the start what the appliance would find then. Raises GpuUnusableError, NoKernelError,
    DriverTooOldError. It refuses only if every GPU fails: the appliance itself chooses among several."""
    made_for = sms_of(labels.get("io.appliance.sm"))
    if not made_for:
        if asked:
            message = f"the image has no GPU kernels, but a GPU was requested: {image}"
            raise GpuUnusableError(message, hint="omit --image to get the image for this GPU, or use --cpu")
        return
    if not asked:
        message = f"the image is for GPUs, but no GPU is used: {image}"
        raise GpuUnusableError(message, hint="omit --cpu and --image, or name a CPU image")
    known = [gpu for gpu in gpus if gpu.sm is not None]
    if known and not any(runs_on(form, gpu.sm or "") for form in made_for for gpu in known):
        ours = ", ".join(f"{gpu.name} (sm_{gpu.sm})" for gpu in known)
        message = f"the image is for another GPU: {image} has kernels for sm_{', sm_'.join(made_for)}, here is {ours}"
        raise NoKernelError(message, hint="omit --image: the right image is chosen or built")
    floor = labels.get("io.appliance.driver.floor.sass", "none")
    if floor != "none" and gpus and all(_numbers(gpu.driver) < _numbers(floor) for gpu in gpus):
        message = f"the driver is too old for {image}: {gpus[0].driver}, it needs {floor}"
        raise DriverTooOldError(message, hint="install a newer driver, or omit --image")


def sms_of(label: str | None) -> tuple[str, ...]:
    """Return the SMs in a label such as "86, 120"; empty for an image without GPU code."""
    return tuple(re.findall(r"\d+", label or ""))


def runs_on(form: str, sm: str) -> bool:
    """True if machine code runs on the chip: on its own and on later ones of the same generation (CUDA's binary
    compatibility)."""
    return form[:-1] == sm[:-1] and int(form[-1]) <= int(sm[-1])


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version))
