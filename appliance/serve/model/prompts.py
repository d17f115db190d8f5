"""The folder in which a serving engine keeps its prompts, so that a conversation goes on after a restart."""

from __future__ import annotations

import os
from pathlib import Path

from appliance.console.report import Report
from appliance.engines.engine import PromptFolder
from appliance.model import digest
from appliance.start.inputs import StartInputs
from appliance.system.saved_prompts import held_bytes, read_or_make_secret

FREE_SHARE = 0.25  # of the room that is free: the volume is for models
LEAST_MIB = 64  # with less room nothing is kept
_MIB = 2**20


def prompt_folder(start: StartInputs, report: Report) -> PromptFolder | None:
    """Return the folder; None if the engine or the settings keep nothing, or, with a warning, if the volume cannot."""
    settings, engine = start.settings, start.engine
    if not settings.cache_disk_mib or "cache_disk_mib" not in engine.settings:
        return None
    path = settings.prompts_dir
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.mkdir(mode=0o770, exist_ok=True)  # another user of group 0 must be able to remove files, not to read them
        secret = read_or_make_secret(settings.prompts_secret_path)
        limit_mib = min(settings.cache_disk_mib, _room_mib(path))
    except OSError as error:
        words = (error.strerror or str(error)).lower()
        report.warning("prompts_not_kept", f"prompts are not kept over a restart: {path}: {words}")
        return None
    if limit_mib < LEAST_MIB:
        report.warning("prompts_not_kept", f"prompts are not kept over a restart: {path}: the volume is nearly full")
        return None
    return PromptFolder(
        path=path,
        limit_mib=limit_mib,
        secret=secret,
        model=start.key.parts["model"],
        attached=_attached(start),
    )


def _room_mib(path: Path) -> int:
    """Return what saved prompts may take: a share of the free room and of the room that they have now."""
    volume = os.statvfs(path)
    return int((volume.f_bavail * volume.f_frsize + held_bytes(path)) * FREE_SHARE / _MIB)


def _attached(start: StartInputs) -> tuple[str, ...]:
    model, draft = start.inputs.model, start.key.parts.get("draft")
    files = [*((model.projector.path,) if model.projector else ()), *(adapter.path for adapter in model.adapters)]
    return (*(digest([path], 0).key for path in files), *((draft,) if draft else ()))
