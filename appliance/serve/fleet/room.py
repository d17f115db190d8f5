"""Memory that is free for each model of a container: beside those that are loaded, and those that will be."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING

from appliance.console.report import Report
from appliance.errors import ConfigError, FatalError, ModelDoesNotFitError
from appliance.plan.plan import SMALLEST_CONTEXT, SPEED_KEPT
from appliance.probe import Hardware
from appliance.serve.fleet.memory import HOST, added, beside_containers, free_on, less, needed_by
from appliance.serve.gateway.slot import ModelSlot
from appliance.serve.model.served_model import ServedModel
from appliance.serve.open.open import find_model

if TYPE_CHECKING:
    from appliance.fleet.admit import Places


class Room:
    """What is free for a model beside the loaded ones, other containers, and what is kept free for models of the
    settings file."""

    def __init__(
        self, report: Report, *, held_but: Callable[[str], Mapping[str, Places]], others: Callable[[], Places]
    ) -> None:
        """`held_but` returns what loaded models hold, MiB by name, without the named one. `others` returns what other
        containers hold; it may wait for the volume."""
        self._report = report
        self._held_but = held_but
        self._others = others
        self._slots: dict[str, ModelSlot] = {}
        self._reserved: dict[str, Places] = {}  # kept free for models that are not loaded yet, MiB by name

    def add(self, slot: ModelSlot) -> None:
        """Let this slot plan beside the others."""
        name = slot.fleet_name
        self._slots[name] = slot
        slot.set_beside(lambda hardware: self.beside(name, hardware))

    def beside(self, name: str, hardware: Hardware) -> Hardware:
        """Return the hardware as this model may use it beside those that are loaded. May wait for the volume."""
        held, others = self._held_but(name), self._others()
        if not held and not others and not (self._reserved.keys() - {name}):
            return hardware
        hardware = beside_containers(hardware, others)
        unseen = {HOST: sum(_unseen_mib(self._slots[each], places) for each, places in held.items())}
        kept = (mib for each, mib in self._reserved.items() if each != name and each not in held)
        return less(hardware, added(unseen, *kept))

    def reserve(self, slots: Sequence[ModelSlot], pinned: Collection[str]) -> None:
        """Keep memory free for the models of the settings file, so that they can be loaded beside the first slot's.

        For pinned ones always. For the others if the first one keeps most of its context and speed. Raises ConfigError
        (10) if the models that have to stay loaded do not fit together.
        """
        first = slots[0]
        if first.served is None:  # it has to be fetched first
            return
        hardware = first.look().hardware
        estimates: dict[str, Places] = {}
        for slot in slots[1:]:
            try:
                found = find_model(slot)
                if isinstance(found, ServedModel):
                    slot.take(found)
                    estimates[slot.fleet_name] = _estimate(found, hardware)
            except FatalError as error:
                hint = f"; {error.hint}" if error.hint else ""
                words = f"{slot.fleet_name} cannot be served as it is: {error.message}{hint}"
                self._report.warning("model_unusable", words)
        of_pinned = {name: mib for name, mib in estimates.items() if name in pinned}
        first_too = {first.fleet_name: _estimate(first.served, hardware)} if first.fleet_name in pinned else {}
        _refuse_pinned(hardware, {**of_pinned, **first_too})
        self._reserved = estimates if _keeps_its_plan(first.served, hardware, of_pinned, estimates) else of_pinned
        first.served.set_start(first.served.start.on(less(hardware, added(*self._reserved.values()))))
        if self._reserved:
            words = ", ".join(f"{name} {sum(places.values()):,.0f} MiB" for name, places in self._reserved.items())
            self._report.info("memory_kept_free", f"kept free beside {first.name}: {words}")


def _unseen_mib(slot: ModelSlot, holds: Places) -> float:
    """Return the host memory that a loaded model may hold, and that counts as free: mapped files, and caches that grow
    later."""
    # here: a start with one model never needs it
    from appliance.probe.load.processes import private_mib

    supervisor = slot.served.host.supervisor if slot.served else None
    seen_mib = private_mib((supervisor.pid,)) if supervisor and supervisor.pid else 0.0
    return max(0.0, holds.get(HOST, 0.0) - seen_mib)


def _refuse_pinned(hardware: Hardware, pinned: Mapping[str, Places]) -> None:
    """Raise ConfigError (10) if the models that have to stay loaded do not fit together."""
    wanted, free = added(*pinned.values()), free_on(hardware)
    over = {place: mib for place, mib in wanted.items() if mib > free.get(place, 0.0)}
    if len(pinned) > 1 and over:
        figures = "; ".join(f"{place}: {mib:,.0f} MiB of {free.get(place, 0.0):,.0f}" for place, mib in over.items())
        each = ", ".join(f"{name} {sum(places.values()):,.0f} MiB" for name, places in pinned.items())
        message = f"pinned models do not fit together: {each} are needed at least ({figures})"
        raise ConfigError(message, hint="take `pin` from one of them: it is then loaded when it is wanted")


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
