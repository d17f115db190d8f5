"""Variables, user and exposure of a container, from what the user asked for."""

from __future__ import annotations

import argparse
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from appliance.errors import ConfigError, UsageError
from appliance.host.docker.launch import Bind
from appliance.host.start.model_argument import Weights
from appliance.host.start.prepare import is_open_to_all, user, variables
from tests.unit.host.test_launch import LAUNCH

RECIPE = Weights(called="qwen", name="qwen", setting=None, recipe="qwen")


def options(**given: Any) -> argparse.Namespace:
    return argparse.Namespace(**{"mode": None, "ctx_size": None, "set": [], "fast": False, **given})


def test_a_recipe_is_left_to_its_image() -> None:
    assert variables(options(), RECIPE) == {"APPLIANCE_DRAIN_S": "30"}


def test_settings_are_variables_whatever_way_they_are_written() -> None:
    given = options(mode="speed", ctx_size="8192", set=["drain-s=5", "APPLIANCE_PARALLEL=2", "log=text"], fast=True)
    assert variables(given, replace(RECIPE, setting="qwen:8b")) == {
        "APPLIANCE_DRAIN_S": "5",
        "APPLIANCE_MODEL": "qwen:8b",
        "APPLIANCE_MODE": "speed",
        "APPLIANCE_CTX_SIZE": "8192",
        "APPLIANCE_PARALLEL": "2",
        "APPLIANCE_LOG": "text",
        "APPLIANCE_TUNE": "off",
    }


@pytest.mark.parametrize("word", ["data_dir=/x", "model=y", "port=1", "host=::", "parallel", "=8"])
def test_what_the_command_decides_itself_is_not_set(word: str) -> None:
    with pytest.raises((UsageError, ConfigError)):
        variables(options(set=[word]), RECIPE)


def test_a_password_in_a_setting_is_refused() -> None:
    with pytest.raises(ConfigError, match="a password in a URL ends in logs") as caught:
        variables(options(set=["draft_model=https://me:secret@host/d.gguf"]), RECIPE)
    assert "secret" not in caught.value.message


def weights(path: Path, mode: int) -> Weights:
    path.write_bytes(b"GGUF")
    path.chmod(mode)
    return replace(RECIPE, binds=(Bind(source=str(path), target="/models/m.gguf"),))


def test_the_user_may_read_the_weights(tmp_path: Path) -> None:
    open_file, private = weights(tmp_path / "a.gguf", 0o644), weights(tmp_path / "b.gguf", 0o600)
    me = os.getuid()
    assert user({}, open_file) == f"{me or 1000}:0"
    assert user({}, private) == f"{me}:0"
    assert user({"SecurityOptions": ["name=seccomp,profile=builtin", "name=rootless"]}, private) == "0:0"


@pytest.mark.parametrize(
    ("bind", "auth", "expected"),
    [("127.0.0.1", "off", False), ("::1", "off", False), ("0.0.0.0", "on", False), ("0.0.0.0", "OFF", True)],
)
def test_an_open_door_is_known(bind: str, auth: str, expected: bool) -> None:
    launch = replace(LAUNCH, bind=bind, settings={"APPLIANCE_AUTH": auth})
    assert is_open_to_all(launch) is expected
