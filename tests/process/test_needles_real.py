"""Needles in the context of the real engine with the demo model."""

from __future__ import annotations

from pathlib import Path

from appliance.command import Command
from appliance.engines.llama.api.client import LlamaClient
from appliance.supervisor import Supervisor
from appliance.tune.trials.needles import find_needles, longest_held
from tests.process.stages.engine import find_engine, find_model, plain_environment
from tests.process.stages.supervisor import is_healthy

CONTEXT = 2560  # more than the 2,000 tokens that each needle is judged against


async def test_the_demo_model_finds_them(tmp_path: Path) -> None:
    binary, socket_path = find_engine("llama-server"), tmp_path / "e.sock"
    size = ("--ctx-size", str(CONTEXT), "--parallel", "1")
    command = Command(
        argv=(str(binary), "--host", str(socket_path), "--model", str(find_model()), *size),
        environment=plain_environment(binary),
        is_ready=lambda: is_healthy(socket_path),
        socket_path=socket_path,
    )
    supervisor = Supervisor()
    supervisor.start(command)
    try:
        assert await supervisor.wait_ready() is None
        async with LlamaClient(command, doing="looking for needles") as client:
            rows = await find_needles(client, CONTEXT)
    finally:
        await supervisor.stop()
    assert [row.verdict for row in rows] == ["passed"] * 3, rows
    assert longest_held(rows) == CONTEXT
