"""What an engine from wheels does with which chip, and what it compiles on the user's machine. Pure.

The facts are rows of images/facts/<engine>.yaml, each with its sources, as those of compat are.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from images.compat import Source
from images.errors import MatrixError, near_miss

FOLDER = Path(__file__).parent / "facts"

Text = Annotated[str, Field(min_length=1)]
Names = Annotated[tuple[str, ...], Field(min_length=1)]


class _Row(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Jit(_Row):
    """A compiler that stays in the image and works when the engine runs."""

    name: Text
    compiles: Text
    tools: Annotated[Text, Field(alias="with")]
    sources: Names


class Attention(_Row):
    """The backends that serve these chips, in the order in which the engine tries them."""

    sms: Names
    order: Names
    why: Text
    sources: Names


class WheelFacts(_Row):
    sources: Mapping[str, Source]
    jits: Annotated[tuple[Jit, ...], Field(min_length=1)]
    attention: Annotated[tuple[Attention, ...], Field(min_length=1)]

    def attention_of(self, sm: str) -> Attention | None:
        """None for a chip that the engine does not serve."""
        return next((row for row in self.attention if sm in row.sms), None)

    def cite(self, names: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(str(self.sources[name]) for name in names)


@functools.cache
def facts(engine: str) -> WheelFacts:
    """The committed facts. MatrixError when they cannot be."""
    path = FOLDER / f"{engine}.yaml"
    try:
        data = yaml.safe_load(path.read_text("utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        said = " ".join(str(error).split())
        message = f"facts of engine {engine} cannot be read: images/facts/{engine}.yaml: {said}"
        raise MatrixError(message, hint="an engine from wheels needs them: what it compiles when it runs") from error
    return parse_facts(data, name=f"images/facts/{engine}.yaml")


def parse_facts(data: object, *, name: str) -> WheelFacts:
    try:
        rows = WheelFacts.model_validate(data)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(str(part) for part in first["loc"])
        message = f"{name}: {where}: {first['msg']}: {first['input']!r}"
        raise MatrixError(message) from error
    _check_sources(rows, name)
    _refuse_twice(rows, name)
    return rows


def _check_sources(rows: WheelFacts, name: str) -> None:
    lists = [row.sources for row in rows.jits] + [row.sources for row in rows.attention]
    cited = {source for names in lists for source in names}
    for source in sorted(cited ^ set(rows.sources)):
        what = "no row cites the source" if source in rows.sources else "a row cites a source that is not there"
        message = f"{name}: {what}: {source}"
        raise MatrixError(message, hint=near_miss(source, rows.sources) if source in cited else "take it out")


def _refuse_twice(rows: WheelFacts, name: str) -> None:
    chips = [sm for row in rows.attention for sm in row.sms]
    for sm in chips:
        if chips.count(sm) > 1:
            message = f"{name}: attention of a chip is there twice: {sm}"
            raise MatrixError(message)
