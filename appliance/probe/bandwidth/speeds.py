"""Measured bandwidths on the volume: one file per machine, in the folder of the profiles, read at every start.

The file name is a hash of the hardware's fingerprint and the GPUs' uuids, so a file of another machine is never found.
An unreadable file counts as none until the next measurement sets it aside.
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
MAX_BYTES = 2**20  # our files have some hundred bytes per GPU
LIMIT_GB_S = 1e9
# Not .json: the profile store in this folder reads every .json file as a profile.
SUFFIX = ".speeds"


def speeds_path(folder: Path, hardware: Hardware) -> Path:
    return folder / f"machine-{_key_id(_key(hardware))}{SUFFIX}"


def load_speeds(folder: Path, hardware: Hardware) -> Speeds | None:
    """Return the bandwidths measured on this machine; None if absent or unreadable. Writes nothing."""
    with suppress(OSError, ValueError):
        return _read(speeds_path(folder, hardware), hardware)
    return None


def why_unreadable(folder: Path, hardware: Hardware) -> str | None:
    """Return what is wrong with this machine's file; None if it is valid or absent."""
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
    """Write the file atomically; an unreadable old file is kept as `.corrupt`. Raises VolumeError."""
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
        with suppress(OSError):  # the folder itself may be missing
            temporary.unlink(missing_ok=True)
        message = f"measured speeds cannot be kept: {path}: {error.strerror}"
        raise VolumeError(message, hint="check free space, owner and mode of the volume") from error
    return path


def parse_speeds(text: str, hardware: Hardware) -> Speeds:
    """Parse the file's content. Raises ValueError if `save_speeds` did not write it for this machine."""
    document = load(text)
    if document.get("schema") != SCHEMA or document.get("key") != _key(hardware):
        message = "it belongs to another machine or has another schema"
        raise ValueError(message)
    return read(Speeds, document.get("speeds"), rules=_RULES)


def _are_rates(*rates: float | None) -> bool:
    """True if the planner can divide by every known rate."""
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
