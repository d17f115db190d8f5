"""Errors inside a stream, however its bytes are cut."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from appliance.gateway.wire.events import EVENT_BYTES, ErrorWatch, data_of, is_named

TEXT = b'data: {"choices":[{"text":"data: {\\"error\\": 1}\\nevent: error\\n"}]}\n\n'
UNNAMED = b'data: {"error": {"message": "gone", "code": 500}}\n\n'
NAMED = b'event: error\ndata: {"type":"error","error":{"type":"api_error","message":"gone"}}\n\n'
DONE = b"data: [DONE]\n\n"


def watched(chunks: Sequence[bytes]) -> tuple[bytes, bytes | None]:
    """Return the bytes that pass, and the error or None."""
    watch, passed = ErrorWatch(), b""
    for chunk in chunks:
        found = watch.feed(chunk)
        passed += found.passed
        if found.error is not None:
            return passed, found.error
    return passed + watch.rest(), None


def cut(data: bytes, at: Sequence[int]) -> list[bytes]:
    places = sorted({0, len(data), *(place % len(data) for place in at)})
    return [data[a:b] for a, b in pairwise(places)]


@given(st.lists(st.integers(0, 400), max_size=12))
@pytest.mark.parametrize("error", [UNNAMED, NAMED])
def test_an_error_is_found_and_what_follows_it_does_not_pass(error: bytes, at: list[int]) -> None:
    assert watched(cut(TEXT + TEXT + error + DONE, at)) == (TEXT + TEXT, error)


@given(st.lists(st.integers(0, 400), max_size=12), st.sampled_from([b"", b"data: {", b"event: err", b": note\n\n"]))
def test_a_stream_without_one_passes_as_it_is(at: list[int], end: bytes) -> None:
    data = TEXT + b"data: {}\n\n" + TEXT + DONE + end
    assert watched(cut(data, at)) == (data, None)


@pytest.mark.parametrize("size", range(1, len(UNNAMED) + 1))
def test_nothing_but_a_beginning_of_an_error_is_held_back(size: int) -> None:
    watch = ErrorWatch()
    found = watch.feed(TEXT + UNNAMED[:size])
    assert found.passed == TEXT
    assert (found.error is not None) == (size == len(UNNAMED))
    assert ErrorWatch().feed(b"data: {}").passed == b"data: {}"


@given(st.lists(st.integers(0, 400), max_size=12))
def test_an_error_in_lines_of_dos_is_one(at: list[int]) -> None:
    error = NAMED.replace(b"\n", b"\r\n")
    assert watched(cut(error + DONE, at)) == (b"", error)


def test_an_endless_one_is_not_waited_for() -> None:
    data = b'data: {"error": "' + b"x" * EVENT_BYTES
    assert ErrorWatch().feed(data).passed == data


def test_what_an_event_says() -> None:
    assert [is_named(error) for error in (NAMED, UNNAMED)] == [True, False]
    assert data_of(UNNAMED) == b'{"error": {"message": "gone", "code": 500}}'


@given(
    st.lists(
        st.sampled_from([TEXT, UNNAMED, NAMED, DONE, b"data: {", b"event: err", b"\n", b"\n\n", b": x"]), max_size=6
    )
)
def test_what_passes_at_once_is_what_would_pass_anyway(chunks: list[bytes]) -> None:
    watch = ErrorWatch()
    for chunk in filter(None, chunks):
        if watch.passes(chunk):
            assert watch.feed(chunk) == (chunk, None)
            assert watch.rest() == b""
        else:
            watch.feed(chunk)
