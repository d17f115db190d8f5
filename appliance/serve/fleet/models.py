"""All models of one container behind one gateway: opened, planned beside each other, loaded on demand."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from appliance.console.progress import Phase
from appliance.console.report import Report
from appliance.errors import ConfigError, FatalError, ModelDoesNotFitError
from appliance.fleet.fleet import Fleet, FleetEndedError, LoadWaitError
from appliance.plan.plan import SMALLEST_CONTEXT, SPEED_KEPT
from appliance.probe import Hardware
from appliance.race import first_of
from appliance.serve.engine.choose_plan import start_from_profile
from appliance.serve.fleet.catalogue import Named, of_file, on_volume, slot_of
from appliance.serve.fleet.member import SlotMember
from appliance.serve.fleet.memory import HOST, added, beside_containers, free_on, less, needed_by
from appliance.serve.fleet.volume_lock import VolumeLock
from appliance.serve.gateway.listen import backend_of
from appliance.serve.gateway.pending import ToQuantize
from appliance.serve.gateway.slot import ModelSlot, SlotState
from appliance.serve.model.served_model import ServedModel
from appliance.serve.open.open import find_model, open_slot
from appliance.settings import Settings

if TYPE_CHECKING:
    from appliance.fleet.admit import Places
    from appliance.gateway.clients.request_log import FinishedRequest
    from appliance.gateway.engine.gate import Tell
    from appliance.gateway.engine.roster import Roster
    from appliance.gateway.server import Gateway

LOOK_EVERY_S = 5.0  # whether files have come to the volume
FRESH_S = 2.0


class Models:
    """The slots of a container, the first one first, and the fleet that decides which of them are loaded."""

    def __init__(self, first: ModelSlot, settings: Settings, report: Report) -> None:
        self.slots = [first]
        self._settings = settings
        self._report = report
        self._named: dict[str, Named] = {}
        self._members: dict[str, SlotMember] = {}
        self._reserved: dict[str, Places] = {}  # kept free for models that are not loaded yet, MiB by name
        self._lock = VolumeLock(settings.data_dir / "cache" / "fleet", report)
        self._lock_of_start: int | None = None
        self._fleet = Fleet(report, lock=self._locked, on_change=self._changed)
        self._roster: Roster | None = None
        self._looking = asyncio.Lock()
        self._looked_at = float("-inf")
        self._seen: tuple[int, ...] = ()
        self._told = ""  # why the last look at the volume failed

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
        first.set_beside(partial(models._beside, first.fleet_name))
        models._named[first.fleet_name] = Named(
            name=first.fleet_name, settings=own, is_pinned=bool(entry and entry.is_pinned)
        )
        for named in of_file(settings, first.contents):
            models._take(named)
        try:
            if settings.models:
                models._reserve()
            yield models
        finally:
            models._lock.close()

    @property
    def is_strict(self) -> bool:
        """True if the settings file names the models: then no other name means any of them."""
        return bool(self._settings.models)

    @property
    def _measures_first(self) -> bool:
        return self.slots[0].settings.tune == "first"

    def begin(self) -> None:
        """Launch the first engine at once if its profile holds, unless another container loads at this moment."""
        first = self.slots[0].served
        if first is None:
            return
        if not self._measures_first:
            self._lock_of_start = self._lock.try_now()
        if self._measures_first or self._lock_of_start is not None:
            start_from_profile(first)

    async def serve(self, gateway: Gateway) -> None:
        """Serve all models. Never returns. Raises the FatalError of the first one."""
        self._roster = gateway.backends
        self._roster.on_look = self._look
        gateway.requests.listen(self._note)
        for slot in self.slots:
            self._add_member(slot)
        for slot in self.slots:
            if slot is self.slots[0] or self._named[slot.fleet_name].is_pinned:
                self._fleet.want(slot.fleet_name)
        running = [asyncio.create_task(self._fleet.run(), name="fleet"), asyncio.create_task(self._watch_volume())]
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
        others = {place: round(mib) for place, mib in self._lock.of_others().items()}
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
        slot.set_beside(partial(self._beside, slot.fleet_name))
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

    # What is free for a model

    def _beside(self, name: str, hardware: Hardware) -> Hardware:
        """Return the hardware as this model may use it beside those that are loaded."""
        held, others = self._fleet.holds(but=name), self._lock.of_others()
        if not held and not others and not (self._reserved.keys() - {name}):
            return hardware
        hardware = beside_containers(hardware, others)
        unseen = {HOST: sum(self._unseen_mib(each, places) for each, places in held.items())}
        kept = (mib for each, mib in self._reserved.items() if each != name and each not in held)
        return less(hardware, added(unseen, *kept))

    def _unseen_mib(self, name: str, places: Places) -> float:
        """Return the host memory that a loaded model may hold, and that counts as free: mapped files, and caches that
        grow later."""
        # here: a start with one model never needs it
        from appliance.probe.load.processes import private_mib

        member = self._members.get(name)
        served = member.slot.served if member else None
        supervisor = served.host.supervisor if served else None
        seen_mib = private_mib((supervisor.pid,)) if supervisor and supervisor.pid else 0.0
        return max(0.0, places.get(HOST, 0.0) - seen_mib)

    def _reserve(self) -> None:
        """Keep memory free for the models of the settings file, so that they can be loaded beside the first one.

        For pinned ones always. For the others if the first one keeps most of its context and speed.
        """
        first = self.slots[0]
        if first.served is None:  # it has to be fetched first
            return
        hardware = first.look().hardware
        estimates: dict[str, Places] = {}
        for slot in self.slots[1:]:
            try:
                found = find_model(slot)
                if isinstance(found, ServedModel):
                    slot.take(found)
                    estimates[slot.fleet_name] = _estimate(found, hardware)
            except FatalError as error:
                hint = f"; {error.hint}" if error.hint else ""
                words = f"{slot.fleet_name} cannot be served as it is: {error.message}{hint}"
                self._report.warning("model_unusable", words)
        pinned = {name: mib for name, mib in estimates.items() if self._named[name].is_pinned}
        self._refuse_pinned(hardware, first.served, pinned)
        self._reserved = estimates if _keeps_its_plan(first.served, hardware, pinned, estimates) else pinned
        first.served.set_start(first.served.start.on(less(hardware, added(*self._reserved.values()))))
        if self._reserved:
            words = ", ".join(f"{name} {sum(places.values()):,.0f} MiB" for name, places in self._reserved.items())
            self._report.info("memory_kept_free", f"kept free beside {first.name}: {words}")

    def _refuse_pinned(self, hardware: Hardware, first: ServedModel, pinned: Mapping[str, Places]) -> None:
        """Raise ConfigError (10) if the models that have to stay loaded do not fit together."""
        everything = {**pinned}
        if self._named[self.slots[0].fleet_name].is_pinned:
            everything[self.slots[0].fleet_name] = _estimate(first, hardware)
        wanted, free = added(*everything.values()), free_on(hardware)
        over = {place: mib for place, mib in wanted.items() if mib > free.get(place, 0.0)}
        if len(everything) > 1 and over:
            figures = "; ".join(
                f"{place}: {mib:,.0f} MiB of {free.get(place, 0.0):,.0f}" for place, mib in over.items()
            )
            each = ", ".join(f"{name} {sum(places.values()):,.0f} MiB" for name, places in everything.items())
            message = f"pinned models do not fit together: {each} are needed at least ({figures})"
            raise ConfigError(message, hint="take `pin` from one of them: it is then loaded when it is wanted")

    @asynccontextmanager
    async def _locked(self) -> AsyncIterator[None]:
        """Hold the volume's lock: at the start it was taken before the first engine was launched.

        A start that measures first takes minutes, in which another container may serve: it goes without.
        """
        if self._measures_first and not self._fleet.was_loaded(self.slots[0].fleet_name):
            yield
            return
        if self._lock_of_start is None:
            async with self._lock.held():
                yield
            return
        handle, self._lock_of_start = self._lock_of_start, None
        try:
            yield
        finally:
            self._lock.release(handle)

    def _changed(self) -> None:
        """Tell each model whether it shares the machine, and other containers what is held here."""
        loaded, wanted = self._fleet.loaded, self._fleet.wanted
        pinned = {name for name, named in self._named.items() if named.is_pinned}
        for name, member in self._members.items():
            served = member.slot.served
            if served is None:
                continue
            # Pinned models are always there: measuring beside them is measuring this machine as it serves.
            served.sharing.note(is_shared=bool({*loaded, *wanted} - pinned - {name}))
        # Other containers leave room for what must be there; a prompt cache that may grow later is not claimed.
        mapped = sum(member.mapped_mib for name, member in self._members.items() if name in loaded)
        self._lock.write({HOST: mapped})

    # Models that come

    async def _watch_volume(self) -> None:
        while True:
            folders = await asyncio.to_thread(self._folder_times)
            if folders != self._seen and self._fleet.was_loaded(self.slots[0].fleet_name):
                self._seen = folders
                await self._look(is_due=True)
            await asyncio.sleep(LOOK_EVERY_S)

    def _folder_times(self) -> tuple[int, ...]:
        try:
            return (self._settings.models_dir.stat().st_mtime_ns,)
        except OSError:  # the folder is gone: nothing has come
            return self._seen

    async def _look(self, *, is_due: bool = False) -> None:
        """Look for models that have come to the volume; at most every FRESH_S seconds, unless `is_due`."""
        loop = asyncio.get_running_loop()
        async with self._looking:
            if self._roster is None or not self._fleet.was_loaded(self.slots[0].fleet_name):
                return  # the first model may be on its way to the volume
            if not (is_due or loop.time() - self._looked_at >= FRESH_S):
                return
            self._looked_at = loop.time()
            first = self.slots[0]
            known = [path for slot in self.slots if (path := self._path_of(slot)) is not None]
            scan = partial(on_volume, self._settings, first.contents, first.environment, known)
            try:
                for named in await asyncio.to_thread(lambda: list(scan())):
                    self._welcome(named)
            except Exception as error:  # what lies on the volume must not end the models that serve
                words = f"models that came to the volume are not listed: {type(error).__name__}: {error}"
                if words != self._told:
                    self._report.warning("models_not_listed", words)
                self._told = words

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


class SlotGate:
    """See `appliance.gateway.engine.gate.Gate`."""

    def __init__(self, name: str, fleet: Fleet, wait_s: float, *, is_first: bool) -> None:
        self._name = name
        self._fleet = fleet
        self._wait_s = wait_s
        self._is_first = is_first

    @property
    def is_loaded(self) -> bool:
        return self._fleet.is_loaded(self._name)

    @property
    def waits(self) -> bool:
        return not self._is_first or self._fleet.was_loaded(self._name)

    @asynccontextmanager
    async def held(self, tell: Tell | None, keep_alive_s: float | None) -> AsyncIterator[str]:
        from appliance.gateway.wire.api_error import load_failed, load_waits, shutting_down  # here: no start needs it

        async with AsyncExitStack() as stack:
            try:
                waited_for = await stack.enter_async_context(
                    self._fleet.held(self._name, tell=tell, keep_alive_s=keep_alive_s, wait_s=self._wait_s)
                )
            except LoadWaitError as error:
                raise load_waits(str(error), error.about_s) from None
            except FleetEndedError:
                raise shutting_down() from None
            except FatalError as error:
                told = f"{error.message}; {error.hint}" if error.hint else error.message
                raise load_failed(self._name, told, error.exit_code) from error
            yield waited_for


def _estimate(served: ServedModel, hardware: Hardware) -> Places:
    """Return what the model needs with the smallest context that is of use, MiB. Raises ModelDoesNotFitError (31)."""
    space = served.start.on(hardware).space()
    best = space.predicted
    context = min(best.context, served.settings.ctx_size or SMALLEST_CONTEXT)
    return needed_by(space.at_context(best, context) or best)


def _keeps_its_plan(
    served: ServedModel, hardware: Hardware, pinned: Mapping[str, Places], every: Mapping[str, Places]
) -> bool:
    """True if the model's plan beside all others is about as good as beside the pinned ones."""
    if pinned.keys() == every.keys():
        return True
    try:
        full = served.start.on(less(hardware, added(*pinned.values()))).space().predicted
        beside = served.start.on(less(hardware, added(*every.values()))).space().predicted
    except ModelDoesNotFitError:
        return False
    fast = (
        beside.speed is None
        or full.speed is None
        or (beside.speed.decode_tokens_per_s >= SPEED_KEPT * full.speed.decode_tokens_per_s)
    )
    return fast and beside.context >= SPEED_KEPT * full.context
