"""What a document must be to become a dataclass, whatever the dataclass."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from appliance.documents import Rules, load, read
from appliance.values import dataclass


@dataclass(frozen=True, kw_only=True)
class Leaf:
    size: float
    name: str = "oak"


@dataclass(frozen=True, kw_only=True)
class Tree:
    count: int
    leaves: tuple[Leaf, ...] = ()
    first: Leaf | None = None


LEAVES = [{"size": 2, "name": "elm"}, {"size": 0.5, "name": "ash"}]
WHOLE: dict[str, Any] = {"count": 1, "leaves": LEAVES, "first": None}
POSITIVE: Rules = {Leaf: lambda leaf: leaf.size > 0}
TREE = Tree(count=1, leaves=(Leaf(size=2.0, name="elm"), Leaf(size=0.5, name="ash")))


def with_leaf(**changes: object) -> dict[str, Any]:
    return {**WHOLE, "leaves": [WHOLE["leaves"][0], {**WHOLE["leaves"][1], **changes}]}


def test_a_whole_document_is_read_and_an_integer_stands_for_a_float() -> None:
    found = read(Tree, WHOLE)
    assert found == TREE
    assert isinstance(found.leaves[0].size, float)
    assert read(Tree, WHOLE | {"first": WHOLE["leaves"][0]}).first == TREE.leaves[0]


@pytest.mark.parametrize(
    ("document", "said"),
    [
        ({"count": 1, "leaves": []}, "Tree lacks first"),
        (WHOLE | {"crown": 1}, "Tree has no crown"),
        (with_leaf(crown=1), "Tree.leaves[1] has no crown"),
        (WHOLE | {"first": {"size": 1.0}}, "Tree.first lacks name"),
        (WHOLE | {"count": "1"}, "Tree: Expected `int`, got `str` - at `$.count`"),
        (WHOLE | {"count": True}, "Tree: Expected `int`, got `bool` - at `$.count`"),
        (WHOLE | {"count": 1.5}, "Tree: Expected `int`, got `float` - at `$.count`"),
        (with_leaf(size=True), "Tree: Expected `float`, got `bool` - at `$.leaves[1].size`"),
        (with_leaf(size=10**400), "Tree: Number out of range - at `$.leaves[1].size`"),
        (with_leaf(size=-1.0), "Tree.leaves[1] cannot be: Leaf(size=-1.0, name='ash')"),
        ([], "Tree: Expected `object`, got `array`"),
        (None, "Tree: Expected `object`, got `null`"),
    ],
)
def test_what_was_not_written_from_it_is_refused_by_the_name_of_the_field(document: object, said: str) -> None:
    with pytest.raises(ValueError, match=re.escape(said)):
        read(Tree, document, rules=POSITIVE)


def leaves(documents: list[dict[str, Any]]) -> tuple[Leaf, ...]:
    """Read leaves from documents that may lack the name."""
    return tuple(read(Leaf, {"name": "oak", **document}, rules=POSITIVE) for document in documents)


def test_a_field_that_its_type_does_not_describe_has_a_reader_of_its_own() -> None:
    document = {"count": 1, "leaves": [{"size": 2}], "first": {"size": 3, "name": "elm"}}
    found = read(Tree, document, leaves=leaves)
    assert found == Tree(count=1, leaves=(Leaf(size=2.0),), first=Leaf(size=3.0, name="elm"))
    for damage, said in (
        ({"count": None}, "Tree: Expected `int`, got `null` - at `$.count`"),
        ({"crown": 1}, "Tree has no crown"),
        ({"leaves": [{"size": -1}]}, "Leaf cannot be: "),
        ({"first": {"size": 3}}, "Tree.first lacks name"),
    ):
        with pytest.raises(ValueError, match=re.escape(said)):
            read(Tree, document | damage, leaves=leaves)
    with pytest.raises(ValueError, match="Tree lacks first, leaves"):
        read(Tree, {"count": 1}, leaves=leaves)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(st.characters(), max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["count", "leaves", "first", "size", "name", "\ud800"]), inner, max_size=4)
    ),
    max_leaves=10,
)


@given(json_values)
def test_any_document_is_read_whole_or_refused(document: Any) -> None:
    try:
        found = read(Tree, document)
    except ValueError:
        return
    assert document.keys() == {"count", "leaves", "first"}
    assert found.count == document["count"]


@pytest.mark.parametrize("data", ["[" * 100_000, '{"a":' * 100_000, "[]", "7", "", "{", b"\xff", '{"a": 1}x'])
def test_what_is_no_object_is_refused(data: str | bytes) -> None:
    with pytest.raises(ValueError, match=r"nested too deep|no JSON object|Expecting|decode|Extra data"):
        load(data)


@given(st.dictionaries(st.text(), st.integers() | st.text()))
def test_an_object_is_loaded_as_it_is(document: dict[str, Any]) -> None:
    assert load(json.dumps(document)) == document
