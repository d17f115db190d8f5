"""Checks the disks before a build: half a build takes minutes and gives nothing."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from images.errors import BuildError
from images.matrix.matrix import Cell, ToolkitForm

# The builder's layers beside the finished files. llama-cpu's add up to 1.9 GiB in `docker system df -v`: compiler
# packages 0.9, sources and wheels 0.7, objects 0.3. For CUDA an estimate: of wheels the toolkit's layer is 1.0 GiB and
# is there twice while they are unpacked; Debian's is 1.9 GB to fetch and 5 GB installed; NVIDIA's image was never here,
# and its layers are there packed, unpacked, and once more what is taken out of them. Objects and libraries of each SM
# come on top.
TOOLS_MIB = 2048
TOOLKIT_MIB: Mapping[ToolkitForm, int] = {"wheels": 2048, "debian": 6656, "image": 18432}
WHEELS_MIB = 4096  # for an engine from wheels with its toolkit: the unpacked files besides the image's layers
SM_MIB = 2048
# The finished files stand in the builder's layers and in the loaded image.
COPIES_IN_ENGINE = 2
# The archive, and the saved image that checks and bill of materials are read from.
COPIES_IN_ARCHIVES = 1
COPIES_OF_WEIGHTS = 4


@dataclass(frozen=True, kw_only=True)
class Need:
    what: str
    path: Path
    mib: int


@dataclass(frozen=True, kw_only=True)
class Disk:
    device: int
    free_mib: int


def needs(cell: Cell, *, archives: Path, engine_data: Path | None) -> list[Need]:
    """Returns the space needed, by the size budget. Without the engine's folder only archives are counted."""
    tools_mib = TOOLS_MIB + _cuda_mib(cell)
    found = [Need(what="archives", path=archives, mib=COPIES_IN_ARCHIVES * cell.size_budget_mib)]
    if engine_data:
        mib = tools_mib + COPIES_IN_ENGINE * cell.size_budget_mib
        found.append(Need(what="the engine's images and cache", path=engine_data, mib=mib))
    return found


def total_mib(cell: Cell) -> int:
    """Returns the space needed if one disk holds everything, such as a hosted runner's."""
    anywhere = Path("/")
    return sum(need.mib for need in needs(cell, archives=anywhere, engine_data=anywhere))


def _cuda_mib(cell: Cell) -> int:
    if cell.target.cuda is None:
        return 0
    return TOOLKIT_MIB[cell.toolkit.form] + SM_MIB * len(cell.target.sms) if cell.toolkit else WHEELS_MIB


def needs_baked(weights_bytes: int, *, archives: Path, engine_data: Path | None) -> list[Need]:
    """Returns the space that weights in an image take beside their file.

    That is the archive, the builder's copy of the context, its layer, and the blob and files of the loaded image.
    """
    mib = weights_bytes // 2**20 + 1
    found = [Need(what="the archive with the weights", path=archives, mib=mib)]
    if engine_data:
        found.append(Need(what="the weights in the engine", path=engine_data, mib=COPIES_OF_WEIGHTS * mib))
    return found


def query_disk(path: Path) -> Disk:
    """Asks the disk of the nearest folder that exists."""
    here = next(folder for folder in (path, *path.absolute().parents) if folder.exists())
    return Disk(device=here.stat().st_dev, free_mib=shutil.disk_usage(here).free // 2**20)


def refuse_full(cell: Cell, wanted: Iterable[Need], disk_of: Callable[[Path], Disk] = query_disk) -> None:
    """Raises BuildError with the figures when a disk has less room than what is wanted of it together."""
    by_device: dict[int, list[Need]] = {}
    free_mib: dict[int, int] = {}
    for need in wanted:
        disk = disk_of(need.path)
        by_device.setdefault(disk.device, []).append(need)
        free_mib[disk.device] = disk.free_mib
    for device, needed in by_device.items():
        total_mib = sum(need.mib for need in needed)
        if free_mib[device] < total_mib:
            where = ", ".join(f"{need.mib} MiB for {need.what} in {need.path}" for need in needed)
            message = f"cell {cell.id} needs {total_mib} MiB and {free_mib[device]} MiB are free: {where}"
            raise BuildError(
                message, hint="python -m images prune gives back what builds left; --no-space-check builds"
            )
