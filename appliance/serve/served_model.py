"""All that belongs to one model that is served."""

from __future__ import annotations

import asyncio
import math
import os
import time
from collections.abc import Mapping
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING

from appliance.command import Command
from appliance.console.report import Report
from appliance.engines.engine import Host, Inputs, Node, Space
from appliance.errors import ModelAwayError
from appliance.model import plain_name
from appliance.plan import Allocated, KvCheck, Plan
from appliance.probe import Hardware
from appliance.profile import Key, Profile, ProfileStore
from appliance.serve.background import BackgroundTasks
from appliance.serve.checks import usable_gpus
from appliance.serve.demand import PATIENCE_S, EngineDemand
from appliance.serve.engine_host import EngineHost
from appliance.serve.engine_log import EngineLogs
from appliance.serve.gpus import check_gpus
from appliance.serve.inputs import (
    StartInputs,
    load_facts,
    look_at_machine,
    read_contents,
    read_inputs,
    with_model,
)
from appliance.serve.memory_kills import MemoryKills
from appliance.serve.memory_watch import MemoryWatch
from appliance.serve.other_work import OtherWork
from appliance.serve.unkept import Unkept
from appliance.serve.which import FromRecipe, Located, ollamas_own
from appliance.settings import Settings
from appliance.volume import hold_files, open_volume

if TYPE_CHECKING:
    from appliance.gateway.engine.upstream_pool import UpstreamPool
    from appliance.probe.load.conditions import Conditions
    from appliance.probe.load.watch import Watch
    from appliance.serve.awaited import AwaitedModel
    from appliance.tune.session import TuningSession

WATCHED_S = 1.0  # to see whether something else is at work: less than half of it tells nothing


class ServedModel:
    """Made inside the running loop and passed to each verb of a start: nothing of it is global, and there may be
    several. `number` tells those of one process apart."""

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
        self._spaces: dict[tuple[KvCheck, ...], Space] = {}  # of all plans, each built once for these inputs
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
        self.background = BackgroundTasks(self)
        self.memory_watch = MemoryWatch(self)
        self.patience_s = PATIENCE_S  # that a request has with an engine that works, and gives nothing
        self.upstream: UpstreamPool | None = None  # the gateway's, once there is one
        self.unkept = Unkept(store, report)
        self.other_work = OtherWork(self)
        self.profile: Profile | None = None  # that the plan is from
        self.measured_here: Profile | None = None  # the last one that this process measured
        self.session: TuningSession | None = None  # the last one
        self.allocated: Allocated | None = None  # by the engine that serves
        self.held = hold_files(files_of(self.inputs))  # `models rm` leaves them alone

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
        """As clients call it."""
        return self.settings.alias or plain_name(self.inputs.model.path)

    @property
    def aliases(self) -> tuple[str, ...]:
        """Other names that mean it."""
        return (plain_name(self.inputs.model.path), *self.start.names)

    @property
    def space_of_profile(self) -> Space:
        """With the KV cache types that the profile has found harmless."""
        return self._space_with(self.profile.kv_checks if self.profile else ())

    def _space_with(self, kv_checks: tuple[KvCheck, ...]) -> Space:
        if kv_checks not in self._spaces:
            self._spaces[kv_checks] = self.start.space(kv_checks)
        return self._spaces[kv_checks]

    def _begin_with(self, start: StartInputs) -> None:
        self.start, self._spaces = start, {}
        self.space = self._space_with(())

    def set_start(self, start: StartInputs) -> None:
        """With other kernels, or for less memory; where others serve, another profile counts."""
        is_of_others = start.key != self.start.key
        self._begin_with(start)
        if is_of_others:
            self.profile = self.store.load(start.key)

    def join(self, node: Node, hosts: tuple[Host, ...] = ()) -> None:
        """As one of several hosts, for one start of all of them; plans are made for `hosts` as well."""
        install, inputs = replace(self.start.install, node=node), replace(self.inputs, hosts=hosts)
        self._begin_with(replace(self.start, install=install, inputs=inputs))

    def watch(self, *, with_gpus: bool = True) -> Watch:
        """Sees what else works on this machine; of the GPUs, on those that this image can use."""
        from appliance.probe.load.watch import Watch  # here: a start from a profile that holds never needs it

        gpus = usable_gpus(self.inputs.image, self.hardware) if with_gpus else ()
        return Watch(self.hardware, self.environment, gpus=gpus)

    async def what_else_works(self) -> str:
        """On this machine now, while our engine rests, in words; empty where nothing does."""
        return (await self._look()).disturbance or ""

    async def what_crowds(self) -> str:
        """The same of others that take a good part of the machine: measuring would be in their way."""
        return (await self._look()).crowd or ""

    async def until_crowded(self) -> str:
        """Returns when others take a good part of the CPUs, with the words for it."""
        return await self.watch(with_gpus=False).until_crowded()

    async def _look(self) -> Conditions:
        async with self.watch() as watching:
            await asyncio.sleep(WATCHED_S)
        return watching.conditions

    def command(self, plan: Plan, socket_path: Path) -> Command:
        command = self.start.engine.command(plan, self.start.install, socket_path)
        return replace(command, demand=EngineDemand(self, plan, socket_path))


