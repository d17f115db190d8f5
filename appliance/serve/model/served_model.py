"""One served model as data: what it was started with, its engine, and what is known of it now. It owns no task."""

from __future__ import annotations

import asyncio
import math
import os
import time
from collections.abc import AsyncIterator, Callable, Mapping
from concurrent.futures import Future
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from appliance.command import Command
from appliance.console.report import Report
from appliance.engines.endings import POLICY
from appliance.engines.engine import Host, Inputs, Node, Space
from appliance.errors import FatalError, VolumeError
from appliance.model import plain_name
from appliance.plan import Allocated, Checks, KvCheck, MemoryPeak, Plan
from appliance.probe import Hardware
from appliance.probe.load.meter import EnergyUse, Meter
from appliance.profile import Key, Profile, ProfileStore
from appliance.profile.losses import Loss
from appliance.profile.marks import ProfileStatus
from appliance.profile.starting import Foreign
from appliance.serve.model.demand import PATIENCE_S, EngineDemand
from appliance.serve.model.engine_host import EngineHost
from appliance.serve.model.engine_log import EngineLogs
from appliance.serve.model.experts import expert_files
from appliance.serve.model.memory_kills import MemoryKills
from appliance.serve.model.mode_state import ModeState
from appliance.serve.model.prompts import prompt_folder
from appliance.serve.model.quantizing_state import QuantizingState
from appliance.serve.model.sharing import Sharing
from appliance.serve.model.tuning_state import TuningState
from appliance.serve.model.unkept import Unkept
from appliance.settings import Settings
from appliance.start.checks import usable_gpus
from appliance.start.inputs import StartInputs
from appliance.supervisor import Crash
from appliance.system.background_writer import BackgroundWriter
from appliance.system.detached import Glance, begin, detached
from appliance.values import dataclass
from appliance.volume import hold_files

if TYPE_CHECKING:
    from appliance.abilities import Abilities
    from appliance.gateway.engine.upstream_pool import UpstreamPool
    from appliance.probe.load.conditions import Conditions
    from appliance.probe.load.watch import Watch
    from appliance.tune.session import TuningSession

END_S = 0.5  # most time that a stop waits for each write to the volume
WATCHED_S = 1.0  # to see whether other programs work: less than half of it tells nothing


@dataclass(frozen=True, kw_only=True)
class ReadyEngine:
    """An engine that became ready. A restart or another engine makes another one."""

    plan: Plan
    pid: int | None
    socket_path: Path


