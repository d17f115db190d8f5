"""Weights that a slot waits for: what was asked for, and what was chosen."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from appliance.model import plain_name
from appliance.selection.request import FromHub, FromRecipe
from appliance.start.inputs import Located, StartInputs
from appliance.start.machine import UsableMachine
from appliance.values import dataclass

if TYPE_CHECKING:
    from appliance.selection.candidates import Option
    from appliance.selection.rank import Forecast


@dataclass(frozen=True, kw_only=True)
class ToQuantize:
    """A model that is here and does not fit before it is quantized."""

    located: Located
    start: StartInputs  # its inputs as it is

    @property
    def name(self) -> str:
        return self.located.called or plain_name(self.located.path)


class Pending:
    """A model that is not here, or not yet quantized: what was asked for, and what was chosen of it. Data only."""

    def __init__(self, request: FromRecipe | FromHub | ToQuantize, machine: UsableMachine, words: str) -> None:
        self.request = request
        self.machine = machine  # as it was when fetching began; free memory is read anew before the load
        self.words = words  # name the model in an error
        self.offered: Option | None = None  # the candidate that was chosen
        self.forecast: Forecast | None = None

    @property
    def name(self) -> str:
        """The file's name as soon as it is known, else the name that was asked for."""
        return self.file_name or self.request.name

    @property
    def file_name(self) -> str | None:
        """The name of the file that is fetched; None until one is chosen."""
        wanted = self.offered.wanted if self.offered else None
        return plain_name(Path(wanted.files[0].path)) if wanted else None

    @property
    def aliases(self) -> tuple[str, ...]:
        """All names that clients may use."""
        located = self.request.located.names if isinstance(self.request, ToQuantize) else ()
        names = (self.file_name, *(self.offered.names if self.offered else ()), self.request.name, *located)
        return tuple(dict.fromkeys(name for name in names if name))
