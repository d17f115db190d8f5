"""The share of the KV cache that is in use, as `/slots` tells it."""

from __future__ import annotations

import json
from typing import Any

import pytest

from appliance.engines.llama.api.routes import ROUTES, SLOTS_PATH, parse_kv_use, parse_work


def slot(tokens: int | None, *, is_processing: bool = True) -> dict[str, Any]:
    told = {} if tokens is None else {"n_prompt_tokens": tokens}
    return {"id": 0, "n_ctx": 4096, "is_processing": is_processing, **told}


@pytest.mark.parametrize(
    ("slots", "share"),
    [
        ([slot(None, is_processing=False)], 0.0),
        ([slot(1024, is_processing=False)], 0.0),  # kept for a later request, and given up for another one
        ([slot(1024), slot(1024), slot(512, is_processing=False)], 0.5),
        ([slot(None)], 0.0),
        ([slot(4096), slot(4096)], 1.0),  # while one of them is about to be refused
    ],
)
def test_slots_that_work_count(slots: list[dict[str, Any]], share: float) -> None:
    assert parse_kv_use(json.dumps(slots).encode(), 4096) == share


@pytest.mark.parametrize(
    "answer", [b"", b"{", b"[1]", b'[{"id": 0}]', b"7", b'[{"is_processing": true, "n_prompt_tokens": null}]']
)
def test_what_is_no_list_of_slots_is_a_value_error(answer: bytes) -> None:
    with pytest.raises(ValueError, match=r"."):
        parse_kv_use(answer, 4096)


def test_no_client_reaches_it() -> None:
    assert SLOTS_PATH not in {path for route in ROUTES for path in (route.path, route.upstream)}


def working(task: int, read: int, made: int) -> dict[str, Any]:
    """A slot of build 11312 (server-context.cpp, `server_slot::to_json`)."""
    counts = {"n_prompt_tokens": read, "n_prompt_tokens_processed": read}
    return {"id": 0, "is_processing": True, "id_task": task, **counts, "next_token": [{"n_decoded": made}]}


def test_any_step_of_a_slot_is_work_done() -> None:
    steps = [[slot(None)], *([working(*step)] for step in ((1, 512, 0), (1, 1024, 0), (1, 1024, 1), (2, 1024, 1)))]
    found = [parse_work(json.dumps(slots).encode()) for slots in steps]
    assert len(set(found)) == len(steps)
    assert found == [parse_work(json.dumps(slots).encode()) for slots in steps]


@pytest.mark.parametrize("answer", [b"", b"{", b"[1]", b"7", b'{"error": 1}'])
def test_an_answer_without_slots_tells_no_work(answer: bytes) -> None:
    with pytest.raises(ValueError, match=r"."):
        parse_work(answer)
