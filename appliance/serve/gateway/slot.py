"""One model as the gateway sees it: a name and a state, whether its weights or its engine are here or not."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from enum import StrEnum
from functools import partial
from typing import TYPE_CHECKING, Any

from appliance.console.progress import Phase
from appliance.console.report import Report
from appliance.plan import Plan
from appliance.probe import Hardware
from appliance.probe import as_document as hardware_document
from appliance.serve.gateway.documents import documents_of, listed_of, measure_now, status_of_image
from appliance.serve.gateway.modes import switch_mode
from appliance.serve.gateway.pending import Pending
from appliance.serve.model.served_model import ServedModel, socket_paths
from appliance.settings import Settings
from appliance.start.image import ImageContents
from appliance.start.machine import UsableMachine, look_at_machine

if TYPE_CHECKING:
    from appliance.gateway.engine.backend import ListedModel
    from appliance.gateway.engine.upstream_pool import UpstreamPool

Beside = Callable[[Hardware], Hardware]
DOCUMENTS = ("status", "hardware", "plan", "profile", "tuning")


class SlotState(StrEnum):
    ABSENT = "absent"  # it was not looked for yet
    FETCHING = "fetching"
    LOADING = "loading"  # from planning to readiness, and between two engines
    READY = "ready"
    ASLEEP = "asleep"  # its engine was stopped, and `bring_up` starts another
    STOPPING = "stopping"


class ModelSlot:
    """A place for one model behind the gateway. `report` is its own; `number` tells the slots of a process apart.

    `pending` is set while weights have to be fetched, `served` from the moment they are here.
    """

    def __init__(
        self, contents: ImageContents, environment: Mapping[str, str], report: Report, *, number: int = 0
    ) -> None:
        self.contents = contents
        self.environment = environment
        self.report = report
        self.number = number
        self.began_s = int(time.time())
        self.socket_path = socket_paths(contents.settings.runtime_dir, number)[0]
        self.pending: Pending | None = None
        self.served: ServedModel | None = None
        self.fleet_name = ""  # its name in the fleet and in the gateway's list, which a fetch does not change
        self.more_names: tuple[str, ...] = ()  # further names that clients may use
        self.names_of_others: frozenset[str] = frozenset()  # in lower case; never this model's, whatever its file says
        self.size_bytes: int | None = None  # of its files, if known before the model is opened
        self.beside: Beside = lambda hardware: hardware
        """Returns the hardware as this model may use it beside others that are loaded."""
        self._upstream: UpstreamPool | None = None

    @property
    def settings(self) -> Settings:
        return self.contents.settings

    @property
    def name(self) -> str:
        """The name that clients use."""
        if self.served:
            return self.served.name
        recipe = self.contents.recipe
        asked = self.settings.model or (recipe.name if recipe else "model")
        return self.settings.alias or (self.pending.name if self.pending else asked)

    @property
    def state(self) -> SlotState:
        """The state, derived from what the slot has and from the phase that its report shows."""
        phase = self.report.progress.phase
        if phase is Phase.STOPPING:
            return SlotState.STOPPING
        if self.served is None:
            return SlotState.FETCHING if self.pending else SlotState.ABSENT
        if phase is Phase.ASLEEP:
            return SlotState.ASLEEP
        return SlotState.READY if phase in (Phase.READY, Phase.HELD) else SlotState.LOADING

    @property
    def plan(self) -> Plan | None:
        """The plan that serves."""
        return self.served.host.plan if self.served else None

    @property
    def restarts(self) -> int:
        """Number of restarts of its engines."""
        return self.served.host.restarts if self.served else 0

    def set_beside(self, beside: Beside) -> None:
        """Set how the hardware may be used beside other models, for the slot and the model that it has."""
        self.beside = beside
        if self.served:
            self.served.beside = beside

    def look(self) -> UsableMachine:
        """Look at the machine, as this model may use it now. Raises as `look_at_machine`."""
        machine = look_at_machine(self.contents, self.environment)
        return replace(machine, hardware=self.beside(machine.hardware))

    def take(self, found: ServedModel | Pending) -> None:
        """Set what was found: weights to fetch, or a model that answers all questions from now on."""
        if isinstance(found, Pending):
            self.pending = found
            return
        self.served = found
        found.upstream = self._upstream
        found.beside = self.beside

    def forget(self) -> None:
        """Forget the model, whose engine was stopped: its files are other ones now. It is looked for anew."""
        self.served = None
        if self._upstream:
            self._upstream.switch_to(self.socket_path)  # on which its first engine will listen

    def connect(self, upstream: UpstreamPool) -> None:
        """Tell the model through which connections the gateway reaches its engine."""
        self._upstream = upstream
        if self.served:
            self.served.upstream = upstream

    def documents(self) -> dict[str, Callable[[], dict[str, Any]]]:
        """Return the documents by name; each call of one makes it anew."""
        return {name: partial(self._document, name) for name in DOCUMENTS}

    def listed(self) -> ListedModel:
        """Return the row in the list of models, with what is known already."""
        if self.served:
            listed = listed_of(self.served)
            aliases = dict.fromkeys((*listed.aliases, *self.more_names))
            own = (alias for alias in aliases if alias.casefold() not in self.names_of_others)
            return replace(listed, aliases=tuple(own))
        from appliance.gateway.engine.backend import ListedModel  # here: at the top it would delay the engine's start

        pending = self.pending
        offered, forecast = (pending.offered, pending.forecast) if pending else (None, None)
        candidate, model = (offered.candidate, offered.model) if offered else (None, None)
        return ListedModel(
            id=self.name,
            phase=self.report.progress.phase,
            aliases=tuple(
                alias for alias in (*(pending.aliases if pending else ()), *self.more_names) if alias != self.name
            ),
            created_s=self.began_s,
            context=forecast.context if forecast else None,
            native_context=model.native_context if model else None,
            format=self.contents.engine.model_format,
            architecture=model.architecture if model else "",
            quantization=candidate.quantization if candidate else "",
            size_bytes=candidate.bytes if candidate else self.size_bytes,
        )

    def measure_now(self) -> tuple[int, dict[str, Any]]:
        """Measure now, since a client waits for the result. Raises ApiError if nothing will be measured."""
        if self.served:
            return measure_now(self.served)
        from appliance.gateway.wire.api_error import not_ready  # here: no start needs it

        raise not_ready(self.report.progress)

    def switch_mode(self, body: bytes) -> tuple[int, dict[str, Any]]:
        """Begin to switch to the mode that the body names. Raises ApiError if that is not possible now."""
        if self.served:
            return switch_mode(self.served, body)
        from appliance.gateway.wire.api_error import not_ready  # here: no start needs it

        raise not_ready(self.report.progress)

    def _document(self, name: str) -> dict[str, Any]:
        if self.served:
            return documents_of(self.served)[name]()
        if name == "hardware":
            return hardware_document(self.pending.machine.hardware) if self.pending else {}
        return self._status() if name == "status" else {}

    def _status(self) -> dict[str, Any]:
        """Return the known fields of a served model's status, and how far fetching is."""
        progress, image, facts = self.report.progress, self.contents.image, self.contents.facts
        return {
            **status_of_image(progress, image, facts),
            "model": self.name,
            "context": None,
            "mode": self.settings.mode,
            "modes": [],
            "mode_switch": None,
            "fetch": dict(progress.facts),
        }
