"""The fake hub as a process of a test."""

from __future__ import annotations

import json
import random
import struct
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
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
        return HubSettings(**{"endpoint": self.endpoint, "patience_s": 5.0, **given})

    def environment(self, **given: str) -> dict[str, str]:
        return {"HF_ENDPOINT": self.endpoint, **given}


@contextmanager
def running_hub(folder: Path, *knobs: str) -> Iterator[RunningHub]:
    """Serves `folder`; what is under it may change meanwhile."""
    log = folder.parent / f"{folder.name}.log"
    argv = [sys.executable, "-m", "tests.fakes.hub", str(folder), "--log", str(log), *knobs]
    with subprocess.Popen(argv, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as program:
        try:
            assert program.stdout
            line = program.stdout.readline()
            assert line, "the fake hub did not start"
            yield RunningHub(**json.loads(line), folder=folder, log=log)
        finally:
            program.kill()


def gguf_bytes(size: int, seed: int = 1) -> bytes:
    """The beginning of a GGUF file without keys or tensors, then noise: each place of it is another."""
    return b"GGUF" + struct.pack("<IQQ", 3, 0, 0) + random.Random(seed).randbytes(size - 24)


def put(folder: Path, name: str, data: bytes, repo: str = REPO) -> Path:
    path = folder / repo / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    return path
