from __future__ import annotations

import pytest

from appliance.engines.llama.api.routes import ROUTES
from appliance.gateway.clients.auth import OPEN_PATHS


def test_every_path_is_answered_by_one_route() -> None:
    paths = [route.path for route in ROUTES]
    assert len(paths) == len(set(paths))


def test_no_open_path_reaches_the_engine() -> None:
    assert not OPEN_PATHS & {route.path for route in ROUTES}


@pytest.mark.parametrize("word", ["slots", "props", "proxy", "tools", "load", "lora", "stream", "control", "health"])
def test_what_is_never_asked_of_the_engine(word: str) -> None:
    assert not [route for route in ROUTES if word in route.upstream]


def test_bare_paths_mean_their_v1_namesakes() -> None:
    upstream = {route.path: route.upstream for route in ROUTES}
    for path in ("/completions", "/embeddings", "/responses", "/rerank"):
        assert upstream[path] == upstream[f"/v1{path}"] == f"/v1{path}"


def test_a_path_is_taken_literally() -> None:
    assert not [route for route in ROUTES if set("{}*?%") & set(route.path + route.upstream)]
