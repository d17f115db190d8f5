"""Fields that are taken out of a request, and the model that it names: read without changing anything else."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from appliance.gateway.routes.by_model import model_named_in
from appliance.gateway.wire.model_name import without_fields

NAMES = frozenset({"keep_alive", "ttl"})
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(10**6), 10**6) | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(("a", "ttl", "model")), inner, max_size=3)
    ),
    max_leaves=8,
)
KEYS = st.sampled_from(("model", "keep_alive", "ttl", "messages", "a", 'q"uote'))
DOCUMENTS = st.dictionaries(KEYS, VALUES, max_size=6)
SPACES = st.sampled_from(((",", ":"), (", ", ": "), (" ,\n", "\t:  ")))


@given(DOCUMENTS, SPACES)
def test_only_these_fields_go(document: dict[str, Any], separators: tuple[str, str]) -> None:
    body = json.dumps(document, separators=separators).encode()
    after, found = without_fields(body, NAMES)
    assert found == {name: value for name, value in document.items() if name in NAMES}
    assert json.loads(after) == {name: value for name, value in document.items() if name not in NAMES}
    if not found:
        assert after is body


@pytest.mark.parametrize(
    ("body", "after"),
    [
        (b'{ "model" : "a",\n "ttl": 5 }', b'{ "model" : "a" }'),
        (b'{"ttl": 5, "model": "a"}', b'{"model": "a"}'),
        (b'{"ttl":1,"a":2,"keep_alive":"5m","b":3}', b'{"a":2,"b":3}'),
        (b'{"a":2,"ttl":1,"keep_alive":"5m"}', b'{"a":2}'),
        (b'{"ttl":1,"keep_alive":"5m"}', b"{}"),
        (b'{"ttl":1,"ttl":2,"a":3}', b'{"a":3}'),
        (b'{"a": {"ttl": 1}, "b": "keep_alive"}', b'{"a": {"ttl": 1}, "b": "keep_alive"}'),
        (b'{"a": 1e400, "ttl": 1}', b'{"a": 1e400}'),
    ],
)
def test_every_other_byte_stays(body: bytes, after: bytes) -> None:
    assert without_fields(body, NAMES)[0] == after


@pytest.mark.parametrize(
    "body",
    [b"", b"[]", b'"ttl"', b'{"ttl"', b'{"ttl": }', b'\xff{"ttl":1}', b'[{"ttl": 1}]', b'{"ttl": ' + b"[" * 5000],
)
def test_a_body_that_is_no_object_is_left_to_the_engine(body: bytes) -> None:
    assert without_fields(body, NAMES) == (body, {})


@given(DOCUMENTS)
def test_the_model_is_what_json_says(document: dict[str, Any]) -> None:
    name = document.get("model")
    assert model_named_in(json.dumps(document).encode()) == (name if isinstance(name, str) else None)


@given(st.binary(max_size=60))
def test_bytes_from_clients_name_a_model_or_none(body: bytes) -> None:
    named = model_named_in(body)
    assert named is None or json.loads(body.decode("utf-8-sig"))["model"] == named


def test_a_form_names_its_model() -> None:
    form = (
        b'--x\r\nContent-Disposition: form-data; name="file"; filename="a.wav"\r\n\r\nRIFF\r\n'
        b'--x\r\nContent-Disposition: form-data; name="model"\r\n\r\nwhisper\r\n--x--\r\n'
    )
    assert model_named_in(form, b"multipart/form-data; boundary=x") == "whisper"
    assert (
        model_named_in(
            b'--x\r\nContent-Disposition: form-data; name="model"\r\n\r\na\r\n--x--', b"multipart/form-data; boundary=x"
        )
        == "a"
    )
    assert model_named_in(form) is None
