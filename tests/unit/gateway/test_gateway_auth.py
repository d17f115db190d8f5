from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from appliance.errors import ConfigError
from appliance.gateway.clients.auth import Keys, presented_keys


def test_any_of_several_keys_is_accepted() -> None:
    keys = Keys(frozenset({"one", "two"}))
    assert keys.accept([b"two"])
    assert keys.accept([b"stale", b"one"])
    assert not keys.accept([])
    assert not keys.accept([b"onetwo", b""])


def test_neither_repr_nor_str_shows_a_key() -> None:
    keys = Keys(frozenset({"sk-very-secret"}))
    assert repr(keys) == str(keys) == f"{keys}" == "Keys(1 hidden)"


@pytest.mark.parametrize("values", [frozenset[str](), frozenset({""}), frozenset({"good", "  "})])
def test_a_door_that_nobody_or_everybody_could_open_is_refused(values: frozenset[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        Keys(values)
    assert caught.value.hint


@given(st.text(st.characters(codec="utf-8"), min_size=1).filter(str.strip), st.binary())
def test_only_the_key_itself_is_accepted(key: str, candidate: bytes) -> None:
    keys = Keys(frozenset({key}))
    assert keys.accept([candidate]) == (candidate == key.encode())


@given(st.lists(st.tuples(st.sampled_from([b"authorization", b"x-api-key", b"cookie"]), st.binary())))
def test_any_header_can_be_read(headers: list[tuple[bytes, bytes]]) -> None:
    presented = list(presented_keys(headers))
    assert len(presented) <= sum(name != b"cookie" for name, _ in headers)