class ServedModel:
    """Made inside the running loop and passed to each step. Nothing is global: a process may have several, told apart
    by `number`."""

    def __init__(
        self,
        start: StartInputs,
        environment: Mapping[str, str],
        store: ProfileStore,
        report: Report,
        *,
        number: int = 0,
    ) -> None:
        first, second, self.trial_socket = socket_paths(start.settings.runtime_dir, number)
        self.memory_kills = MemoryKills(start, store, report)
        self.start = start.with_memory_peaks(store).after_memory_kills(self.memory_kills.seen)
        if (most_mib := self.start.inputs.host_mib_max) < math.inf:
            report.warning("memory_kills", self.memory_kills.words(most_mib))
        self._spaces: dict[tuple[KvCheck, ...], Space] = {}  # each is built once for these inputs
        self.space = self._space_with(())
        self.environment = environment
        self.began_s = int(time.time())
        self.store = store
        self.report = report
        self.socket_path = first
        self.logs = EngineLogs(start.engine, report, restarts=start.settings.nodes == 1)
        self.host: EngineHost[Plan] = EngineHost(
            sockets=(first, second), command=self.command, supervise=self.logs.supervise
        )
        self.guard = start.engine.guard(start.install, self.inputs.image, self.hardware.cpu, report)
        self.patience_s = PATIENCE_S  # how long a request waits for an engine that works and sends nothing
        self.upstream: UpstreamPool | None = None  # of the gateway, once there is one
        self.beside: Callable[[Hardware], Hardware] = lambda hardware: hardware  # as it may be used beside others
        self.sharing = Sharing()  # nothing is measured while another model is loaded or wanted
        self.unkept = Unkept(store, report)
        self.tuning = TuningState()
        self.quantizing = QuantizingState()
        self.modes = ModeState(start.settings)
        self.profile: Profile | None = None  # the plan is from it
        self.foreign: Foreign | None = None  # the plan is from it, unless there is a profile
        self.measured_here: Profile | None = None  # the last one that this process measured
        self.session: TuningSession | None = None  # the last one
        self.ready: ReadyEngine | None = None  # the engine that became ready last
        self.ready_changed = asyncio.Event()
        self.allocated: Allocated | None = None  # by the engine that serves
        self.gpu_memory: MemoryPeak | None = None  # that engine was seen to hold; None: not looked at, or unknown
        self.slow_beside: str | None = None  # what slows that engine down; None: nothing does
        self.gpus_at_first = usable_gpus(self.inputs.image, self.hardware)
        self.abilities: Abilities | None = None  # as far as they are checked; None: not looked at yet
        self.is_loss_measured = False  # True if the loss by fewer experts was measured, or could not be, in this start
        self.losses: tuple[Loss, ...] = ()  # that were seen while it serves
        gpus = () if self.settings.devices == "none" else self.gpus_at_first
        self.meter = Meter(self.hardware, environment, gpus)
        self.energy_use = EnergyUse()
        self.prompts = prompt_folder(self.start, report)
        self.experts = expert_files(self.start, report)
        self._checks = BackgroundWriter("checks", self._write_checks, every_s=0.0, again_s=0.0)
        self._standing: tuple[Profile, Glance[ProfileStatus]] | None = None
        self._releasing: Future[object] | None = None  # of the lock of measuring
        self.held = hold_files(files_of(self.inputs))  # `models rm` leaves them alone

    def report_death(self, crash: Crash) -> FatalError:
        """Log that the engine died while it served, and return the error that it would end with."""
        error = self.start.engine.as_error(crash, served=True)
        # The engine is started again, not the container.
        hint = "; ".join(("the appliance starts it again", (error.hint or "").removesuffix(f"; {POLICY}")))
        facts = {"exit_code": error.exit_code, "hint": hint, "log": list(crash.log[-20:])}
        self.report.error("engine_died", f"engine {crash.describe()}", **facts)
        return error

    @property
    def settings(self) -> Settings:
        return self.start.settings

    @property
    def inputs(self) -> Inputs:
        return self.start.inputs

    @property
    def hardware(self) -> Hardware:
        return self.start.inputs.hardware

    @property
    def key(self) -> Key:
        return self.start.key

    @property
    def name(self) -> str:
        """The name that clients use."""
        return self.settings.alias or plain_name(self.inputs.model.path)

    @property
    def aliases(self) -> tuple[str, ...]:
        """Other names that clients may use."""
        return (plain_name(self.inputs.model.path), *self.start.names)

    @property
    def space_of_profile(self) -> Space:
        """The plans with the KV cache types that the profile has found harmless."""
        return self._space_with(self.profile.kv_checks if self.profile else ())

    def _space_with(self, kv_checks: tuple[KvCheck, ...]) -> Space:
        if kv_checks not in self._spaces:
            self._spaces[kv_checks] = self.start.space(kv_checks)
        return self._spaces[kv_checks]

    def _begin_with(self, start: StartInputs) -> None:
        self.start, self._spaces = start, {}
        self.space = self._space_with(())

    def set_start(self, start: StartInputs) -> None:
        """Plan with other kernels, with other memory or for another mode from here on.

        Other kernels have a profile of their own.
        """
        has_other_key = start.key != self.start.key
        self._begin_with(start)
        if has_other_key:
            self.profile = self.store.load(start.key)

    def join(self, node: Node, hosts: tuple[Host, ...] = ()) -> None:
        """Plan as one of several hosts, for one start of all of them; plans use the GPUs of `hosts` as well."""
        install, inputs = replace(self.start.install, node=node), replace(self.inputs, hosts=hosts)
        self._begin_with(replace(self.start, install=install, inputs=inputs))

    def keep_checks(self, checks: Checks) -> None:
        """Keep the checks in the profile. They are written soon; in memory only, with a warning, if the volume cannot
        take them."""
        before = self.profile
        if before is None:
            return
        self.profile = replace(before, checks=checks)
        if self.measured_here is before:
            self.measured_here = self.profile
        self.unkept.exchange(before, self.profile)
        self._checks.wake()

    def _write_checks(self, before: str) -> str:
        if self.profile is None:
            return before
        try:
            self.store.save_checks(self.profile)
        except VolumeError as error:  # serving goes on, and the next start checks again
            if not before:
                self.report.warning("checks_not_kept", error.message)
            return error.message
        return before  # told once

    def finish_writing(self) -> None:
        """Write what is left, when everything stops. Waits for the volume, for END_S each."""
        self._checks.close(END_S)
        self.unkept.close(END_S)

    @asynccontextmanager
    async def measuring(self) -> AsyncIterator[bool]:
        """Yield True if this process may measure for the key; see `ProfileStore.tuning`. Raises VolumeError."""
        if self._releasing is not None:  # our own lock of before would count as another process's
            with suppress(VolumeError):
                await asyncio.wrap_future(self._releasing)
        lock = self.store.tuning(self.key)
        is_ours = await detached(lock.__enter__)
        try:
            yield is_ours
        finally:
            self._releasing = begin(lambda: lock.__exit__(None, None, None))
            with suppress(VolumeError, TimeoutError):  # a volume that hangs: the call ends when it answers
                async with asyncio.timeout(END_S):
                    await asyncio.wrap_future(self._releasing)

    async def find_profile(self) -> Profile | None:
        """Return the profile of the key on the volume, with the checks of the one that serves if that is newer or not
        written yet. Raises VolumeError."""
        found, mine = await detached(self.store.load, self.key), self.profile
        if mine is None or mine.key != self.key:
            return found
        if found is None:
            return mine if self.unkept.holds(mine) else None
        return replace(found, checks=mine.checks) if found.created == mine.created else found

    def standing(self, profile: Profile) -> ProfileStatus:
        """Return the marks of the profile on the volume now; while the volume hangs, those that were seen last. Raises
        VolumeError."""
        return self._glance_at(profile)()

    def standing_for_use(self, profile: Profile) -> ProfileStatus:
        """Return the marks as `standing`; those that were seen last if the volume cannot be read: no reason to end
        serving, and whoever writes tells it."""
        glance = self._glance_at(profile)
        try:
            return glance()
        except VolumeError:
            return glance.last

    async def renew_standing(self, profile: Profile | None) -> None:
        """Look at the marks of the profile and wait for them, for HANGS_S at most: the next `standing` has them."""
        if profile is not None:
            await self._glance_at(profile).renew(self.store.folder)

    def _glance_at(self, profile: Profile) -> Glance[ProfileStatus]:
        if self._standing is None or self._standing[0] is not profile:
            unknown = ProfileStatus(stale=None, provisional=profile.disturbance, is_pinned=False)
            before = self._standing
            if before is not None and (before[0].key, before[0].created) == (profile.key, profile.created):
                unknown = before[1].last  # only its checks went on
            self._standing = profile, Glance(lambda: self.store.status(profile), unknown)
        return self._standing[1]

    def watch(self, *, with_gpus: bool = True) -> Watch:
        """Return a watch for the work of other programs on the CPUs, and on the GPUs that this image can use."""
        from appliance.probe.load.watch import Watch  # here: a start from a profile that holds never needs it

        gpus = usable_gpus(self.inputs.image, self.hardware) if with_gpus else ()
        return Watch(self.hardware, self.environment, gpus=gpus)

    async def what_else_works(self) -> str:
        """Look at the machine while our engine rests; returns what other programs do in words, empty if nothing."""
        return (await self._look()).disturbance or ""

    async def what_crowds(self) -> str:
        """Look as `what_else_works`, and count only programs that take a large part of the machine."""
        return (await self._look()).crowd or ""

    async def until_crowded(self) -> str:
        """Wait until other programs take a large part of the CPUs; returns the words for it."""
        return await self.watch(with_gpus=False).until_crowded()

    async def _look(self) -> Conditions:
        async with self.watch() as watching:
            await asyncio.sleep(WATCHED_S)
        return watching.conditions

    def set_ready(self, ready: ReadyEngine) -> None:
        """Note an engine that became ready; what was seen of an earlier one is forgotten."""
        self.ready, self.gpu_memory = ready, None
        self.ready_changed.set()

    def command(self, plan: Plan, socket_path: Path) -> Command:
        """Return how an engine with this plan is started, with the requests that its supervisor counts."""
        engine, install = self.start.engine, self.start.install
        command = engine.command(plan, install, socket_path)
        if self.prompts is not None:
            command = engine.keep_prompts(command, install, self.prompts)
        if self.experts is not None:
            command = engine.keep_experts(command, install, self.experts)
        return replace(command, demand=EngineDemand(self, plan, socket_path))


def files_of(inputs: Inputs) -> tuple[Path, ...]:
    """Return all files that the engine may be given: weights, projector, adapters, draft model."""
    model, draft = inputs.model, inputs.draft
    projector = (model.projector.path,) if model.projector else ()
    adapters = (adapter.path for adapter in model.adapters)
    return (*model.parts, *projector, *adapters, *(draft.parts if draft else ()))


def socket_paths(runtime_dir: Path, number: int) -> tuple[Path, Path, Path]:
    """Return two sockets that serving engines use by turns, and one for the engine that is measured."""
    # Short, since a socket's path has 107 bytes at most.
    name = f"appliance-{os.getpid()}{f'-{number}' if number else ''}"
    first, second, third = (runtime_dir / f"{name}{end}.sock" for end in ("", "b", "m"))
    return first, second, third
