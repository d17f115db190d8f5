"""Attention of an engine from wheels by chip, and what it compiles on the user's machine. Pure.

The facts are rows of images/facts/<engine>.yaml, each with its sources like those of compat.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Annotated

from pydantic import Field

from images import rows
from images.rows import Names, Row, Source, Text


class Jit(Row):
    """A compiler that stays in the image and works while the engine runs."""

    name: Text
    compiles: Text
    tools: Annotated[Text, Field(alias="with")]
    sources: Names


class Attention(Row):
    """The backends that serve these chips, in the order in which the engine tries them."""

    sms: Names
    order: Names
    why: Text
    sources: Names


class WheelFacts(Row):
    sources: Mapping[str, Source]
    jits: Annotated[tuple[Jit, ...], Field(min_length=1)]
    attention: Annotated[tuple[Attention, ...], Field(min_length=1)]

    def attention_of(self, sm: str) -> Attention | None:
        """Returns the attention backend for a chip; None if the engine does not serve it."""
        return next((row for row in self.attention if sm in row.sms), None)

    def cite(self, names: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(str(self.sources[name]) for name in names)


@functools.cache
def facts(engine: str) -> WheelFacts:
    """Returns the committed facts. Raises MatrixError if they cannot be read."""
    name = f"images/facts/{engine}.yaml"
    return parse_facts(rows.load(name, hint="an engine from wheels needs it: what it compiles when it runs"), name=name)


def parse_facts(data: object, *, name: str) -> WheelFacts:
    file = rows.check(data, WheelFacts, name=name)
    sourced: tuple[Jit | Attention, ...] = (*file.jits, *file.attention)
    rows.refuse_uncited((source for row in sourced for source in row.sources), file.sources, name=name)
    rows.refuse_twice("attention of a chip", (sm for row in file.attention for sm in row.sms), name=name)
    return file
