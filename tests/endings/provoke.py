"""Brings about the endings of index.yaml with a real engine, through the supervisor, and tells how each looked.

    provoke.py --engine FOLDER --model FILE.gguf [--out FOLDER] [NAME ...]

Each `run` of the index is a shell script: $ENGINE is a private copy of the engine's folder, $MODEL the model, $TMP an
empty folder. One line of JSON an ending goes to standard output; with `--out` also the log, as NAME.txt, with neutral
paths. It needs nothing but the appliance's own packages, so that it also runs inside an image.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

import yaml

from appliance.command import Command
from appliance.engines.llama.process.endings import as_error
from appliance.engines.llama.process.log import is_error
from appliance.probe.machine.cgroup import query_oom_kills
from appliance.supervisor import Crash, Supervisor, become_subreaper

HERE = Path(__file__).parent
LIMIT_S = 60.0
ENOUGH_LINES = 200


async def provoke(script: str, engine: Path, model: Path, folder: Path, stall_timeout_s: float) -> Crash | None:
    """None when the engine did not end but became ready."""
    shutil.copytree(engine, folder / "engine", symlinks=True)
    (folder / "tmp").mkdir()
    names = {"ENGINE": folder / "engine", "MODEL": model, "TMP": folder / "tmp", "PYTHON": sys.executable}

    async def is_ready() -> bool:
        return False  # every one of them is meant to end

    command = Command(
        argv=("/bin/bash", "-c", script),
        environment={"PATH": "/usr/bin:/bin:/usr/sbin:/sbin", "LANG": "C.UTF-8"}
        | {k: str(v) for k, v in names.items()},
        is_ready=is_ready,
        is_error=is_error,
        stall_timeout_s=stall_timeout_s,
        oom_kills=lambda: query_oom_kills(Path("/")),
    )
    supervisor = Supervisor()
    supervisor.start(command)
    try:
        async with asyncio.timeout(LIMIT_S):
            return await supervisor.wait_failed()
    except TimeoutError:
        return None
    finally:
        await supervisor.stop()


def neutral(text: str, folder: Path, model: Path) -> str:
    """Paths as they are in an image, so that a kept log tells nothing of the machine that it came from."""
    for path, name in ((folder / "engine", "/opt/llama"), (folder / "tmp", "/tmp/x"), (model.parent, "/data/models")):
        text = text.replace(str(path), name)
    return text


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--engine", type=Path, required=True)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--out", type=Path)
    parser.add_argument("names", nargs="*")
    options = parser.parse_args()
    index: dict[str, dict[str, Any]] = yaml.safe_load((HERE / "index.yaml").read_text(encoding="utf-8"))
    become_subreaper()
    for name in options.names or [
        name for name, row in index.items() if "run" in row and "memory_limit_mib" not in row
    ]:
        row = index[name]
        with tempfile.TemporaryDirectory(prefix="end") as made:
            folder = Path(made)
            crash = asyncio.run(
                provoke(row["run"], options.engine, options.model, folder, row.get("stall_timeout_s", 20.0))
            )
            told: dict[str, Any] = {"name": name, "ended": crash is not None}
            if crash is not None:
                error = as_error(crash)
                log = neutral("\n".join((*crash.log[-ENOUGH_LINES:], "")), folder, options.model)
                told |= {
                    "exit_code": crash.exit_code,
                    "signal": crash.signal,
                    "stalled": crash.stalled,
                    "oom_kills": crash.oom_kills,
                    "message": neutral(str(error), folder, options.model),
                    "code": error.exit_code,
                }
                if options.out:
                    (options.out / f"{name}.txt").write_text(log, encoding="utf-8")
            print(json.dumps(told), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
