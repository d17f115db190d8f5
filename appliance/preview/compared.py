"""Plans of one model for several machines, side by side."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Sequence
from itertools import zip_longest
from typing import Any

from appliance.errors import FatalError
from appliance.plan import Head
from appliance.preview.preview import Preview
from appliance.preview.text import head, plan_document
from appliance.probe.machine.described import DescribedMachine
from appliance.values import dataclass

WIDTH = 36  # of a machine's column
_NAMES = ("machine", "image", "model", "context", "placement", "speed", "memory")


@dataclass(frozen=True, kw_only=True)
class Compared:
    """One machine with its plan, or with the error in its place."""

    machine: DescribedMachine
    found: Preview | None = None
    argv: tuple[str, ...] = ()
    error: FatalError | None = None

    def as_document(self) -> dict[str, Any]:
        """What `plan --json` prints of the machine; without a plan the error."""
        if self.found:
            return plan_document(self.found, self.machine, self.argv)
        error = self.error
        told = {"exit_code": error.exit_code, "message": error.message, "hint": error.hint} if error else None
        return {"machine": {"source": self.machine.source, "assumed": list(self.machine.assumed)}, "error": told}

    @property
    def column(self) -> tuple[str, ...]:
        """In the order of the rows' names."""
        if self.found is None:
            return self.machine.source, "", "", f"error {self.error.exit_code}: {self.error}" if self.error else ""
        top: Head = head(self.found, self.argv)
        start = self.found.start
        model = self.found.shape.name if self.found.shape else start.inputs.model.title
        image = start.inputs.image.cell
        return self.machine.source, image, model, top.context, top.placement, top.speed, top.memory


def compare(
    machines: Sequence[DescribedMachine], plan: Callable[[DescribedMachine], tuple[Preview, tuple[str, ...]]]
) -> tuple[Compared, ...]:
    """A machine that cannot serve the model has its error, and does not end the others."""
    found = []
    for machine in machines:
        try:
            preview, argv = plan(machine)
            found.append(Compared(machine=machine, found=preview, argv=argv))
        except FatalError as error:
            found.append(Compared(machine=machine, error=error))
    return tuple(found)


def as_text(rows: Sequence[Compared]) -> str:
    """A column for each machine, a row for each of the lines that a plan opens with."""
    columns = [each.column for each in rows]
    lines = []
    for name, cells in zip(_NAMES, zip_longest(*columns, fillvalue=""), strict=False):
        wrapped = [textwrap.wrap(cell, WIDTH, break_on_hyphens=False) or [""] for cell in cells]
        for at, parts in enumerate(zip_longest(*wrapped, fillvalue="")):
            shown = "  ".join(f"{part:<{WIDTH}}" for part in parts)
            lines.append(f"{name if at == 0 else '':<9}  {shown}".rstrip())
    return "\n".join(lines)
