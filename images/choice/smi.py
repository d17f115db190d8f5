"""This machine's GPUs and driver, from nvidia-smi. Pure: the caller runs the command.

An old driver does not know every field (470 has no compute_cap) and is asked again without it. A GPU that fell off the
bus, or that neither nvidia-smi nor the facts can place, does not hide the others: it is named and left out.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from images.choice import gpus
from images.choice.gpus import Gpu
from images.choice.select import MIB_PER_GIB, LeftOut, Machine, parse_driver
from images.docker import NOT_FOUND, Finished
from images.errors import MatrixError, UsageError
from images.matrix.compat import Facts
from images.matrix.matrix import Platform

NAME, DRIVER, CAPABILITY, MEMORY = FIELDS = ("name", "driver_version", "compute_cap", "memory.total")
NO_DEVICES = "no devices were found"
UNKNOWN_FIELD = re.compile(r'Field "([\w.]+)" is not a valid field to query')
SILENT = re.compile(r"^Unable to determine the device handle for (GPU ?[0-9A-Fa-f:.]+): *(.+?)\.?$")
REMARK = re.compile(r"^WARNING: ")  # "infoROM is corrupted at gpu …" stands below a sound answer
NOBODY_KNOWS = "neither nvidia-smi nor the facts say its compute capability"

Run = Callable[[tuple[str, ...]], Finished]


def query_machine(run: Run, platform: Platform, known: Facts | None = None) -> Machine:
    """Asks nvidia-smi. Raises MatrixError if it fails: a GPU that cannot be asked is not the same as none."""
    fields: tuple[str, ...] = FIELDS
    asked = run(_query(fields))
    while (unknown := _unknown_field(asked.lines)) in fields[1:]:
        fields = tuple(each for each in fields if each != unknown)
        asked = run(_query(fields))
    return parse(asked, platform, known, fields=fields)


def parse(
    asked: Finished, platform: Platform, known: Facts | None = None, *, fields: Sequence[str] = FIELDS
) -> Machine:
    """Parses nvidia-smi's answer. A missing nvidia-smi (127) or no device means a machine without a GPU.

    `fields`: the columns that were asked for.
    """
    said = " ".join(asked.lines).strip()
    if asked.code == NOT_FOUND or NO_DEVICES in said.casefold():
        return Machine(platform=platform)
    lines = [line.strip() for line in asked.lines if line.strip() and not REMARK.match(line)]
    silent = [
        LeftOut(gpu=found[1], why=f"it does not answer: {found[2]}") for found in map(SILENT.match, lines) if found
    ]
    table = [[field.strip() for field in line.split(",")] for line in lines if not SILENT.match(line)]
    is_whole = bool(table) and all(len(row) == len(fields) for row in table)
    # With a GPU that is lost it ends with that error's code, though it tells of the others.
    if not is_whole or (asked.code != 0 and not silent):
        message = f"nvidia-smi failed with exit {asked.code}: {said or 'it said nothing'}"
        raise MatrixError(message, hint="repair the driver, or say what there is: --driver 580.95.05 --gpu 'RTX 5090'")
    rows = [dict(zip(fields, row, strict=True)) for row in table]
    placed = [(row[NAME], _placed(row, known)) for row in rows]
    unknown = [LeftOut(gpu=name, why=NOBODY_KNOWS) for name, gpu in placed if gpu is None]
    return Machine(
        platform=platform,
        gpus=tuple(gpu for _, gpu in placed if gpu),
        driver=next((driver for row in rows if (driver := _driver(row))), None),
        unknown=(*unknown, *silent),
    )


def _query(fields: Sequence[str]) -> tuple[str, ...]:
    return ("nvidia-smi", f"--query-gpu={','.join(fields)}", "--format=csv,noheader,nounits")


def _unknown_field(lines: Sequence[str]) -> str | None:
    return next((found[1] for found in map(UNKNOWN_FIELD.search, lines) if found), None)


def _driver(row: Mapping[str, str]) -> str | None:
    try:
        return parse_driver(row.get(DRIVER, ""))
    except UsageError:
        return None


def _placed(row: Mapping[str, str], known: Facts | None) -> Gpu | None:
    """Places a card by its number, or by its name if an old driver does not tell the number. None if neither is known.

    Memory is what the machine reports, bandwidth what the facts have for the name.
    """
    digits = row.get(CAPABILITY, "").replace(".", "")
    sm = digits if digits.isdecimal() else None
    try:
        listed = gpus.parse_gpu(row[NAME], known)
    except UsageError:
        if sm is None:
            return None
        listed = Gpu(name=row[NAME], sm=sm)
    memory_mib = row.get(MEMORY, "")
    memory_gib = int(memory_mib) / MIB_PER_GIB if memory_mib.isdecimal() else listed.memory_gib
    return replace(listed, sm=sm or listed.sm, memory_gib=memory_gib)
