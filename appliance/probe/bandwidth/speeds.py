"""Measured bandwidths on the volume: one file a machine, beside the profiles, read at every start.

The name hashes what was measured on: the hardware's fingerprint and the GPUs' uuids. A file for another machine is
never found, and one that cannot be read counts as none until the next measuring sets it aside.
"""

from __future__ import annotations

import hashlib
import json
import os
from contextlib import suppress
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from appliance.documents import Rules, load, read
from appliance.errors import VolumeError
from appliance.probe.machine.hardware import GpuSpeed, Hardware, Speeds, fingerprint

SCHEMA = 1
MAX_BYTES = 2**20  # ours are some hundred bytes a GPU
LIMIT_GB_S = 1e9
# Not .json: the store of profiles beside takes every such file for one of its own.
SUFFIX = ".speeds"


def speeds_path(folder: Path, hardware: Hardware) -> Path:
    return folder / f"machine-{_key_id(_key(hardware))}{SUFFIX}"


def load_speeds(folder: Path, hardware: Hardware) -> Speeds | None:
    """What was measured on this very machine; None where nothing was, or it cannot be read. Writes nothing."""
    with suppress(OSError, ValueError):
        return _read(speeds_path(folder, hardware), hardware)
    return None


def why_unreadable(folder: Path, hardware: Hardware) -> str | None:
    """In words what is wrong with this machine's file; None where there is none, and where it is sound."""
    try:
        _read(speeds_path(folder, hardware), hardware)
    except FileNotFoundError:
        return None
    except OSError as error:
        return error.strerror or str(error)
    except ValueError as error:
        return str(error)
    return None


def save_speeds(folder: Path, hardware: Hardware, speeds: Speeds) -> Path:
    """Whole or not at all; a file there that cannot be read is kept as `.corrupt`. Raises VolumeError."""
    path = speeds_path(folder, hardware)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    key = _key(hardware)
    document = {"schema": SCHEMA, "key": key, "speeds": asdict(speeds)}
    try:
        if why_unreadable(folder, hardware):
            path.replace(path.with_suffix(".corrupt"))
        with temporary.open("w", encoding="utf-8") as file:
            file.write(json.dumps(document, indent=1, sort_keys=True) + "\n")
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError as error:
        with suppress(OSError):  # the folder itself may be what is missing
            temporary.unlink(missing_ok=True)
        message = f"measured speeds cannot be kept: {path}: {error.strerror}"
        raise VolumeError(message, hint="check free space, owner and mode of the volume") from error
    return path


def parse_speeds(text: str, hardware: Hardware) -> Speeds:
    """Raises ValueError for anything that `save_speeds` would not have written for this machine."""
    document = load(text)
    if document.get("schema") != SCHEMA or document.get("key") != _key(hardware):
        message = "it is for another machine, or of another schema"
        raise ValueError(message)
    return read(Speeds, document.get("speeds"), rules=_RULES)


def _are_rates(*rates: float | None) -> bool:
    """The planner divides by them."""
    return all(rate is None or 0 < rate < LIMIT_GB_S for rate in rates)


_GPU_RATES = tuple(field.name for field in fields(GpuSpeed) if field.name != "uuid")
_RULES: Rules = {
    GpuSpeed: lambda gpu: _are_rates(*(getattr(gpu, name) for name in _GPU_RATES)),
    Speeds: lambda speeds: _are_rates(speeds.dram_gb_s),
}


def _read(path: Path, hardware: Hardware) -> Speeds:
    with path.open("rb") as file:
        data = file.read(MAX_BYTES + 1)
    if len(data) > MAX_BYTES:
        message = f"it is larger than {MAX_BYTES} bytes"
        raise ValueError(message)
    return parse_speeds(data.decode(), hardware)


def _key(hardware: Hardware) -> dict[str, Any]:
    uuids = sorted(gpu.uuid for gpu in hardware.gpus.gpus if gpu.uuid)
    key: dict[str, Any] = json.loads(json.dumps({**fingerprint(hardware), "uuids": uuids}))
    return key


def _key_id(key: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps({"schema": SCHEMA, **key}, sort_keys=True).encode()).hexdigest()[:24]
