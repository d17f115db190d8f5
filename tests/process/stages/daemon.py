"""The host command as a program, against a Docker daemon with knobs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from docker.api import APIClient

from tests.ports import free_port
from tests.process.stages.boot import short_folder
from tests.signals import hear_all

ROOT = Path(__file__).parents[3]
FAKE = ROOT / "tests/fakes/fake_daemon.py"
IMAGE = "appliance:llama-cpu"
RTX_4090 = "NVIDIA GeForce RTX 4090, 580.95.05, 8.9, 24564"


@dataclass(kw_only=True)
class Done:
    code: int
    out: str
    err: str


@dataclass(kw_only=True)
class Host:
    """One machine: its folder, its programs, its daemon."""

    folder: Path
    environment: dict[str, str] = field(repr=False)
    place: Path = ROOT  # of the package

    @property
    def log(self) -> Path:
        return self.folder / "d.log"

    @property
    def model_path(self) -> str:
        """The path of the first model, which `model` writes."""
        return str(self.folder / "tiny.gguf")

    def model(self, name: str = "tiny.gguf") -> str:
        path = self.folder / name
        path.write_bytes(b"GGUF")
        return str(path)

    def gpu(self, *rows: str, code: int = 0, lacking: str = "") -> None:
        """An nvidia-smi that answers each query of its fields as the real one does, but refuses the one `lacking`."""
        names = [name for name in ("name", "driver_version", "compute_cap", "memory.total") if name != lacking]
        script = f"""#!{sys.executable}
import sys
query = next(word for word in sys.argv if word.startswith("--query-gpu=")).partition("=")[2].split(",")
if {lacking!r} in query:
    sys.exit('Field "{lacking}" is not a valid field to query.')
for row in {list(rows)!r}:
    fields = dict(zip({names!r}, row.split(", ")))
    print(", ".join(fields.get(name, row) for name in query) if len(fields) > 1 else row)
sys.exit({code})
"""
        path = self.folder / "bin/nvidia-smi"
        path.parent.mkdir(exist_ok=True)
        path.write_text(script)
        path.chmod(0o755)

    def asked(self, path: str) -> list[dict[str, Any]]:
        """Return the bodies of the daemon's requests with this path."""
        return [row["body"] for row in self.rows() if row["path"] == path]

    def told(self, verb: str) -> list[dict[str, Any]]:
        """Return the bodies of the daemon's requests with this verb, of any container."""
        return [
            row["body"]
            for row in self.rows()
            if row["path"].startswith("containers/") and row["path"].endswith(f"/{verb}")
        ]

    def rows(self) -> list[dict[str, Any]]:
        """Return what was asked of the daemon, without a line that it is writing now."""
        lines = self.log.read_text().splitlines(keepends=True) if self.log.exists() else []
        return [json.loads(line) for line in lines if line.endswith("\n")]

    def created(self) -> dict[str, Any]:
        """Return the body of the last request for a new container."""
        return self.asked("containers/create")[-1]

    @contextmanager
    def begin(self, *words: str) -> Iterator[subprocess.Popen[str]]:
        argv = [sys.executable, "-m", "appliance.host", *words]
        pipe = subprocess.PIPE
        with subprocess.Popen(
            argv,
            cwd=self.place,
            env=self.environment,
            text=True,
            preexec_fn=hear_all,
            stdin=pipe,
            stdout=pipe,
            stderr=pipe,
        ) as program:
            try:
                yield program
            finally:
                program.kill()

    def run(self, *words: str, stdin: str = "") -> Done:
        with self.begin(*words) as program:
            out, err = program.communicate(stdin, timeout=180)
        assert "Traceback" not in err, err
        return Done(code=program.returncode, out=out, err=err)

    def end(self, name: str, code: int) -> None:
        """End the container with this exit code, as if it ended by itself."""
        with APIClient(self.environment["DOCKER_HOST"], version="1.45") as client:
            client.kill(f"appliance-{name}", signal=str(code))

    def serving(self, *words: str) -> int:
        """Start an appliance in the background and return its port."""
        port = free_port()
        done = self.run("run", self.model(), "--name", "one", "-d", "--image", IMAGE, "--port", str(port), *words)
        assert done.code == 0, done.err
        return port


@contextmanager
def on_host(*knobs: str, daemon: bool = True) -> Iterator[Host]:
    """Run a machine whose Docker daemon has the images of `--image`, or the CPU's image if none is given."""
    with short_folder() as folder:
        environment = {**os.environ, "DOCKER_HOST": f"unix://{folder}/d.sock", "HOME": str(folder), "TERM": "dumb"}
        environment["PATH"] = f"{folder}/bin"  # what this machine has, such as nvidia-smi, is not there
        host = Host(folder=folder, environment=environment)
        if not daemon:
            yield host
            return
        images = () if "--image" in knobs else ("--image", IMAGE)
        argv = [sys.executable, str(FAKE), f"{folder}/d.sock", *images, *knobs]
        with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as fake:
            try:
                assert fake.stdout
                assert fake.stdout.readline() == "ready\n"
                yield host
            finally:
                fake.kill()
