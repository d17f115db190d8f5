"""The fake hub as a process of a test."""

from __future__ import annotations

import atexit
import json
import random
import struct
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from appliance.settings import HubSettings

ROOT = Path(__file__).parents[3]
MIB = 2**20
REPO = "org/Tiny-GGUF"


@dataclass(frozen=True, kw_only=True)
class RunningHub:
    endpoint: str
    cdn: str
    folder: Path
    log: Path

    def requests(self, *, host: str | None = None) -> list[dict[str, Any]]:
        rows = [json.loads(line) for line in self.log.read_text().splitlines()] if self.log.exists() else []
        return [row for row in rows if host in (None, row["host"])]

    @property
    def bytes_sent(self) -> int:
        return sum(row["sent"] for row in self.requests())

    def settings(self, **given: Any) -> HubSettings:
        return HubSettings(**{"endpoint": self.endpoint, "patience_s": 60.0, **given})

    def environment(self, **given: str) -> dict[str, str]:
        return {"HF_ENDPOINT": self.endpoint, **given}


@cache
def program(module: str = "tests.fakes.hub") -> dict[str, str]:
    """One for all tests of a worker, since its start takes longer than most of them; it ends when its input does."""
    argv = [sys.executable, "-m", module, "/nowhere"]
    program = subprocess.Popen(argv, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert program.stdout
    line = program.stdout.readline()
    assert line, f"{module} did not start"
    atexit.register(program.communicate)
    addresses: dict[str, str] = json.loads(line)
    return addresses


@contextmanager
def running_hub(folder: Path, *knobs: str) -> Iterator[RunningHub]:
    """Serves `folder`; what is under it may change meanwhile. One at a time."""
    log = turn(program(), folder, *knobs)
    yield RunningHub(**program(), folder=folder, log=log)


def turn(addresses: dict[str, str], folder: Path, *knobs: str) -> Path:
    """Give the running program a folder and knobs. Returns its log, which is empty."""
    log = folder.parent / f"{folder.name}.log"
    log.unlink(missing_ok=True)
    body = json.dumps([str(folder), "--log", str(log), *knobs]).encode()
    request = urllib.request.Request(f"{addresses['endpoint']}/.knobs", data=body, method="PUT")
    urllib.request.urlopen(request).close()
    return log


def gguf_bytes(size: int, seed: int = 1) -> bytes:
    """The beginning of a GGUF file without keys or tensors, then noise: each place of it is another."""
    return b"GGUF" + struct.pack("<IQQ", 3, 0, 0) + random.Random(seed).randbytes(size - 24)


def put(folder: Path, name: str, data: bytes, repo: str = REPO) -> Path:
    path = folder / repo / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    return path
