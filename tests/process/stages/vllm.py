"""The fake vLLM as a Command, with what the engine's folder knows of it."""

from __future__ import annotations

from pathlib import Path

from appliance.command import Command
from appliance.engines.vllm.process.log import is_error, is_fatal, is_waiting
from appliance.engines.vllm.startup.ready import one_token
from tests.fakes.quick import program


def vllm_command(socket_path: Path, *knobs: str, stall_timeout_s: float = 60.0, stop_grace_s: float = 2.0) -> Command:
    scratch = socket_path.with_suffix(".ipc")
    names = ("--served-model-name", "m")
    return Command(
        argv=(*program("fake_vllm"), "serve", "/m", "--uds", str(socket_path), *names, *knobs),
        environment={"PATH": "/usr/bin:/bin", "VLLM_RPC_BASE_PATH": str(scratch)},
        is_ready=one_token(socket_path, "m", is_embedding=False),
        is_error=is_error,
        is_waiting=is_waiting,
        is_fatal=is_fatal,
        socket_path=socket_path,
        scratch=scratch,
        stall_timeout_s=stall_timeout_s,
        stop_grace_s=stop_grace_s,
    )


def family(leader: int) -> list[int]:
    """The leader, EngineCore, workers: each a child of the one before it."""
    children = [int(pid) for pid in Path(f"/proc/{leader}/task/{leader}/children").read_text().split()]
    return [leader, *(pid for child in children for pid in family(child))]
