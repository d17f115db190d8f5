"""Experts of a served mixture: recorded routes, slots that the engine takes, and the loss by fewer experts a token."""

from __future__ import annotations

import asyncio
import json
import shlex
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from appliance.engines.engine import ExpertFiles, Install
from appliance.engines.llama.api.routes import METRICS_PATH, parse_counts
from appliance.engines.llama.engine import ENGINE
from appliance.engines.llama.planning.arguments.launch import launch_of
from appliance.engines.llama.planning.space import Space
from appliance.errors import EngineArgumentsError, FatalError
from appliance.image_facts import dump_facts, parse_engine_facts
from appliance.moe.trace import parse_trace
from appliance.plan import Plan, with_launch
from appliance.settings import resolve_settings
from appliance.supervisor import Supervisor
from tests.builders import facts, model
from tests.fakes.quick import program
from tests.golden.machines import MACHINES
from tests.process.stages.boot import Home
from tests.shapes import SMALL, write_gguf

FLAGS = ("--override-kv", "--moe-slots", "--moe-rates", "--moe-uses", "--moe-trace", "--metrics")
MORE = {"expert_count": 16, "expert_used_count": 4}


@pytest.fixture
def home(tmp_path: Path) -> Home:
    """A volume with a mixture of 4 experts a token, and an engine that knows slots."""
    home = Home.make(tmp_path / "home")
    (home.data / "models/small.gguf").unlink()
    write_gguf(home.data / "models/mixture.gguf", SMALL["moe"].changed(**MORE), quantization="Q8_0")
    path = home.folder / "facts/engine_facts.json"
    known = parse_engine_facts(path.read_text())
    path.write_text(dump_facts(replace(known, flags=(*known.flags, *FLAGS), kv_types=("f16", "bf16"))))
    return home


def test_routes_are_recorded_on_request_and_can_be_replayed(home: Home) -> None:
    with home.serving(trace_experts="on") as serving:
        serving.wait_ready()
        assert "recording the experts of each token, no text" in serving.event("trace_experts")["message"]
        question = {"messages": [{"role": "user", "content": "one two three"}]}
        serving.ask("POST", "/v1/chat/completions", question, key=home.key)
        metrics = serving.ask("GET", "/metrics", key=home.key)[1]
        assert "appliance_moe_hits_total{" not in metrics, "this engine has no slots"
        serving.terminate()
    (path,) = (home.data / "cache/experts").glob("*.csv")
    assert path.name.startswith("mixture-")
    assert parse_trace(path.read_text().splitlines()).decoded == 3
    assert "--moe-uses" not in home.started[-1]
    with home.serving() as serving:
        serving.wait_ready()
        assert "--moe-trace" not in home.started[-1]
        serving.terminate()


def test_the_loss_by_fewer_experts_is_measured_once_and_shown(home: Home) -> None:
    run = [*program("fake_perplexity"), "--by-fewer", "0.05"]
    script, count = home.folder / "engine/llama-perplexity", home.folder / "runs"
    script.write_text(f'#!/bin/sh\necho run >>{shlex.quote(str(count))}\nexec {shlex.join(run)} "$@"\n')
    script.chmod(0o755)
    given: Any = {"experts_used": "2", "tune": "idle", "idle_s": "1", "check_abilities": "off"}
    assert "loss unknown: it is measured while idle" in home.command("plan", "--explain", **given).stdout
    words = "perplexity +5.13 % ± 0.00 % over 4,096 tokens"
    with home.serving(**given) as serving:
        serving.wait_ready()
        assert serving.event("experts_loss")["message"] == f"2 experts a token instead of 4: {words}"
        assert "qwen3moe.expert_used_count=int:2" in home.started[-1]
        serving.terminate()
    explained = home.command("plan", "--explain", **given).stdout
    assert f"2 experts a token instead of 4, so answers change: {words}" in explained
    document = json.loads(home.command("plan", "--json", **given).stdout)["experts_used"]
    assert (document["count"], document["loss"]["tokens"]) == (2, 4096)
    assert len(count.read_text().splitlines()) == 2


def test_fewer_experts_than_one_end_the_start_with_the_reason(home: Home) -> None:
    done = home.command("serve", experts_used="5")
    assert done.returncode == 10
    assert "above the 4 that the model was trained with: 5" in done.stderr + done.stdout


def of_laptop(**flags: Any) -> Plan:
    image, known = facts(has_cuda=True)
    shape = model("qwen3-30b-a3b", "Q3_K_M")
    return Space(resolve_settings(flags, {}), image, known, MACHINES["laptop-5060"], shape).best


def run(folder: Path, plan: Plan, check: Callable[[Path], Awaitable[None]], *knobs: str) -> FatalError | None:
    """Start the fake engine with this plan, as a start that serves. Returns its error if it did not become ready."""
    path = folder / "llama-server"
    path.write_text(f'#!/bin/sh\nexec {shlex.join([*program("fake_engine"), *knobs])} "$@"\n')
    path.chmod(0o755)
    install = Install(engine_dir=folder, facts=facts(has_cuda=True)[1], cache_dir=folder / "cache")
    socket = folder / "e.sock"
    files = ExpertFiles(uses=folder / "a.uses", trace=None)
    command = ENGINE.keep_experts(ENGINE.command(plan, install, socket), install, files)
    command = replace(command, is_at_work=None)  # there is no such GPU to ask

    async def go() -> FatalError | None:
        supervisor = Supervisor()
        try:
            supervisor.start(command)
            if crash := await supervisor.wait_ready():
                return ENGINE.as_error(crash)
            await check(socket)
        finally:
            await supervisor.stop()
        return None

    return asyncio.run(go())


def test_the_engine_accepts_what_the_planner_asks_for_and_counts_experts(tmp_path: Path) -> None:
    seen: dict[str, float] = {}

    async def look(socket: Path) -> None:
        reader, writer = await asyncio.open_unix_connection(str(socket))
        writer.write(f"GET {METRICS_PATH} HTTP/1.1\r\nHost: e\r\nConnection: close\r\n\r\n".encode())
        seen.update(parse_counts(await reader.read()))
        writer.close()

    assert run(tmp_path, of_laptop(moe_slots="16"), look) is None
    assert seen["moe_rule"] == 3
    assert {"moe_hits_total", "moe_cpu_total", "moe_uploads_total", "moe_measured_seconds_total"} < seen.keys()
    assert (tmp_path / "a.uses").read_text().startswith("moe-uses-1 ")


def test_slots_that_the_engine_refuses_are_an_error_of_arguments(tmp_path: Path) -> None:
    async def never(_socket: Path) -> None:
        raise AssertionError

    error = run(tmp_path, of_laptop(moe_slots="16"), never, "--moe-top-k", "32")
    assert isinstance(error, EngineArgumentsError)
    assert "--moe-slots 16: a token uses 32 experts of layer 0" in error.message
    plan = of_laptop(moe_slots="16")
    whole = replace(plan, placement=replace(plan.placement, cpu_expert_layers=0))
    refused = run(tmp_path, whole, never)
    assert isinstance(refused, EngineArgumentsError)
    slots = launch_of(plan).slots
    assert slots is not None
    bad = with_launch(plan, slots=replace(slots, count=4))
    assert isinstance(run(tmp_path, bad, never), EngineArgumentsError)
