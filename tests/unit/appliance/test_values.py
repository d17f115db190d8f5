"""A value of ours behaves as the standard library's frozen dataclass of the same fields."""

from __future__ import annotations

import copy
import dataclasses
import pickle
from dataclasses import asdict, field, fields, replace
from functools import cached_property
from typing import Any

import pytest

from appliance.values import dataclass


@dataclass(frozen=True, kw_only=True)
class Ours:
    """Both have the same."""

    number: int
    text: str = "a"
    many: list[int] = field(default_factory=list)
    hidden: int = field(default=0, repr=False)
    beside: int = field(default=0, compare=False)

    @cached_property
    def twice(self) -> int:
        return 2 * self.number


@dataclasses.dataclass(frozen=True, kw_only=True)
class Theirs:
    """Both have the same."""

    number: int
    text: str = "a"
    many: list[int] = field(default_factory=list)
    hidden: int = field(default=0, repr=False)
    beside: int = field(default=0, compare=False)

    @cached_property
    def twice(self) -> int:
        return 2 * self.number


@dataclass(frozen=True, kw_only=True)
class More(Ours):
    extra: int = 7

    def __post_init__(self) -> None:
        if self.extra < 0:
            message = "extra is negative"
            raise ValueError(message)


@dataclass(frozen=True, kw_only=True)
class One:
    only: tuple[int, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Empty:
    pass


@pytest.mark.parametrize("made", [Ours, Theirs])
def test_both_do_the_same(made: Any) -> None:
    value = made(number=1, many=[2], hidden=3, beside=4)
    assert repr(value) == f"{made.__name__}(number=1, text='a', many=[2], beside=4)"
    assert asdict(value) == {"number": 1, "text": "a", "many": [2], "hidden": 3, "beside": 4}
    assert [f.name for f in fields(value)] == ["number", "text", "many", "hidden", "beside"]
    assert value == replace(value, beside=5)
    assert value != replace(value, hidden=5)
    assert value != (1, "a", [2], 3)
    assert made(number=1).many is not made(number=1).many
    assert value.twice == value.twice == 2
    assert copy.copy(value) == copy.deepcopy(value) == pickle.loads(pickle.dumps(value)) == value
    for act in (lambda: setattr(value, "number", 2), lambda: delattr(value, "number")):
        with pytest.raises(dataclasses.FrozenInstanceError):
            act()  # type: ignore[no-untyped-call]
    for wrong in ({}, {"number": 1, "nubmer": 2}, {"text": "b"}):
        with pytest.raises(TypeError):
            made(**wrong)
    with pytest.raises(TypeError):
        made(1)


def test_what_is_equal_has_one_hash() -> None:
    assert {One(only=(1,)), One(only=(1,)), One()} == {One(only=(1,)), One(only=())}
    assert hash(Empty()) == hash(Empty())
    assert Empty() == Empty() != One()


def test_a_class_on_top_of_another() -> None:
    more = More(number=1)
    assert (more.extra, more.text) == (7, "a")
    assert more != Ours(number=1)
    assert repr(more).startswith("More(number=1, text='a'")
    assert replace(more, extra=8).extra == 8
    with pytest.raises(ValueError, match="extra is negative"):
        More(number=1, extra=-1)


def test_the_message_names_what_is_wrong() -> None:
    with pytest.raises(TypeError, match=r"Ours\(\) lacks \['number'\] and has no \['nubmer'\]"):
        Ours(nubmer=1)  # type: ignore[call-arg]


def test_other_kinds_are_left_to_the_standard_library() -> None:
    with pytest.raises(TypeError, match="use the standard library's"):
        dataclass(frozen=True, kw_only=False)
