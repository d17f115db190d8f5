"""A slot as a member of the fleet: weighed, loaded and unloaded."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from appliance.errors import FatalError, ModelDoesNotFitError
from appliance.fleet.admit import Places, Variant
from appliance.fleet.member import Weighed
from appliance.plan import Plan
from appliance.probe import Hardware
from appliance.profile import Profile, best_of
from appliance.serve.fleet.memory import added, free_on, held_by, less, mapped_mib, needed_by
from appliance.serve.gateway.slot import ModelSlot
from appliance.serve.gateway.stop import put_to_sleep
from appliance.serve.life.bring_up import load, prepare, tasks_of
from appliance.serve.life.supervise import serve_until_failure
from appliance.serve.model.served_model import ServedModel
from appliance.system.detached import detached

if TYPE_CHECKING:
    from appliance.gateway.engine.backend import Backend

# Before a model was ever loaded here: a disk of this speed, and the start of an engine.
READ_MIB_S = 1000.0
START_S = 1.0
SHARE_ON_DISK = 0.02  # of its prefill: what reading a prompt from disk takes (benchmarks.cache_restart)
ERROR = 0.03  # of a plan's memory, if this model was never loaded here: 248 loads were predicted within 3 %


class SlotMember:
    """See `appliance.fleet.member.Member`. `on_lost` is told when the engine of the loaded model was given up."""

    def __init__(
        self,
        slot: ModelSlot,
        backend: Backend,
        *,
        is_pinned: bool,
        on_lost: Callable[[str, FatalError], None],
    ) -> None:
        self.slot = slot
        self.name = slot.fleet_name
        self.is_pinned = is_pinned
        self.cached_tokens = 0  # of the last request: about what its cache holds
        self._backend = backend
        self._on_lost = on_lost
        self._serving: asyncio.Task[None] | None = None
        self._load_s = 0.0
        self._files = _files_of(slot.served)

    @property
    def keep_alive_s(self) -> float:
        return self.slot.settings.keep_alive_s

    @property
    def holds(self) -> dict[str, float]:
        served = self.slot.served
        plan = served.host.plan if served else None
        if served is None or plan is None:
            return {}
        allocated_mib = served.allocated.total if served.allocated else None
        return held_by(plan, allocated_mib=allocated_mib, peak=served.gpu_memory)

    @property
    def mapped_mib(self) -> float:
        """Host memory of its weights that are mapped from their file."""
        plan = self.slot.plan
        return mapped_mib(plan) if plan else 0.0

    @property
    def reload_s(self) -> float:
        served = self.slot.served
        if self._load_s:
            return self._load_s
        size_bytes = served.inputs.model.file_bytes if served else self.slot.size_bytes or 0
        return START_S + size_bytes / 2**20 / READ_MIB_S

    @property
    def cache_s(self) -> float:
        plan, served = self.slot.plan, self.slot.served
        speed = plan.speed if plan else None
        if not speed or not speed.prefill_tokens_per_s:
            return 0.0
        share = SHARE_ON_DISK if served and served.prompts else 1.0
        return share * self.cached_tokens / speed.prefill_tokens_per_s

    @property
    def progress(self) -> str:
        return f"{self.name}: {self.slot.report.progress.sentence()}"

    async def prepare(self) -> None:
        served = self.slot.served
        # A plan, a profile and figures of memory are of the files that were read, not of what lies there now.
        if served and not served.host.is_launched and await detached(_files_of, served) != self._files:
            self.slot.report.info("model_changed", f"{self.name}: its files were replaced: it is read anew")
            self.slot.forget()
        elif served and not served.host.is_launched and served.quantizing.file:
            self.slot.report.info("model_changed", f"{self.name}: its quantized file was made and is loaded instead")
            self.slot.forget()
        self._files = await detached(_files_of, await prepare(self.slot))

    async def weigh(self, returnable: Mapping[str, Places]) -> Weighed:
        return await detached(self._weigh, _served(self.slot), returnable)

    def _weigh(self, served: ServedModel, returnable: Mapping[str, Places]) -> Weighed:
        """Plan for the memory that is free now, and for what would be free without the models that may go."""
        now = self.slot.look().hardware
        most = less(now, {place: -mib for place, mib in added(*returnable.values()).items()})
        profile = served.store.load(served.key)
        best = self._plan(served, profile, most)
        plans = {best.key: best}
        try:
            beside = self._plan(served, profile, now)
            plans.setdefault(beside.key, beside)
        except ModelDoesNotFitError:
            pass  # only without others
        error = abs(profile.prediction_error or ERROR) if profile else ERROR
        variants = [
            Variant(key=plan.key, needs=needed_by(plan), speed=_speed(plan), error=error) for plan in plans.values()
        ]
        return Weighed(variants=tuple(variants), free=free_on(now))

    @staticmethod
    def _plan(served: ServedModel, profile: Profile | None, hardware: Hardware) -> Plan:
        space = served.start.on(hardware).space(profile.kv_checks if profile else ())
        return best_of(profile, served.settings.mode, space)

    async def load(self) -> None:
        served = await load(self.slot)
        self._load_s = served.host.load_s
        self._serving = asyncio.create_task(self._serve(served), name=f"serving {self.name}")

    async def _serve(self, served: ServedModel) -> None:
        try:
            await serve_until_failure(served, tasks_of(served, self._backend))
        except FatalError as error:
            # Ended by `end` meanwhile, nothing is told: it would be told of an engine that was loaded since.
            await put_to_sleep(self.slot)
            self._serving = None
            self._on_lost(self.name, error)

    async def unload(self) -> None:
        await self.end()
        await put_to_sleep(self.slot)

    async def end(self) -> None:
        """End the task that serves, when everything stops; the engine is stopped by others."""
        serving, self._serving = self._serving, None
        if serving is not None:
            serving.cancel()
            await asyncio.gather(serving, return_exceptions=True)

    @property
    def serving(self) -> asyncio.Task[None] | None:
        """The task that serves; it ends only by a bug. None while the model is not loaded."""
        return self._serving


def _files_of(served: ServedModel | None) -> tuple[tuple[int, int, int] | None, ...]:
    """Return what tells the files of a model from others in their place: inode, bytes and time. None is a file that is
    gone."""
    return tuple(_file(path) for path in served.inputs.model.parts) if served else ()


def _file(path: Path) -> tuple[int, int, int] | None:
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_ino, found.st_size, found.st_mtime_ns


def _served(slot: ModelSlot) -> ServedModel:
    if slot.served is None:
        message = f"the model of this slot was not found yet: {slot.name}"
        raise RuntimeError(message)
    return slot.served


def _speed(plan: Plan) -> float:
    return plan.speed.decode_tokens_per_s if plan.speed else 1.0
