"""The real engine on this machine, outside of a container: what `make integration` copies out of the built image."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from importlib.resources import files
from pathlib import Path

import aiohttp
import pytest

from appliance.command import Command
from appliance.engines.engine import Install
from appliance.engines.llama.engine import Llama
from appliance.engines.llama.process.facts import parse_variants
from appliance.image_facts import EngineFacts
from appliance.plan import Plan
from appliance.tune.trials.engine import Bench

COPIED = Path(__file__).parents[3] / ".make/engine"


def find_engine(name: str) -> Path:
    """APPLIANCE_ENGINE_DIR's program of this name, else the copied one; skips the test where there is neither."""
    folder = os.environ.get("APPLIANCE_ENGINE_DIR") or str(COPIED)
    found = shutil.which(name, path=folder)
    if not found:
        pytest.skip(f"needs {name}: `make integration` copies it out of the image, or set APPLIANCE_ENGINE_DIR")
    return Path(found)


def plain_environment(binary: Path) -> dict[str, str]:
    """Return the environment of an engine with the plainest CPU variant that is there: its kernels are the same on
    every CPU."""
    names = [path.name for path in binary.parent.glob("libggml-cpu-*.so")]
    table = files("appliance.engines.llama.process").joinpath("cpu_variants.yaml").read_text(encoding="utf-8")
    variants = parse_variants(names, table)
    return {**os.environ, **({"GGML_CPU_VARIANT": variants[0].name} if variants else {})}


def find_model() -> Path:
    """The demo model that lies beside the copied engine; skips the test where there is none."""
    folder = Path(os.environ.get("APPLIANCE_ENGINE_DIR") or COPIED)
    found = sorted((folder.parent / "models").glob("*.gguf"))
    if not found:
        pytest.skip(f"needs a model in {folder.parent / 'models'}: `make up` fetches one")
    return found[0]


def session_with(command: Command) -> aiohttp.ClientSession:
    """Return a client's session on the socket of an engine that is up."""
    connector = aiohttp.UnixConnector(path=str(command.socket_path))
    return aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=3600))


class Started(Llama):
    """llama.cpp's engine with another program as its server."""

    def __init__(self, start: Callable[[Plan], Command]) -> None:
        self._start = start

    def command(self, plan: Plan, install: Install, socket_path: Path) -> Command:
        return self._start(plan)


def bench_of(start: Callable[[Plan], Command]) -> Bench:
    """Return a bench whose engines `start` starts. Nothing else of the engine exists."""
    nowhere = Path("/nonexistent")
    facts = EngineFacts(version="1", build=1, commit="abc", flags=(), kv_types=())
    install = Install(engine_dir=nowhere, facts=facts, cache_dir=nowhere)
    return Bench(engine=Started(start), install=install, socket_path=nowhere)
