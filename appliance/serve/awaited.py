"""A model whose weights are not here yet, as the gateway and a stop see it."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from appliance.console.report import Report
from appliance.model import plain_name
from appliance.probe import as_document as hardware_document
from appliance.serve.inputs import Contents, Machine
from appliance.serve.served_model import ServedModel, socket_paths
from appliance.serve.status import documents_of, listed_of, measure_now, status_of_image
from appliance.serve.which import FromHub, FromRecipe
from appliance.settings import Settings

if TYPE_CHECKING:
    from appliance.gateway.engine.backend import ListedModel
    from appliance.serve.candidates import Offered
    from appliance.weights.choose import Forecast

DOCUMENTS = ("status", "hardware", "plan", "profile", "tuning")


class AwaitedModel:
    """`served` is set when the weights are here and were looked at; from then on everything is asked of that."""

    def __init__(
        self,
        contents: Contents,
        machine: Machine,
        found: FromRecipe | FromHub,
        environment: Mapping[str, str],
        report: Report,
        *,
        number: int = 0,
    ) -> None:
        self.contents = contents
        self.machine = machine
        self.found = found
        self.environment = environment
        self.report = report
        self.number = number
        self.began_s = int(time.time())
        self.socket_path = socket_paths(contents.settings.runtime_dir, number)[0]
        self.offered: Offered | None = None  # that was chosen
        self.forecast: Forecast | None = None
        self.served: ServedModel | None = None

    @property
    def settings(self) -> Settings:
        return self.contents.settings

    @property
    def name(self) -> str:
        """As clients call it: the file's name as soon as it is known."""
        if self.served:
            return self.served.name
        return self.settings.alias or self._file_name or self.found.name

    @property
    def _file_name(self) -> str | None:
        wanted = self.offered.wanted if self.offered else None
        return plain_name(Path(wanted.files[0].path)) if wanted else None

    def documents(self) -> dict[str, Callable[[], dict[str, Any]]]:
        return {name: partial(self._document, name) for name in DOCUMENTS}

    def listed(self) -> ListedModel:
        if self.served:
            return listed_of(self.served)
        from appliance.gateway.engine.backend import (
            ListedModel,  # here: above, the gateway would delay the engine's start
        )

        candidate, model = (self.offered.candidate, self.offered.model) if self.offered else (None, None)
        aliases = (self._file_name, *(self.offered.names if self.offered else ()), self.found.name)
        return ListedModel(
            id=self.name,
            phase=self.report.progress.phase,
            aliases=tuple(dict.fromkeys(alias for alias in aliases if alias and alias != self.name)),
            created_s=self.began_s,
            context=self.forecast.context if self.forecast else None,
            native_context=model.native_context if model else None,
            format=self.contents.engine.model_format,
            architecture=model.architecture if model else "",
            quantization=candidate.quantization if candidate else "",
            size_bytes=candidate.bytes if candidate else None,
        )

    def measure_now(self) -> tuple[int, dict[str, Any]]:
        if self.served:
            return measure_now(self.served)
        from appliance.gateway.wire.api_error import not_ready  # here: no start needs it

        raise not_ready(self.report.progress)

    @property
    def restarts(self) -> int:
        return self.served.host.restarts if self.served else 0

    def _document(self, name: str) -> dict[str, Any]:
        if self.served:
            return documents_of(self.served)[name]()
        if name == "hardware":
            return hardware_document(self.machine.hardware)
        return self._status() if name == "status" else {}

    def _status(self) -> dict[str, Any]:
        """The fields of a served model's that are known, and how far fetching is."""
        progress, image, facts = self.report.progress, self.contents.image, self.contents.facts
        return {
            **status_of_image(progress, image, facts),
            "model": self.name,
            "context": None,
            "mode": self.settings.mode,
            "fetch": dict(progress.facts),
        }