def files_of(inputs: Inputs) -> tuple[Path, ...]:
    """All that the engine may be given: weights, the projector, adapters, the draft model."""
    model, draft = inputs.model, inputs.draft
    projector = (model.projector.path,) if model.projector else ()
    adapters = (adapter.path for adapter in model.adapters)
    return (*model.parts, *projector, *adapters, *(draft.parts if draft else ()))


def socket_paths(runtime_dir: Path, number: int) -> tuple[Path, Path, Path]:
    """Two for the engine that serves, which take turns, and one for the engine that is measured."""
    # Short: 107 bytes is all that a socket has.
    name = f"appliance-{os.getpid()}{f'-{number}' if number else ''}"
    first, second, third = (runtime_dir / f"{name}{end}.sock" for end in ("", "b", "m"))
    return first, second, third


def open_model(settings: Settings, environment: Mapping[str, str], report: Report, *, number: int = 0) -> ServedModel:
    """Looks at everything, and refuses what cannot work; also a model that is not here."""
    image, _ = load_facts(settings)
    open_volume(settings.data_dir, image.build_id)
    return _checked(read_inputs(settings, environment), environment, report, number)


def open_or_await(
    settings: Settings, environment: Mapping[str, str], report: Report, *, number: int = 0
) -> ServedModel | AwaitedModel:
    """Looks at everything, and refuses what cannot work. Where the model is not here, all but that."""
    contents = read_contents(settings)
    open_volume(settings.data_dir, contents.image.build_id)
    machine = cache(partial(look_at_machine, contents, environment))
    found = contents.which_model(environment)
    if words := ollamas_own(settings, contents.recipe):
        report.info("model_name", f"{settings.model} is of this image's recipe; {words}")
    if isinstance(found, Located):
        return _checked(with_model(contents, found, machine), environment, report, number)
    # here: a start whose model is named and here never needs them
    from appliance.serve.announce import announce
    from appliance.serve.candidates import Chosen, locate_chosen, save_choice

    try:
        located, made = locate_chosen(contents, found, environment, machine)
    except ModelAwayError:
        from appliance.serve.awaited import AwaitedModel  # here: a start whose model is here never needs it

        return AwaitedModel(contents, machine(), found, environment, report, number=number)
    announce(made, report)
    served = _checked(with_model(contents, located, machine), environment, report, number)
    if isinstance(found, FromRecipe) and isinstance(made, Chosen):
        save_choice(contents, found, machine(), made, located)
    return served


def _checked(start: StartInputs, environment: Mapping[str, str], report: Report, number: int) -> ServedModel:
    check_gpus(start, report)
    return serve_inputs(start, environment, report, number=number)


def serve_inputs(start: StartInputs, environment: Mapping[str, str], report: Report, *, number: int = 0) -> ServedModel:
    """Of a machine whose GPUs were checked."""
    store = ProfileStore(start.settings.profiles_dir, lambda words: report.warning("profile_set_aside", words))
    return ServedModel(start, environment, store, report, number=number)
