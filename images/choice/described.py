"""Reads the machine of a file, in the forms of `appliance plan --machine`: GPUs, driver and kind of CPU.

The file is the output of `appliance probe --json`, a doctor's bundle, or the same words by hand (docs/plan.md).
`appliance plan` reports faults in its other parts.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml

from images.choice import gpus
from images.choice.gpus import Gpu
from images.choice.select import MIB_PER_GIB, Machine, parse_driver
from images.errors import MatrixError, UsageError
from images.matrix.compat import Facts
from images.matrix.matrix import Platform

MAX_BYTES = 4 * 2**20
MAX_YAML_BYTES = 64 * 2**10
ARM = "asimd"  # a feature of every 64-bit Arm CPU and of no other


def read_machine(name: str, here: Platform, known: Facts | None = None) -> Machine:
    """Reads the machine of a file; `-` is stdin. Raises MatrixError (10) with file and key.

    `here` is the platform if the file does not name the kind of CPU.
    """
    source = "stdin" if name == "-" else name
    try:
        with sys.stdin.buffer if name == "-" else Path(name).open("rb") as file:
            data = file.read(MAX_BYTES + 1)
        return parse_machine(data, source, here, known)
    except OSError as error:
        raise _refused(source, f"it cannot be read: {error.strerror or error}") from error
    except (ValueError, RecursionError, UsageError, yaml.YAMLError) as error:
        raise _refused(source, " ".join(str(error).split())[:300]) from error


def parse_machine(data: bytes, source: str, here: Platform, known: Facts | None = None) -> Machine:
    """Parses a machine. Raises like `read_machine`, and ValueError for text that is neither JSON nor YAML."""
    document = _load(data)
    machine = _mapping(document.get("hardware", document), source, "hardware")
    found = _mapping(machine.get("gpus") or {}, source, "gpus")
    entries = found.get("gpus") or []
    if not isinstance(entries, list):
        raise _refused(source, f"gpus.gpus: is a list, and not {entries!r:.60}")
    driver = found.get("driver")
    return Machine(
        platform=_platform(_mapping(machine.get("cpu") or {}, source, "cpu"), here),
        gpus=tuple(_gpu(each, f"gpus.gpus[{at}]", source, known) for at, each in enumerate(entries)),
        driver=None if driver is None else parse_driver(str(driver)),
    )


def _load(data: bytes) -> Mapping[str, Any]:
    text = data.decode("utf-8-sig")
    limit, load = (MAX_BYTES, json.loads) if text.lstrip().startswith("{") else (MAX_YAML_BYTES, _load_yaml)
    if len(data) > limit:
        message = f"it is larger than {limit // 2**10} KiB"
        raise ValueError(message)
    document = load(text)
    if not isinstance(document, dict):
        message = f"it holds no keys: {document!r:.80}"
        raise ValueError(message)
    return document


def _load_yaml(text: str) -> object:
    """Loads YAML without aliases, which let a short text expand endlessly."""
    if any(isinstance(event, yaml.AliasEvent) for event in yaml.parse(text, Loader=yaml.SafeLoader)):
        message = "aliases are not taken"
        raise ValueError(message)
    return yaml.safe_load(text)


def _gpu(entry: object, key: str, source: str, known: Facts | None) -> Gpu:
    """Returns the GPU of an entry, by its number or else its name, with the memory that the file gives."""
    row = _mapping(entry, source, key)
    name, sm, mib = row.get("name"), row.get("sm"), row.get("vram_total_mib")
    if name is not None and not str(name).isprintable():
        raise _refused(source, f"{key}.name: it holds control characters: {name!r:.80}")
    if not (name or sm):
        raise _refused(source, f"{key}: neither name nor sm is told")
    if sm is not None and not (str(sm).isascii() and str(sm).isdecimal()):
        raise _refused(source, f"{key}.sm: it is no compute capability: {sm!r}; 90 stands for 9.0")
    try:
        found = gpus.parse_gpu(str(name), known) if name else Gpu(name=f"SM {sm}", sm=str(sm))
    except UsageError as error:
        if sm is None:
            raise _refused(source, f"{key}: {error.message}") from error
        found = Gpu(name=str(name), sm=str(sm))
    if mib is not None and (isinstance(mib, bool) or not isinstance(mib, int | float) or not mib > 0):
        raise _refused(source, f"{key}.vram_total_mib: it is no amount of memory in MiB: {mib!r:.60}")
    told = found.memory_gib if mib is None else mib / MIB_PER_GIB
    return replace(found, sm=str(sm or found.sm), memory_gib=told)


def _platform(cpu: Mapping[str, Any], here: Platform) -> Platform:
    isa = cpu.get("isa")
    if not isinstance(isa, list) or not isa:
        return here
    return "linux/arm64" if ARM in isa else "linux/amd64"


def _mapping(value: object, source: str, key: str) -> Mapping[str, Any]:
    if not isinstance(value, dict):
        raise _refused(source, f"{key}: holds keys of its own, and not {value!r:.60}")
    return value


def _refused(source: str, words: str) -> MatrixError:
    shown = source if source.isprintable() else ascii(source)  # nothing of it may steer the terminal
    return MatrixError(f"machine file {shown}: {words}", hint="`appliance probe --json` writes such a file")
