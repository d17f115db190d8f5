"""The kept endings once more, with the engine of the built image: its words may change with the next engine."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import docker
import pytest
import yaml

from tests.container.stages.containers import IMAGE, MODEL, ROOT

INDEX: dict[str, dict[str, Any]] = yaml.safe_load((ROOT / "tests/endings/index.yaml").read_text(encoding="utf-8"))
LIMITED = [name for name, row in INDEX.items() if "memory_limit_mib" in row]
RUN = [name for name, row in INDEX.items() if "run" in row and name not in LIMITED]


def provoked(*names: str, **limits: Any) -> dict[str, dict[str, Any]]:
    """Return what `provoke.py` reports of these endings. The program runs in the image with the code of this tree."""
    assert MODEL.exists(), "run `make model` first"
    client = docker.from_env()
    model = Path("/models") / MODEL.name
    argv = ["-B", "/src/tests/endings/provoke.py", "--engine", "/opt/llama", "--model", str(model), *names]
    try:
        said = client.containers.run(
            IMAGE,
            argv,
            entrypoint="python3",
            environment={"PYTHONPATH": "/src:/opt/appliance/lib"},
            volumes={
                str(ROOT): {"bind": "/src", "mode": "ro"},
                str(MODEL.resolve()): {"bind": str(model), "mode": "ro"},
            },
            tmpfs={"/tmp": "exec"},
            network_mode="none",
            remove=True,
            **limits,
        )
    finally:
        client.close()
    return {row["name"]: row for row in map(json.loads, said.decode().splitlines())}


@pytest.fixture(scope="module")
def found() -> dict[str, dict[str, Any]]:
    return provoked(*RUN)


@pytest.mark.parametrize("name", RUN)
def test_an_ending_is_still_what_it_was(found: dict[str, dict[str, Any]], name: str) -> None:
    row, told = INDEX[name], found[name]
    assert told["ended"]
    assert (told["exit_code"], told["signal"]) == (row.get("exit_code"), row.get("signal"))
    assert told["stalled"] == row.get("stalled", False)
    # The engine writes its log from a thread of its own: of two lines of error either may come first.
    assert row.get("says", "") in told["message"]
    assert told["code"] == row["code"]


@pytest.mark.parametrize("name", LIMITED)
def test_a_kill_by_the_containers_memory_limit_is_seen(name: str) -> None:
    # The folders for each ending lie in memory too, and are as large as the engine's own.
    told = provoked(name, mem_limit="150m", memswap_limit="150m")[name]
    assert (told["signal"], told["oom_kills"], told["code"]) == (9, 1, 42)
