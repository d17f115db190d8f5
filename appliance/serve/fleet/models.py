"""All models of one container behind one gateway: opened, planned beside each other, loaded on demand."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from appliance.console.progress import Phase
from appliance.console.report import Report
from appliance.fleet.fleet import Fleet
from appliance.race import first_of
from appliance.serve.engine.choose_plan import start_from_profile
from appliance.serve.fleet.arrivals import LOOK_EVERY_S, Arrivals
from appliance.serve.fleet.catalogue import Named, of_file, on_volume, slot_of
from appliance.serve.fleet.gate import SlotGate
from appliance.serve.fleet.member import SlotMember
from appliance.serve.fleet.memory import HOST, added, free_on
from appliance.serve.fleet.room import Room
from appliance.serve.fleet.volume_lock import VolumeLock
from appliance.serve.gateway.listen import backend_of
from appliance.serve.gateway.pending import ToQuantize
from appliance.serve.gateway.slot import ModelSlot, SlotState
from appliance.serve.open.open import open_slot
from appliance.settings import Settings

if TYPE_CHECKING:
    from appliance.gateway.clients.request_log import FinishedRequest
    from appliance.gateway.engine.roster import Roster
    from appliance.gateway.server import Gateway


class Models:
    """The slots of a container, the first one first, and the fleet that decides which of them are loaded."""

    def __init__(self, first: ModelSlot, settings: Settings, report: Report) -> None:
        self.slots = [first]
        self._settings = settings
        self._report = report
        self._named: dict[str, Named] = {}
        self._members: dict[str, SlotMember] = {}
        self._lock = VolumeLock(settings.data_dir / "cache" / "fleet", report)
        self._fleet = Fleet(report, lock=self._locked, on_change=self._changed)
        self._room = Room(report, held_but=self._fleet.holds, others=self._lock.of_others)
        self._arrivals = Arrivals(
            settings.models_dir,
            report,
            is_ready=lambda: self._was_first_loaded,
            scan=self._scan,
            welcome=self._welcome,
            silent_s=lambda: self._lock.silent_s,
        )
        self._roster: Roster | None = None
        self._paths: set[Path] = set()  # of models that have a slot

    @classmethod
    @asynccontextmanager
    async def opened(cls, settings: Settings, environment: Mapping[str, str], report: Report) -> AsyncIterator[Models]:
        """Open the first model, and those of the settings file. Raises as `open_slot`, and ConfigError (10) for models
        that have to stay loaded and do not fit together."""
        own, entry = settings.first_model()
        models = cls(open_slot(own, environment, report.for_slot()), settings, report)
        first = models.slots[0]
        first.fleet_name = first.name
        first.more_names = entry.aliases if entry else ()
        models._room.add(first)
        models._named[first.fleet_name] = Named(
            name=first.fleet_name, settings=own, is_pinned=bool(entry and entry.is_pinned)
        )
        for named in of_file(settings, first.contents):
            models._take(named)
        try:
            if settings.models:
                models._room.reserve(models.slots, models._pinned)
            yield models
        finally:
            models._lock.close()

    @property
    def is_strict(self) -> bool:
        """True if the settings file names the models: then no other name means any of them."""
        return bool(self._settings.models)

    @property
    def volume_problem(self) -> str:
        """A sentence if the volume does not answer; else empty."""
        return self._arrivals.problem

    @property
    def _measures_first(self) -> bool:
        return self.slots[0].settings.tune == "first"

    @property
    def _was_first_loaded(self) -> bool:
        return self._fleet.was_loaded(self.slots[0].fleet_name)

    @property
    def _pinned(self) -> frozenset[str]:
        return frozenset(name for name, named in self._named.items() if named.is_pinned)

    def begin(self) -> None:
        """Launch the first engine at once if its profile holds, unless another container loads at this moment."""
        first = self.slots[0].served
        if first is None:
            return
        if self._measures_first or self._lock.take_early():
            start_from_profile(first)

    async def serve(self, gateway: Gateway) -> None:
        """Serve all models. Never returns. Raises the FatalError of the first one."""
        self._roster = gateway.backends
        self._roster.on_look = self._arrivals.look
        gateway.requests.listen(self._note)
        for slot in self.slots:
            self._add_member(slot)
        for slot in self.slots:
            if slot is self.slots[0] or self._named[slot.fleet_name].is_pinned:
                self._fleet.want(slot.fleet_name)
        running = [asyncio.create_task(self._fleet.run(), name="fleet"), asyncio.create_task(self._arrivals.watch())]
        try:
            while True:
                serving = [member.serving for member in self._members.values() if member.serving]
                await first_of(*map(asyncio.shield, (*running, *serving)), timeout_s=LOOK_EVERY_S)
                for task in (*running, *serving):
                    if task.done() and not task.cancelled():
                        task.result()  # the fleet ends only by an error, and serving by a bug
        finally:
            for task in running:
                task.cancel()
            await asyncio.gather(*running, return_exceptions=True)
            await asyncio.gather(*(member.end() for member in self._members.values()), return_exceptions=True)

    def gate(self, slot: ModelSlot) -> SlotGate:
        return SlotGate(slot.fleet_name, self._fleet, self._settings.load_wait_s, is_first=slot is self.slots[0])

    def document(self) -> dict[str, Any]:
        found = self._fleet.document()
        slots = {slot.fleet_name: slot for slot in self.slots}
        models = [{**row, **self._slot_row(slots[row["name"]])} for row in found["models"]]
        others = {place: round(mib) for place, mib in self._lock.last_of_others().items()}
        free = found["free_mib"] or self._free_since_start()
        return {**found, "models": models, "free_mib": free, "other_containers_mib": others}

    def _slot_row(self, slot: ModelSlot) -> dict[str, Any]:
        """Return what the fleet does not know of a model: its name in the list of models, its weights and its state."""
        path = self._path_of(slot)
        state = SlotState.ASLEEP if slot.state is SlotState.ABSENT else slot.state
        return {"model": slot.name, "path": None if path is None else str(path), "state": str(state)}

    def _free_since_start(self) -> dict[str, int]:
        """Return what was free at the start less what loaded models hold, MiB by place; empty if that is unknown."""
        first = self.slots[0].served
        held = added(*self._fleet.holds().values())
        free = free_on(first.hardware) if first else {}
        return {place: max(0, round(mib - held.get(place, 0.0))) for place, mib in free.items()}

    async def load(self, name: str) -> None:
        self._fleet.want(name)

    async def unload(self, name: str) -> None:
        self._fleet.unload(name)

    def _take(self, named: Named) -> ModelSlot:
        slot = slot_of(named, self.slots[0], len(self.slots))
        slot.fleet_name = named.name
        slot.report.phase(Phase.ASLEEP)
        self._room.add(slot)
        self._named[slot.fleet_name] = named
        self.slots.append(slot)
        return slot

    def _add_member(self, slot: ModelSlot) -> None:
        backend = self._roster.named(slot.fleet_name) if self._roster else None
        if backend is None:
            message = f"the gateway does not know the model {slot.fleet_name}"
            raise RuntimeError(message)
        member = SlotMember(
            slot,
            backend,
            is_pinned=self._named[slot.fleet_name].is_pinned,
            on_lost=self._fleet.lost,
        )
        self._members[slot.fleet_name] = member
        self._fleet.add(member)

    def _note(self, row: FinishedRequest) -> None:
        member = next((each for each in self._members.values() if each.slot.name == row.model), None)
        if member is not None and row.tokens_in:
            member.cached_tokens = row.tokens_in + (row.tokens_out or 0)

    @asynccontextmanager
    async def _locked(self) -> AsyncIterator[None]:
        """Hold the volume's lock: at the start it was taken before the first engine was launched.

        A start that measures first takes minutes, in which another container may serve: it goes without.
        """
        if self._measures_first and not self._was_first_loaded:
            yield
            return
        async with self._lock.held():
            yield

    def _changed(self) -> None:
        """Tell each model whether it shares the machine, and other containers what is held here."""
        loaded, wanted = self._fleet.loaded, self._fleet.wanted
        pinned = self._pinned
        for name, member in self._members.items():
            served = member.slot.served
            if served is None:
                continue
            # Pinned models are always there: measuring beside them is measuring this machine as it serves.
            beside = tuple(other for other in loaded if other in pinned and other != name)
            served.sharing.note(is_shared=bool({*loaded, *wanted} - pinned - {name}), beside=beside)
        # Other containers leave room for what must be there; a prompt cache that may grow later is not claimed.
        mapped = sum(member.mapped_mib for name, member in self._members.items() if name in loaded)
        self._lock.write({HOST: mapped})

    def _scan(self) -> Callable[[], Iterable[Named]]:
        """Return a call that finds the models on the volume that have no slot yet."""
        first = self.slots[0]
        # Kept: a model whose files were replaced has no path until it is read anew.
        self._paths |= {path for slot in self.slots if (path := self._path_of(slot)) is not None}
        return partial(on_volume, self._settings, first.contents, first.environment, tuple(self._paths))

    def _path_of(self, slot: ModelSlot) -> Path | None:
        """Return the path of the model on the volume: of the original, if a quantized file serves in its place."""
        if slot.served:
            quantization = slot.served.start.quantization
            return (quantization.origin if quantization else slot.served.inputs.model).path
        if slot.pending and isinstance(slot.pending.request, ToQuantize):
            return slot.pending.request.located.path
        return self._named[slot.fleet_name].path

    def _welcome(self, named: Named) -> None:
        if self._roster is None:
            return
        # A file that comes takes no name, in whatever case, from a model that has it already.
        taken = frozenset(name.casefold() for backend in self._roster for name in backend.listed().names)
        taken |= frozenset(name.casefold() for name in self._named)
        free = [name for name in (named.name, *named.aliases) if name.casefold() not in taken]
        if not free:
            return
        settings = replace(named.settings, alias=free[0])
        slot = self._take(replace(named, name=free[0], settings=settings, aliases=tuple(free[1:])))
        slot.names_of_others = taken
        backend = backend_of(slot, fleet=self)
        self._roster.add(backend)
        slot.connect(backend.upstream)
        self._add_member(slot)
