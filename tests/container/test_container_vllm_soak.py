"""Rounds of kills on the real vLLM in its own image: each of its processes, the container, and starts at any moment.

`make test CELL=vllm-cpu` makes two rounds of each, `make soak CELL=vllm-cpu` twenty (`APPLIANCE_TEST_ROUNDS`). What
each showed is a line of `APPLIANCE_TEST_RESULTS`. Left out without `APPLIANCE_TEST_VLLM_IMAGE`.
"""

from __future__ import annotations

import json
import os
import random
import signal
import tempfile
import time
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from docker.errors import APIError
from docker.types import Mount

from tests.container.stages.containers import ROOT, Stage, started, volume, wait_for
from tests.container.stages.soak import (
    GONE_S,
    ROUNDS,
    START_S,
    everything,
    note,
    others,
    processes,
    seconds_until_gone,
    shared,
    stream,
    tree,
    write_model,
)

IMAGE = os.environ.get("APPLIANCE_TEST_VLLM_IMAGE", "")
MODEL = ROOT / ".make/models/SmolLM2-135M-Instruct.Q4_1"  # whose tokenizer is lent
MEMBERS = ("api", "core", "worker", "rank1")
SERVED = {"APPLIANCE_MODEL": "/models/small", "APPLIANCE_CTX_SIZE": "16384", "APPLIANCE_DRAIN_S": "1"}
TWO_RANKS = {**SERVED, "APPLIANCE_ENGINE_ARG": "--tensor-parallel-size 2", "VLLM_CPU_OMP_THREADS_BIND": "0|1"}
COMPILED = {**SERVED, "APPLIANCE_ENGINE_ARG": """--compilation-config '{"cudagraph_mode":"NONE"}'"""}
COMPILING_S = 25.0  # from its first file to readiness, on a machine that has nothing else to do
KINDS = {"eager": SERVED, "compiled": COMPILED}


@pytest.fixture(scope="module", autouse=True)
def _needed() -> None:
    if not IMAGE:
        pytest.skip("it has a run of its own: make test CELL=vllm-cpu, or make soak CELL=vllm-cpu")
    assert (MODEL / "config.json").is_file(), "python -m images fetch demo --rung 135m-bf16"


@pytest.fixture(scope="module")
def model(_needed: None) -> Iterator[Path]:
    """Yield a model in a folder that Docker reaches and every user may read."""
    with tempfile.TemporaryDirectory(dir=ROOT / ".make", prefix="soak-") as name:
        Path(name).chmod(0o755)
        write_model(Path(name) / "small", MODEL)
        yield Path(name) / "small"


@pytest.fixture(scope="module")
def kept(_needed: None) -> Iterator[str]:
    """A volume for all rounds, as a user has one."""
    with volume(model=False) as name:
        yield name


def options(model: Path, env: dict[str, str]) -> dict[str, Any]:
    mount = Mount(target="/models/small", source=str(model), type="bind", read_only=True)
    return {"image": IMAGE, "mounts": [mount], "shm_size": "1g", "env": env}


@pytest.mark.parametrize("number", range(ROUNDS))
def test_each_process_of_two_ranks_and_then_the_container_end_in_mid_stream(
    number: int, model: Path, kept: str
) -> None:
    """Four deaths in a row: after a sixth within a minute the appliance would give up."""
    with started(kept, **options(model, TWO_RANKS)) as stage:
        stage.wait_ready(START_S)
        (ready,) = [event["message"] for event in stage.events() if event["event"] == "ready"]
        assert ready.endswith("tokens, as predicted")
        for member in MEMBERS:
            kill_in_mid_stream(stage, member, number)
        stop_in_mid_stream(stage, number)


