"""Brings about the endings of vllm.yaml with a real vLLM, through the supervisor, and tells how each looked.

    provoke_vllm.py --vllm PROGRAM --model FOLDER [--out FOLDER] [--rounds N] [NAME ...]

Each `run` of the index is a shell script: $VLLM is the program, $MODEL the folder, $COMMON flags that all share, $TMP
an empty folder. With `kill` it serves first, and that process of its tree is killed in mid-stream: 0 the API server, 1
EngineCore, from 2 on the workers. One line of JSON an ending goes to standard output, with what was left of the tree
after 3 s; with `--out` also the log, as vllm-NAME.log, with neutral paths.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import yaml

from appliance.command import Command
from appliance.engines.vllm.process.endings import as_error
from appliance.engines.vllm.process.log import is_error, is_fatal, is_waiting
from appliance.engines.vllm.startup.ready import one_token
from appliance.probe.machine.cgroup import query_oom_kills
from appliance.supervisor import Crash, Supervisor, become_subreaper

HERE = Path(__file__).parent
GONE_WITHIN_S = 3.0
COMMON = "--served-model-name m --enforce-eager --max-model-len 1024 --max-num-seqs 4 --kv-cache-memory-bytes 67108864"
VARIABLES = {
    "LANG": "C.UTF-8",
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_COLOR": "0",
}
STREAM = {"model": "m", "prompt": "a", "max_tokens": 950, "ignore_eos": True, "stream": True}


def command_of(script: str, vllm: Path, model: Path, folder: Path, stall_timeout_s: float) -> Command:
    socket_path = folder / "e.sock"
    names = {
        **VARIABLES,
        "PATH": f"{vllm.parent}:/usr/bin:/bin",
        "PYTHON": sys.executable,
        "VLLM": str(vllm),
        "MODEL": str(model),
        "COMMON": f"--uds {socket_path} {COMMON}",
        "TMP": str(folder),
        "HOME": str(folder),
        "VLLM_CACHE_ROOT": str(folder / "cache"),
        "VLLM_RPC_BASE_PATH": str(folder / "ipc"),
    }
    return Command(
        argv=("/bin/bash", "-c", script),
        environment=names,
        is_ready=one_token(socket_path, "m", is_embedding=False),
        is_error=is_error,
        is_waiting=is_waiting,
        is_fatal=is_fatal,
        socket_path=socket_path,
        scratch=folder / "ipc",
        stall_timeout_s=stall_timeout_s,
        oom_kills=lambda: query_oom_kills(Path("/")),
    )


async def provoke(command: Command, kill: int | None) -> tuple[Crash, list[int]]:
    """How it ended, and what still lived of its tree 3 s later. Raises RuntimeError when it did not end."""
    supervisor = Supervisor()
    supervisor.start(command)
    try:
        crash = await supervisor.wait_ready()
        if crash is not None:
            await asyncio.sleep(GONE_WITHIN_S)
            return crash, [pid for pid in everywhere() if is_alive(pid)]
        if kill is None or supervisor.pid is None:
            message = "it became ready, which it should not"
            raise RuntimeError(message)
        tree = family(supervisor.pid)
        async with streaming(command):
            os.kill(tree[kill], signal.SIGKILL)
            began = time.monotonic()
            crash = await supervisor.wait_failed()
        await asyncio.sleep(max(0.0, began + GONE_WITHIN_S - time.monotonic()))
        return crash, [pid for pid in tree if is_alive(pid)]
    finally:
        await supervisor.stop()


def family(leader: int) -> list[int]:
    """The leader, EngineCore, workers; helpers of Python's multiprocessing left out."""
    children = Path(f"/proc/{leader}/task/{leader}/children").read_text().split()
    names = {int(pid): Path(f"/proc/{pid}/comm").read_text() for pid in children}
    return [leader, *(pid for child, name in names.items() if name.startswith("VLLM::") for pid in family(child))]


def everywhere() -> list[int]:
    """Each process of an engine in this container."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):  # it ended meanwhile
            line = path.read_bytes()
            found += [int(path.parent.name)] if b"vllm.entrypoints" in line or line.startswith(b"VLLM::") else []
    return found


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


@asynccontextmanager
async def streaming(command: Command) -> AsyncIterator[None]:
    body = json.dumps(STREAM).encode()
    reader, writer = await asyncio.open_unix_connection(str(command.socket_path))
    head = "POST /v1/completions HTTP/1.1\r\nHost: e\r\nContent-Type: application/json\r\n"
    writer.write(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
    await reader.readuntil(b"data: ")
    try:
        yield
    finally:
        writer.close()


def neutral(text: str, paths: Mapping[Path, str]) -> str:
    """Paths as they are in an image, so that a kept log tells nothing of the machine that it came from."""
    for path, name in paths.items():
        text = text.replace(str(path), name)
    return text


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--vllm", type=Path, required=True)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--rounds", type=int, default=1, help="of each kill")
    parser.add_argument("--stall-timeout-s", type=float, default=300.0)
    parser.add_argument("names", nargs="*")
    options = parser.parse_args()
    index: dict[str, dict[str, Any]] = yaml.safe_load((HERE / "vllm.yaml").read_text(encoding="utf-8"))
    become_subreaper()
    is_as_told = True
    for name in options.names or [name for name, row in index.items() if "run" in row]:
        row = index[name]
        for _ in range(options.rounds if "kill" in row else 1):
            told = tell(name, row, options)
            is_as_told = is_as_told and told["code"] == row["code"] and not told["left"]
            print(json.dumps(told), flush=True)
    return 0 if is_as_told else 1


def tell(name: str, row: Mapping[str, Any], options: argparse.Namespace) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="ev", dir="/tmp") as made:
        folder = Path(made)
        command = command_of(row["run"], options.vllm, options.model, folder, options.stall_timeout_s)
        crash, left = asyncio.run(provoke(command, row.get("kill")))
        if options.out:
            paths = {folder: "/tmp/x", options.vllm.parent.parent: "/opt/vllm", options.model.parent: "/data/models"}
            log = neutral("\n".join((*crash.log, "")), paths)
            (options.out / f"vllm-{name}.log").write_text(log, encoding="utf-8")
    found = as_error(crash)
    return {
        "name": name,
        "exit_code": crash.exit_code,
        "signal": crash.signal,
        "code": found.exit_code,
        "message": found.message,
        "seconds": round(crash.seconds, 1),
        "left": left,
    }


if __name__ == "__main__":
    sys.exit(main())
