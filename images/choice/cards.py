"""docs/cards.md: the image for each card, from the matrix, the facts and `select` itself. Pure.

Each chip and platform has a row with the cell that `select` takes as drivers get newer, and the names of its cards.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from pathlib import Path

from images.choice import gpus, select
from images.choice.gpus import Gpu
from images.choice.proofs import Proof, Record, State
from images.matrix import compat, render
from images.matrix.matrix import Matrix, Platform

PAGE = Path("docs/cards.md")
CPU_CELL = "llama-cpu"
PLATFORMS: tuple[Platform, ...] = ("linux/amd64", "linux/arm64")
# A card of the same chip in other clothes: its name says nothing more.
VARIANT = re.compile(r" (Mobile|Max-Q|Refresh|TDP|TU\d|GA\d|AD\d|GB\d|[\d.]+W\b|GDDR|Embedded|Engineering|PCIe|SXM)")
# ruff: noqa: E501 - lines of a page
HEAD = """# Which image for my card

<!-- DO NOT EDIT. Made from build_matrix.yaml, images/facts and images/proven.yaml by: {command} -->

On the machine itself one command answers: it asks `nvidia-smi` for driver and GPUs, and says why every other image lost.

    python3 -m images select
    make up MODEL=qwen

For another machine, say what it has: `python3 -m images select --driver 570.124 --gpu "RTX 5090"`.

An image holds machine code for one or two GPU generations, whose number is called SM or compute capability. A driver must be
at least as new as the table says; the driver's version is on top of what `nvidia-smi` prints. **Without an NVIDIA GPU** the
image is `llama-cpu`{cpu_size}. Which images were built and checked so far stands under *proven*, with their *size*; the others are built on your machine by
`make up`, half an hour on two cores, and no GPU has run any of them yet ([figures](figures.md)).

| SM | machine | driver | image | proven | size |
|---|---|---|---|---|---|
"""
NOTES = """
Two generations in one machine: `llama-cu130-sm86-sm120` serves an RTX 30 or 40 beside an RTX 50, from driver 580 on; any other pair is
served by the image of the card that brings more, and `select` names the GPU that is left out. Older than SM 75 (GTX 10, V100):
no image is made. A driver that is too old ends the start with [code 21](errors.md#21), a card that the image has no code for
with [code 20](errors.md#20). How these images come about: [images](../images/README.md).

## Names

Laptop and special editions of a name have the chip of the name, but for a few that `nvidia-smi --query-gpu=compute_cap` tells apart.

| SM | cards |
|---|---|
"""


def page(matrix: Matrix, record: Record) -> str:
    rows = (row for sm in _numbers(matrix) for platform in PLATFORMS for row in _rows(matrix, sm, platform, record))
    names = (f"| {sm} | {', '.join(_names(sm))} |" for sm in _numbers(matrix) if _names(sm))
    cpu = _size(record.proofs.get((CPU_CELL, PLATFORMS[0])))
    head = HEAD.format(command=render.RENDER_COMMAND, cpu_size=f" ({cpu})" if cpu else "")
    return "".join((head, _lines(rows), NOTES, _lines(names)))


def _lines(rows: Iterable[str]) -> str:
    return "".join(f"{row}\n" for row in rows)


def _numbers(matrix: Matrix) -> list[str]:
    return sorted({sm for cell in select.of_engine(matrix, select.DEFAULT_ENGINE).cells for sm in cell.sms}, key=int)


def _rows(matrix: Matrix, sm: str, platform: Platform, record: Record) -> Iterator[str]:
    """Yields a row for each driver at which the chosen cell changes."""
    cells = [
        cell
        for cell in select.of_engine(matrix, select.DEFAULT_ENGINE).cells
        if cell.sms == (sm,) and platform in cell.platforms
    ]
    last = None
    floors = [compat.cell_floors(cell, sm=sm) for cell in cells]
    drivers = {driver for floor in floors if floor for driver in (floor.sass, floor.ptx)}
    for driver in sorted(drivers, key=_version):
        machine = select.Machine(platform=platform, gpus=(Gpu(name=f"SM {sm}", sm=sm),), driver=driver)
        choice = select.choose(matrix, machine, record=record)
        if choice.cell != last:
            size = _size(record.proofs.get((choice.cell, platform)))
            words = (
                sm,
                platform.partition("/")[2],
                f"{driver} or newer",
                f"`{choice.cell}`",
                _proven(choice.state),
                size,
            )
            yield f"| {' | '.join(words)} |"
        last = choice.cell


def _proven(state: State) -> str:
    """Tells if the cell was proven. A build with a substitute toolkit does not count."""
    return {"proven": "yes", "substitute toolkit": "no, built with a substitute toolkit"}.get(state, "no")


def _size(proof: Proof | None) -> str:
    """Tells what a built image takes: its files, and what a registry sends where the build kept it."""
    if proof is None or proof.size_mib is None:
        return ""
    sent = f", {proof.compressed_bytes / 1e6:.0f} MB to download" if proof.compressed_bytes else ""
    return f"{proof.size_mib:,} MiB{sent}"


def _version(text: str) -> tuple[int, ...]:
    return tuple(map(int, text.split(".")))


def _names(sm: str) -> list[str]:
    """Returns each name once, without its editions."""
    found = (VARIANT.split(gpu.name)[0].strip() for gpu in gpus.products().values() if gpu.sm == sm)
    return sorted(dict.fromkeys(found), key=_as_people_sort)


def _as_people_sort(name: str) -> list[tuple[int, str]]:
    """Sorts 4060 before 4090 before 4090 Ti, and 40 before 4000."""
    return [(int(part), "") if part.isdigit() else (0, part) for part in re.split(r"(\d+)", name)]
