"""`appliance doctor` in an image of vLLM: what is installed, and whether this will start."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from appliance.probe.gpu.driver import find
from appliance.settings import process_environment
from tests.ports import free_port
from tests.process.stages.vllm_home import FACTS, LIBRARIES, VllmHome

SAID: dict[str, Any] = {**json.loads(FACTS.read_text()), "libraries": LIBRARIES}


@pytest.fixture
def home(tmp_path: Path) -> Iterator[VllmHome]:
    home = VllmHome.make(tmp_path / "home")
    yield home
    home.free_segments()


def examined(home: VllmHome, **settings: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """The document, and its checks by name."""
    done = home.command("doctor", "--json", port=str(free_port()), **settings)
    document = json.loads(done.stdout)
    assert document["exit_code"] == done.returncode, done.stderr
    return document, {check["name"]: check for check in document["checks"]}


def test_it_ends_in_whether_this_will_start(home: VllmHome) -> None:
    document, checks = examined(home)
    assert document["will_start"] is True, checks
    assert checks["engine"]["value"].endswith("python 3.12.11, torch 2.13.0+cpu")
    for name in ("model fits", "attention", "KV cache", "compile cache"):
        assert checks[name]["status"] == "pass"
    words = home.command("doctor", port=str(free_port())).stdout
    assert words.splitlines()[-1].endswith("0 failed: this will start")
    assert home.started == []


def test_without_a_model_nobody_knows(home: VllmHome) -> None:
    model = home.data / "models/small"
    model.rename(home.folder / "elsewhere")
    assert examined(home)[0]["will_start"] is None
    words = home.command("doctor", port=str(free_port())).stdout
    assert words.splitlines()[-1].endswith("no model to start with")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"version": "0.31.0"}, "the engine is version 0.31.0, the image's facts say 0.32.0"),
        ({"flags": SAID["flags"][1:]}, f"flags of the engine are missing: {SAID['flags'][0]}"),
        ({"libraries": [LIBRARIES[0]]}, "the engine has torch not at all, the image's facts say 2.13.0+cpu"),
        ({"libraries": [*LIBRARIES[:1], ("torch", "2.14.0")]}, "the engine has torch 2.14.0, the image's facts say"),
    ],
)
def test_another_engine_than_the_image_s_facts_tell_of_is_44(
    change: dict[str, Any], words: str, home: VllmHome
) -> None:
    home.set_installed(**{**SAID, **change})
    document, checks = examined(home)
    assert (document["will_start"], document["exit_code"]) == (False, 44)
    assert words in checks["engine"]["value"]
    assert home.command("doctor", port=str(free_port())).stdout.splitlines()[-1].endswith("would end with 44")


@pytest.mark.parametrize(
    ("settings", "code", "name"),
    [
        ({"ctx_size": "8192", "engine_arg": "--kv-cache-memory-bytes 3000000"}, 10, "model fits"),
        ({"engine_arg": "--tensor-parallel-size 5"}, 10, "model fits"),
        ({"pooling": "mean"}, 10, "settings"),
        ({"chat_template_file": "/nowhere"}, 10, "settings"),
        ({"model": "/nowhere"}, 30, "model"),
    ],
)
def test_what_would_end_a_start_has_its_exit_code(
    settings: dict[str, Any], code: int, name: str, home: VllmHome
) -> None:
    document, checks = examined(home, **settings)
    assert (document["will_start"], document["exit_code"], checks[name]["exit_code"]) == (False, code, code)
    done = home.command("serve", port=str(free_port()), **settings)
    assert done.returncode == code, done.stderr


def test_a_context_that_no_memory_here_holds_is_31(home: VllmHome) -> None:
    path = home.data / "models/small/config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "max_position_embeddings": 16_777_216}))
    document, checks = examined(home, ctx_size="16777216")
    assert (document["will_start"], document["exit_code"], checks["model fits"]["exit_code"]) == (False, 31, 31)
    done = home.command("serve", port=str(free_port()), ctx_size="16777216")
    assert done.returncode == 31, done.stderr


def test_the_plan_is_the_start_s_own(home: VllmHome) -> None:
    """The plan includes speculative decoding that was asked for."""
    _, checks = examined(home, speculation="ngram")
    assert checks["speculation"]["value"].startswith("ngram: asked for")
    assert examined(home)[1]["speculation"]["value"].startswith("off: until it is measured: ngram")


def test_an_engine_for_gpus_is_not_asked_where_their_driver_is_not(home: VllmHome) -> None:
    if find("libcuda.so.1", Path("/"), process_environment(), home.data).library:
        pytest.skip("this machine has a GPU's driver")
    path = home.folder / "facts/image_facts.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "cell": "vllm-cu130", "cuda": "13.0", "sm": ["89"]}))
    (home.folder / "engine/bin/python").write_text("#!/bin/sh\nexit 1\n")
    document, checks = examined(home)
    assert checks["engine"]["status"] == "warn"
    assert "0.32.0, python 3.12.11, torch 2.13.0+cpu, by the image's facts" in checks["engine"]["value"]
    assert "libcuda.so.1" in checks["engine"]["value"]
    assert document["exit_code"] == home.command("serve", port=str(free_port())).returncode != 0