def kill_in_mid_stream(stage: Stage, member: str, number: int) -> None:
    """The client is told, all of the old tree goes, and the next one serves."""
    members, old, segments = tree(stage), everything(stage), shared(stage)
    deaths, own = stage.names().count("engine_died"), others(stage)
    assert members.keys() >= set(MEMBERS)
    with stream(stage) as reply:
        lines = reply.iter_lines()
        first = next(lines)
        began = time.monotonic()
        os.kill(members[member], 9)
        rest = [line for line in lines if line]
    told_s = round(time.monotonic() - began, 2)
    gone_s = seconds_until_gone(old, began)
    wait_for(lambda: stage.names().count("engine_died") > deaths, START_S, stage.logs)
    stage.wait_ready(START_S)
    ready_s = round(time.monotonic() - began, 2)
    left = sorted(segments & shared(stage))
    note(stage, what="kill", member=member, round=number, told_s=told_s, gone_s=gone_s, ready_s=ready_s, left=left)
    assert any(b'"error"' in line for line in rest[-4:]), f"{first!r}, then {rest}\n{stage.logs()}"
    assert b"data: [DONE]" not in rest
    assert not left
    wait_for(lambda: others(stage) <= own, GONE_S, lambda: f"{processes(stage)}")  # a health check comes and goes
    assert stage.names().count("engine_died") == deaths + 1


def stop_in_mid_stream(stage: Stage, number: int) -> None:
    old = everything(stage)
    with stream(stage) as reply:
        lines = reply.iter_lines()
        next(lines)
        stage.container.reload()
        began = time.monotonic()
        os.kill(stage.container.attrs["State"]["Pid"], signal.SIGTERM)  # by Docker it takes as long as Docker is busy
        rest = [line for line in lines if line]
    told_s = round(time.monotonic() - began, 2)
    code = stage.wait_exit()
    stopped_s = seconds_until_gone(old, began)
    note(stage, what="stop", round=number, told_s=told_s, stopped_s=stopped_s, code=code)
    assert code == 0
    assert json.loads(rest[-1].removeprefix(b"data: "))["error"]["code"] == "shutting_down"
    assert stopped_s < 60  # benchmarks/soaked.py judges by what is promised, 9 s: other tests may load this machine


@cache
def whole_start_s(model: Path) -> float:
    """Return the seconds that an eager engine takes to get ready on a volume that was empty."""
    with volume(model=False) as name, started(name, **options(model, SERVED)) as stage:
        began = time.monotonic()
        stage.wait_ready(START_S)
        return time.monotonic() - began


def wait_compiling(stage: Stage) -> None:
    """Wait until files of the compile cache appear on the volume."""
    find = ("find", "/data", "-path", "*/torch_compile_cache/*", "-type", "f")
    wait_for(lambda: stage.run(*find).strip(), START_S, stage.logs)


@pytest.mark.parametrize("number", range(ROUNDS))
def test_a_start_that_is_killed_at_any_moment_breaks_no_later_one(number: int, model: Path) -> None:
    """Rounds alternate: an eager start is killed at any moment, a compiled one while its cache is being written. Each
    has an empty volume. The victim is one process of the engine or the whole container."""
    kind, draw = ("eager", "compiled")[number % 2], random.Random()  # other moments each day; each is kept
    victim = draw.choice(("container", "api", "core"))
    after_s = draw.uniform(0.05, 0.95) * (whole_start_s(model) if kind == "eager" else COMPILING_S)
    with volume(model=False) as name:
        with started(name, **options(model, KINDS[kind])) as stage:
            if kind == "compiled":
                wait_compiling(stage)
            time.sleep(after_s)  # the moment is what is tried
            was_ready = "ready" in stage.names()
            killed = kill_now(stage, victim)
        with started(name, **options(model, KINDS[kind])) as stage:
            began = time.monotonic()
            stage.wait_ready(START_S)
            ready_s = round(time.monotonic() - began, 2)
            removed = [event["message"] for event in stage.events() if "a start left" in event.get("message", "")]
            with stream(stage) as reply:
                assert next(reply.iter_lines()).startswith(b"data: ")
            assert "engine_died" not in stage.names()
            if killed == "container" and kind == "compiled" and not was_ready:
                assert removed
            note(
                stage,
                what="start",
                kind=kind,
                victim=killed,
                after_s=round(after_s, 1),
                was_ready=was_ready,
                ready_s=ready_s,
                said=removed,
            )


def kill_now(stage: Stage, victim: str) -> str:
    """Kill the victim and return its name. The container is killed if the process does not exist yet."""
    try:
        pid = tree(stage).get(victim)
        if pid is not None:
            os.kill(pid, 9)
            return victim
        stage.container.kill("SIGKILL")
    except (APIError, ProcessLookupError) as error:
        return f"{victim}, which had ended: {error}"
    return "container"
