"""Files about experts beside llama-server (images/patches/llama-moe-split.patch): rates that it decides by, uses that
it learned, and routes that it records."""

from __future__ import annotations

import hashlib
import json
import secrets
import time
from dataclasses import asdict, replace
from pathlib import Path

from appliance.command import Command
from appliance.engines.engine import ExpertFiles
from appliance.engines.llama.planning.arguments.launch import launch_of
from appliance.engines.llama.planning.experts.asked import SLOTS_FLAG, TRACE_FLAG
from appliance.errors import VolumeError
from appliance.image_facts import EngineFacts
from appliance.moe.cost import Rates
from appliance.plan import Plan
from appliance.system.disk import Disk, put_file, read_file
from appliance.values import dataclass

METRICS_FLAG = "--metrics"


@dataclass(frozen=True, kw_only=True)
class RatesFile:
    """See `appliance.command.Upkeep`: the file is written before each start, whole or not at all."""

    path: Path
    rates: Rates

    def begin(self) -> None:
        """Write the file. Raises VolumeError."""
        temporary = self.path.with_name(f".{self.path.name}.{secrets.token_hex(8)}.tmp")
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            data = json.dumps(asdict(self.rates)).encode()
            if self._has(data):
                return  # a restart must not fail because the volume became full
            put_file(Disk(), self.path, data, temporary=temporary, modified_ns=time.time_ns())
        except OSError as error:
            message = f"rates of this machine cannot be written: {self.path}: {error.strerror or error}"
            hint = "make room on the volume, or use --moe-slots off"
            raise VolumeError(message, hint=hint) from error

    def _has(self, data: bytes) -> bool:
        try:
            return read_file(self.path, len(data) + 1) == data
        except FileNotFoundError:
            return False

    def ready(self) -> None: ...

    def end(self) -> None: ...


def rates_path(plan: Plan, cache_dir: Path) -> Path:
    """Return the file for this model: rates depend on the size of its layers too."""
    return cache_dir / "experts" / f"{hashlib.sha256(plan.model_path.encode()).hexdigest()[:16]}.json"


def rates_upkeep(plan: Plan, cache_dir: Path) -> RatesFile | None:
    """Return what writes the rates before a start; None for a plan without slots."""
    slots = launch_of(plan).slots
    return RatesFile(path=rates_path(plan, cache_dir), rates=slots.rates) if slots else None


def keep_experts(command: Command, facts: EngineFacts, files: ExpertFiles) -> Command:
    """Return the command of an engine that serves, with the files of uses and routes that suit it."""
    has_slots = SLOTS_FLAG in command.argv
    found = (
        *(("--moe-uses", str(files.uses)) if has_slots else ()),
        *((TRACE_FLAG, str(files.trace)) if files.trace else ()),
        *((METRICS_FLAG,) if has_slots and METRICS_FLAG in facts.flags and METRICS_FLAG not in command.argv else ()),
    )
    return replace(command, argv=(*command.argv, *found))
