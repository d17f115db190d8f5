"""`@dataclass(frozen=True, kw_only=True)` whose classes are quick to define, for modules imported before the engine
starts.

The standard library compiles six methods of source text for each class, which takes 1 to 1.5 ms; the hundred classes of
a start took a third of the time before the engine's launch. Here the methods are closures. Everything else is the
standard library's: `fields`, `replace`, `asdict` and type checkers see a dataclass. A test compares the two.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from operator import attrgetter
from reprlib import recursive_repr
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dataclasses import dataclass as dataclass
else:

    def dataclass(*, frozen: bool, kw_only: bool) -> Callable[[type[Any]], Any]:
        """Return the decorator. Both arguments must be True; they are written out for the reader and the type
        checker."""
        if not (frozen and kw_only):
            message = "only frozen=True, kw_only=True is supported; use the standard library's dataclass for others"
            raise TypeError(message)
        return _made


def _made(cls: type[Any]) -> Any:  # noqa: ANN401 - methods are set, which mypy forbids for a type
    # without a docstring dataclasses would build one from the signature, which is slow
    cls.__doc__ = cls.__doc__ or cls.__name__
    # This collects the fields and compiles nothing.
    made: Any = dataclasses.dataclass(init=False, repr=False, eq=False, kw_only=True)(cls)
    found = dataclasses.fields(made)
    compared = _as_tuple(tuple(field.name for field in found if field.compare))
    shown = tuple(field.name for field in found if field.repr)

    def __eq__(self: Any, other: object) -> Any:  # noqa: ANN401, N807
        return compared(self) == compared(other) if other.__class__ is self.__class__ else NotImplemented

    def __hash__(self: Any) -> int:  # noqa: ANN401, N807
        return hash(compared(self))

    @recursive_repr()
    def __repr__(self: Any) -> str:  # noqa: ANN401, N807
        return f"{type(self).__qualname__}({', '.join(f'{name}={getattr(self, name)!r}' for name in shown)})"

    if "__eq__" not in cls.__dict__:
        made.__eq__ = __eq__
        if cls.__dict__.get("__hash__") is None:
            made.__hash__ = __hash__
    if "__repr__" not in cls.__dict__:
        made.__repr__ = __repr__
    made.__init__ = _initializer(found, hasattr(made, "__post_init__"))
    made.__setattr__ = _refuse_to_set
    made.__delattr__ = _refuse_to_delete
    return made


def _initializer(found: tuple[dataclasses.Field[Any], ...], has_post_init: bool) -> Callable[..., None]:
    names = frozenset(field.name for field in found)
    missing = dataclasses.MISSING
    defaults = {field.name: field.default for field in found if field.default is not missing}
    factories = [(field.name, field.default_factory) for field in found if field.default_factory is not missing]
    needed = names - defaults.keys() - {name for name, _ in factories}

    def __init__(self: Any, **given: Any) -> None:  # noqa: ANN401, N807
        values = given
        if given.keys() != names:
            if not needed <= given.keys() <= names:
                lacking, unknown = sorted(needed - given.keys()), sorted(given.keys() - names)
                message = f"{type(self).__name__}() lacks {lacking or 'nothing'} and has no {unknown or 'more'}"
                raise TypeError(message)
            made = {name: make() for name, make in factories if name not in given}
            values = {**defaults, **made, **given}
        self.__dict__.update(values)
        if has_post_init:
            self.__post_init__()

    return __init__


def _as_tuple(names: tuple[str, ...]) -> Callable[[Any], tuple[Any, ...]]:
    if len(names) > 1:
        return attrgetter(*names)
    return lambda value: tuple(getattr(value, name) for name in names)


def _refuse_to_set(_self: object, name: str, _value: object) -> None:
    message = f"cannot assign to field {name!r}"
    raise dataclasses.FrozenInstanceError(message)


def _refuse_to_delete(_self: object, name: str) -> None:
    message = f"cannot delete field {name!r}"
    raise dataclasses.FrozenInstanceError(message)
