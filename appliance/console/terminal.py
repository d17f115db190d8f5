"""rich's console for others' text. Imported where there is a terminal only: rich costs 60 ms."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any, TextIO

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment

from appliance.console.shown import beneath, shown


class Terminal(Console):
    """Its own styles and cursor moves are sequences; of what it is given none is."""

    def __init__(self, *, file: TextIO | None = None, stderr: bool = False, **options: Any) -> None:  # noqa: ANN401
        # Found now: what rich puts in place of a stream while something moves leads to ours, and that is not the last.
        super().__init__(file=beneath(file or (sys.stderr if stderr else sys.stdout)), **options)

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterator[Segment]:
        for segment in super().render(renderable, options):
            yield segment if segment.control else Segment(shown(segment.text), segment.style)
