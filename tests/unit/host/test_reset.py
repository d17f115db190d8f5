"""Which profiles `--reset` forgets."""

from __future__ import annotations

from dataclasses import replace

import pytest

from appliance.host.start.start import is_of_model
from tests.unit.host.test_launch import LAUNCH


@pytest.mark.parametrize(
    ("model", "name", "expected"),
    [
        ("/home/me/Tiny.Q4.gguf", "Tiny.Q4", True),
        ("/home/me/Tiny.Q4.gguf", "Tiny.Q4_K_M", False),
        ("qwen:8b-q4", "Qwen3-8B-Q4_K_M", True),
        ("qwen", "gemma-3-4b", False),
        ("Qwen/Qwen3-8B-GGUF:Q4_K_M", "Qwen3-8B-Q4_K_M", True),
        ("Qwen/Qwen3-8B-GGUF", "Qwen3-14B-Q4_K_M", False),
    ],
)
def test_profiles_are_known_by_the_name_of_their_model(model: str, name: str, expected: bool) -> None:
    assert is_of_model({"model": name}, replace(LAUNCH, model=model)) is expected


def test_an_alias_is_the_name() -> None:
    launch = replace(LAUNCH, settings={"APPLIANCE_ALIAS": "Mine"})
    assert is_of_model({"model": "mine"}, launch)
    assert not is_of_model({"model": "m"}, launch)


def test_a_profile_of_an_older_image_that_names_no_model_is_kept() -> None:
    assert not is_of_model({}, LAUNCH)
