"""rich's console for text that comes from others. Imported only if there is a terminal: rich costs 60 ms."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any, TextIO

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment

from appliance.console.shown import beneath, shown


class Terminal(Console):
    """A console that emits only its own styles and cursor moves; control sequences in the given text become visible
    words."""

    def __init__(self, *, file: TextIO | None = None, stderr: bool = False, **options: Any) -> None:  # noqa: ANN401
        # Resolved now: rich later replaces the stream by one that leads back to ours.
        super().__init__(file=beneath(file or (sys.stderr if stderr else sys.stdout)), **options)

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterator[Segment]:
        for segment in super().render(renderable, options):
            yield segment if segment.control else Segment(shown(segment.text), segment.style)
