"""The only reader of YAML files: it checks values against a kind of row, with every fact's source cited.

Each fault is a MatrixError of one form: file, place, allowed values, actual value.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from datetime import date
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar, get_args

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, ValidationInfo, field_validator

from images.errors import MatrixError, near_miss

PROJECT = Path(__file__).parent.parent
LONGEST_VALUE = 120  # characters of it in a message
DEEPEST = 100  # lists and mappings inside of each other
# libyaml's takes a tenth of the time: Python's takes 0.1 s for the matrix alone.
if TYPE_CHECKING:
    from yaml import SafeLoader as _Loader
else:
    _Loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)

Text = Annotated[str, Field(min_length=1)]
Names = Annotated[tuple[Text, ...], Field(min_length=1)]


class Row(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    @field_validator("*", mode="before")
    @classmethod
    def _refuse_yes_for_one(cls, value: object, info: ValidationInfo) -> object:
        """Refuses booleans for numbers: `kernels: true` would be 1."""
        if isinstance(value, bool):
            kinds = list(_leaves(cls.model_fields[str(info.field_name)].annotation))
            if bool not in kinds and (int in kinds or float in kinds):
                message = "Input should be a valid number" if float in kinds else "Input should be a valid integer"
                raise ValueError(message)
        return value


Kind = TypeVar("Kind", bound=Row)


class Source(Row):
    """Source of a fact: what was read or measured, and when."""

    kind: Literal["measured", "file", "document", "report", "inferred"]
    what: Text
    where: str | None = None
    date: date

    def __str__(self) -> str:
        place = f", {self.where}" if self.where else ""
        return f"{self.what}{place} ({self.kind}, {self.date})"


def load(path: str | Path, *, root: Path = PROJECT, hint: str | None = None) -> object:
    """Reads the values of a file below `root`. Raises MatrixError if it is unreadable or has a key twice."""
    try:
        return _values((root / path).read_bytes())
    except OSError as error:
        said = error.strerror or str(error)
    except (yaml.YAMLError, ValueError) as error:  # the latter: a day that no calendar has
        said = " ".join(str(error).split())
    except RecursionError:
        said = "its values are nested too deeply, where a few levels are enough"
    message = f"{path} cannot be read: {said}"
    raise MatrixError(message, hint=hint)


@lru_cache(maxsize=32)
def _values(content: bytes) -> object:
    """Reads values that all readers share and none may change."""
    depth = 0
    # libyaml's loader ends the process where Python's raises RecursionError.
    for event in yaml.parse(content, Loader=_Loader):
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        if depth > DEEPEST:
            raise RecursionError
    return yaml.load(content, Loader=_StrictLoader)  # noqa: S506 - a SafeLoader


def check(data: object, kind: type[Kind], *, name: str | Path, hint: str | None = None) -> Kind:
    """Checks values against a kind of row. `name` is the file's for messages; `hint` is for a wrong value."""
    try:
        return kind.model_validate(data)
    except ValidationError as error:
        # An unknown key first: the required key that is missing beside it is the same mistake seen from behind.
        complaints = error.errors(include_url=False)
        first = next((each for each in complaints if each["type"] == "extra_forbidden"), complaints[0])
        where = ".".join(map(str, first["loc"]))
        if first["type"] == "extra_forbidden":
            keys = _keys_at(kind, first["loc"][:-1])
            message = f"{name}: unknown key: {where}"
            hint = near_miss(str(first["loc"][-1]), keys) or f"known are {', '.join(keys)}"
        else:
            said = first["msg"].removeprefix("Value error, ")
            message = ": ".join(filter(None, (str(name), where, said, f"{first['input']!r:.{LONGEST_VALUE}}")))
        raise MatrixError(message, hint=hint) from error


def refuse_uncited(cited: Iterable[str], sources: Collection[str], *, name: str | Path) -> None:
    """Raises MatrixError for a source that is cited and not there, and for one that no row cites."""
    wanted = set(cited)
    for source in sorted(wanted - set(sources)):
        message = f"{name}: a row cites a source that is not there: {source}"
        raise MatrixError(message, hint=near_miss(source, sources) or "add it, with what was read, where and when")
    for source in sorted(set(sources) - wanted):
        message = f"{name}: no row cites the source: {source}"
        raise MatrixError(message, hint="take it out, or cite it where it belongs")


def refuse_twice(what: str, keys: Iterable[str], *, name: str | Path, hint: str = "take one of them out") -> None:
    seen: set[str] = set()
    for key in keys:
        if key in seen:
            message = f"{name}: {what} is there twice: {key}"
            raise MatrixError(message, hint=hint)
        seen.add(key)


def _keys_at(kind: type[Row], place: Iterable[int | str]) -> list[str]:
    """Returns the keys allowed at a place of a file of this kind."""
    for part in place:
        field = kind.model_fields.get(str(part))  # None: a number in a list, or a key of a mapping
        kind = (field and _kind_in(field.annotation)) or kind
    return [field.alias or key for key, field in kind.model_fields.items()]


def _kind_in(annotation: Any) -> type[Row] | None:  # noqa: ANN401 - whatever stands behind a colon
    """Returns the kind of row in `Release | None`, `tuple[Release, ...]` or `dict[str, Release]`."""
    if isinstance(annotation, type) and issubclass(annotation, Row):
        return annotation
    return next(filter(None, map(_kind_in, get_args(annotation))), None)


def _leaves(annotation: object) -> Iterator[object]:
    """Yields the kinds in `Annotated[int, …] | None`."""
    yield annotation
    for part in get_args(annotation):
        yield from _leaves(part)


class _StrictLoader(_Loader):
    """SafeLoader that refuses a repeated key; YAML keeps the last one without a word."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[object, object]:
        keys = [self.construct_object(key, deep=True) for key, _ in node.value]
        for key in keys:
            if keys.count(key) > 1:
                raise yaml.constructor.ConstructorError(
                    None, None, f"key is there twice: {key}", node.start_mark
                )  # fmt: skip
        return super().construct_mapping(node, deep)
