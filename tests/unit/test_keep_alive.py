"""How long a model stays loaded, in the forms of Ollama and LM Studio."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from appliance.keep_alive import FOREVER, parse_keep_alive, shown


@pytest.mark.parametrize(
    ("value", "seconds"),
    [
        (0, 0.0),
        ("0", 0.0),
        (300, 300.0),
        (1.5, 1.5),
        ("300", 300.0),
        ("5m", 300.0),
        ("1h30m", 5400.0),
        ("1.5h", 5400.0),
        ("300ms", 0.3),
        (" 10s ", 10.0),
        (-1, FOREVER),
        ("-1", FOREVER),
        ("-1m", FOREVER),
        ("forever", FOREVER),
        (10**30, FOREVER),
    ],
)
def test_each_form_of_a_client(value: object, seconds: float) -> None:
    assert parse_keep_alive(value) == seconds


@pytest.mark.parametrize("value", ["", "soon", "5 m", "m5", "1h-3m", True, None, [], {}, math.nan, "nan", "1e9"])
def test_anything_else_is_refused(value: object) -> None:
    with pytest.raises(ValueError, match="is "):
        parse_keep_alive(value)


@given(st.text(max_size=40))
def test_text_from_clients_is_seconds_or_refused(text: str) -> None:
    try:
        seconds = parse_keep_alive(text)
    except ValueError:
        return
    assert seconds >= 0


def test_it_is_shown_in_words() -> None:
    assert [shown(seconds) for seconds in (FOREVER, 300.0, 90.0, 0.0)] == ["for ever", "5 min", "90 s", "0 s"]


@pytest.mark.parametrize("value", [10**400, -(10**400)])
def test_an_integer_beyond_every_float_is_for_ever(value: int) -> None:
    assert parse_keep_alive(value) == FOREVER
