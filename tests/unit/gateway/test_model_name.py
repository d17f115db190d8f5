from __future__ import annotations

import json
import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from appliance.gateway.wire.model_name import with_model, without_fields

JSON = b"application/json"
FORM = b"multipart/form-data; boundary=b"
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["model", "a"]), inner, max_size=2),
    max_leaves=8,
)


@given(VALUES, st.booleans(), st.sampled_from([None, 2]), st.text())
def test_only_the_name_changes(document: Any, is_ascii: bool, indent: int | None, name: str) -> None:
    body = json.dumps(document, ensure_ascii=is_ascii, indent=indent).encode("utf-8", "surrogatepass")
    has_name = isinstance(document, dict) and isinstance(document.get("model"), str)
    wanted = {**document, "model": name} if has_name else document
    assert json.loads(with_model(body, JSON, name)) == wanted


@pytest.mark.parametrize(
    ("body", "made"),
    [
        (
            b'{ "a" : [1,2.50], "model":\t"x" ,"b":"\\u00e9\xc3\xa9"}',
            b'{ "a" : [1,2.50], "model":\t"m" ,"b":"\\u00e9\xc3\xa9"}',
        ),
        (b'{"model":"x","model":"y"}', b'{"model":"m","model":"m"}'),
        (b'{"\\u006dodel":"x"}', b'{"\\u006dodel":"m"}'),
        (b'{"a":{"model":"x"}}', b'{"a":{"model":"x"}}'),
        (b'{"model":null}', b'{"model":null}'),
        (b'\xef\xbb\xbf{"model":"x"}', b'{"model":"m"}'),
    ],
)
def test_every_other_byte_stays(body: bytes, made: bytes) -> None:
    assert with_model(body, JSON, "m") == made


@pytest.mark.parametrize(
    "body",
    [
        *(b"", b"[]", b"{", b'{"model"', b'{"model":', b"\xff", b'{"model" "x"}', b'{"model":"x"'),
        *(b"[" * 10_000, b'{"a":' + b"[" * 99_999),
    ],
)
def test_what_is_no_object_stays_whole(body: bytes) -> None:
    assert with_model(body, JSON, "m") == body


@given(st.binary(max_size=60) | st.binary(max_size=30).map(lambda data: b'{"model":"x",' + data))
def test_any_bytes_are_taken(body: bytes) -> None:
    assert isinstance(with_model(body, JSON, "m"), bytes)


def test_the_name_in_a_form() -> None:
    part = b"--b\r\nContent-Disposition: form-data; name=%s\r\n\r\n%s\r\n"
    file = part % (b'"file"; filename="a.wav"\r\nContent-Type: audio/wav', b"RIFF\r\nname=model\r\n\r\n")
    body = file + part % (b'"language"', b"en") + part % (b'"model"', b"whisper-1") + b"--b--\r\n"
    made = with_model(body, FORM, "m")
    assert made == body.replace(b"whisper-1", b"m")
    assert with_model(file + b"--b--\r\n", FORM, "m") == file + b"--b--\r\n"


def test_no_body_takes_long() -> None:
    """The first two took minutes at this size, when their time grew with the square of it."""
    header = b"\r\nContent-Disposition: form-data; name=model"
    keys = b'{"model":"x"' + b',"model":"x"' * 2**18 + b"}"
    lists = b'{"model":"x","a":[' + b"[]," * 2**22 + b"[]]}"
    for body, content_type in ((header * 2**16, FORM), (keys, JSON), (lists, JSON)):
        began = time.process_time()
        assert with_model(body, content_type, "m") == body
        assert time.process_time() - began < 5


FIELDS = st.lists(
    st.tuples(st.sampled_from(["keep_alive", "ttl", "model", "a"]), VALUES | st.sampled_from(['"ttl"', "}", ","])),
    max_size=6,
)


@given(FIELDS, st.sampled_from(["", " ", "\n\t"]), st.booleans())
def test_fields_are_taken_out_wherever_they_stand(fields: list[tuple[str, Any]], space: str, has_mark: bool) -> None:
    pairs = (f"{json.dumps(key)}{space}:{space}{json.dumps(value)}" for key, value in fields)
    text = f"{space}{{{space}{f'{space},{space}'.join(pairs)}{space}}}"
    made, found = without_fields(b"\xef\xbb\xbf" * has_mark + text.encode(), frozenset({"keep_alive", "ttl"}))
    taken = {"keep_alive", "ttl"}
    assert json.loads(made.decode("utf-8-sig")) == {key: value for key, value in fields if key not in taken}
    assert found == {key: value for key, value in fields if key in taken}


def test_several_fields_at_the_end_leave_no_comma() -> None:
    made, found = without_fields(b'{"model":"x", "keep_alive":"5m", "ttl":3}', frozenset({"keep_alive", "ttl"}))
    assert (made, found) == (b'{"model":"x"}', {"keep_alive": "5m", "ttl": 3})
