from __future__ import annotations

from pathlib import Path

import pytest

from appliance.console.progress import Phase, Progress
from appliance.engine_route import EngineRoute
from appliance.errors import ConfigError
from appliance.gateway.app import create_app
from appliance.gateway.engine.backend import Backend
from appliance.gateway.routes.by_model import model_named_in, overall_progress


def backend(name: str, phase: Phase = Phase.READY) -> Backend:
    return Backend(
        name=name,
        socket_path=Path(f"/nonexistent/{name}.sock"),
        routes=(EngineRoute(path="/v1/chat/completions", upstream="/v1/chat/completions"),),
        progress=lambda: Progress(phase=phase),
        documents={},
    )


@pytest.mark.parametrize(
    ("body", "name"),
    [
        (b'{"model": "a"}', "a"),
        (b'{"messages": [{"model": "inside"}], "model": "a"}', "a"),
        (b'{"messages": [{"model": "inside"}]}', None),
        (b'{"model": null}', None),
        (b'{"model": 1}', None),
        (b'["model", "a"]', None),
        (b'{"model": "a"', None),
        (b"\xff", None),
        (b"", None),
        (b"[" * 100_000, None),
        ('{"model": "größer"}'.encode(), "größer"),
    ],
)
def test_the_model_is_what_the_json_names(body: bytes, name: str | None) -> None:
    assert model_named_in(body) == name


@pytest.mark.parametrize(
    ("phases", "overall"),
    [
        ([Phase.READY], Phase.READY),
        ([Phase.READY, Phase.LOADING], Phase.READY),
        ([Phase.LOADING, Phase.READY], Phase.LOADING),
        ([Phase.HELD, Phase.RESTARTING], Phase.HELD),
        ([Phase.FAILED, Phase.LOADING], Phase.FAILED),
    ],
)
def test_all_are_as_far_as_the_first_one(phases: list[Phase], overall: Phase) -> None:
    assert overall_progress([backend(str(number), phase) for number, phase in enumerate(phases)]).phase is overall


def test_two_models_of_one_name_are_refused() -> None:
    with pytest.raises(ConfigError, match="several models have the same name: a") as caught:
        create_app([backend("a"), backend("b"), backend("a")], keys=None)
    assert "alias" in (caught.value.hint or "")
