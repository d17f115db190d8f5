"""Make the quantized file of a model: checked, written beside its place, synced to disk, renamed."""

from __future__ import annotations

import asyncio
import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

from appliance.engines.engine import Quantizer
from appliance.errors import EngineNotReadyError, FatalError, ModelUnreadableError, VolumeError
from appliance.model import read_model
from appliance.model.files.quantized import (
    PART,
    Note,
    Quantization,
    QuantizedFile,
    is_unquantized,
    note_bytes,
    note_of,
    read_quantized,
)
from appliance.quantize.pauses import Pauses, run_to_end
from appliance.race import first_of
from appliance.supervisor import Supervisor
from appliance.system.detached import detached
from appliance.system.disk import Disk, put_file, sync_folder
from appliance.volume import refusal
from appliance.weights.cache.hub_layout import FILE_MODE, make_folders
from appliance.weights.cache.size import as_size
from appliance.weights.download.disk_space import SPARED_BYTES, refuse_full, size_of
from appliance.weights.download.locks import locked
from appliance.weights.download.meter import FetchProgress, Meter

LOOK_EVERY_S = 0.5
FULL_HINT = "remove models that are not served (`appliance models list`), or serve the original with --quantize off"
WAITS = "another container, which quantizes the same model"

OnProgress = Callable[[FetchProgress], None]


async def make(
    wanted: Quantization,
    models_dir: Path,
    quantizer: Callable[[Path], Quantizer],
    on_progress: OnProgress,
    *,
    build: str,
    pauses: Pauses | None = None,
) -> QuantizedFile:
    """Make the file, or wait until another container has made it.

    `quantizer` returns the run that writes a path. Cancelled or failed, nothing is left that is taken for a model.

    Raises VolumeError (50) if the volume is full or refuses, and the program's error (42 or 43) if it fails or writes a
    damaged file.
    """
    path = wanted.path_in(models_dir)
    predicted = wanted.model.file_bytes if wanted.model else None
    meter = Meter(predicted, on_progress)
    meter.begin(path.name, 0)
    try:
        make_folders(path.parent, below=models_dir)
        async with locked(path.parent / ".lock", lambda: meter.waits(WAITS)):
            if (made := read_quantized(path)) and made.note.refused is None:
                return made
            part = path.with_name(f".{path.name}{PART}")
            for left in path.parent.glob(f".*{PART}"):  # of a writer that was killed: it would hold the lock otherwise
                left.unlink()
            refuse_full(path.parent, predicted or 0, path.name, FULL_HINT)
            try:
                await _write(quantizer(part), part, meter, pauses)
                note = await detached(_checked, wanted, part, build)
                return await detached(_keep, part, path, note)
            finally:
                part.unlink(missing_ok=True)
    except OSError as error:
        raise refusal(models_dir, error) from error


def change_note(file: QuantizedFile, **values: object) -> QuantizedFile:
    """Store other values in the note of a file and return it with them. Raises VolumeError (50)."""
    changed = replace(file, note=replace(file.note, **values))  # type: ignore[arg-type]  # fields of Note, by name
    try:
        _put_note(changed.path, changed.note)
    except OSError as error:
        raise refusal(file.path.parent, error) from error
    return changed


def refuse(file: QuantizedFile, why: str) -> QuantizedFile:
    """Remove a file that must not be served; its note stays, so that it is not made again. Raises VolumeError (50)."""
    refused = change_note(file, refused=why)
    try:
        file.path.unlink(missing_ok=True)
    except OSError as error:
        raise refusal(file.path.parent, error) from error
    return refused


async def _write(quantizer: Quantizer, part: Path, meter: Meter, pauses: Pauses | None) -> None:
    supervisor = Supervisor()

    async def watch() -> None:
        before = 0
        while True:
            await asyncio.sleep(LOOK_EVERY_S)
            size = size_of(part)
            meter.received(size, max(0, size - before))
            before = size

    running, watching = await first_of(run_to_end(supervisor, quantizer.command, pauses), watch())
    if running.cancelled():
        watching.result()
    crash = running.result()
    meter.received(size_of(part), 0)
    if crash is None or crash.exit_code == 0:
        return
    if shutil.disk_usage(part.parent).free < SPARED_BYTES:
        message = f"volume became full: {part.parent}: {as_size(size_of(part))} of {part.name} were written"
        raise VolumeError(message, hint="free some space, or serve the original with --quantize off")
    raise quantizer.as_error(crash)


def _checked(wanted: Quantization, part: Path, build: str) -> Note:
    """Check what was written and return its note. Raises EngineNotReadyError (43) for a damaged file."""
    origin = wanted.origin
    try:
        model = read_model(part)
        problem = ""
        if (model.architecture, model.layers) != (origin.architecture, origin.layers):
            problem = f"it has {model.layers} layers of {model.architecture}"
        elif model.parameters != origin.parameters:
            problem = f"it has {model.parameters:,} parameters, and the original has {origin.parameters:,}"
        elif is_unquantized(model):
            problem = "nothing in it is quantized"
    except (ModelUnreadableError, FileNotFoundError) as error:
        problem = error.message if isinstance(error, FatalError) else "there is no file"
    if problem:
        message = f"quantizing {origin.title} to {wanted.kind} wrote a damaged file: {problem}"
        raise EngineNotReadyError(message, hint="check the disk; --quantize off serves the original")
    return Note(
        kind=wanted.kind or "",
        origin=str(origin.path),
        digest=wanted.digest,
        origin_bytes=origin.file_bytes,
        bytes=part.stat().st_size,
        build=build,
        made=datetime.now(UTC).isoformat(timespec="seconds"),
    )


def _keep(part: Path, path: Path, note: Note) -> QuantizedFile:
    """Give the file its name. The note comes first: a file without one is not used."""
    part.chmod(FILE_MODE)
    handle = os.open(part, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
    _put_note(path, note)
    part.replace(path)
    sync_folder(Disk(), path.parent)
    return QuantizedFile(path=path, note=note)


def _put_note(path: Path, note: Note) -> None:
    target = note_of(path)
    temporary = target.with_name(f".{target.name}.{os.getpid()}")
    temporary.unlink(missing_ok=True)  # of a process of the same number that was killed
    put_file(Disk(), target, note_bytes(note), temporary=temporary, modified_ns=_now_ns())


def _now_ns() -> int:
    return int(datetime.now(UTC).timestamp() * 1e9)
