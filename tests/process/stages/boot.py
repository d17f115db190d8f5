"""`python -m appliance serve` as a user starts it, with a folder that holds a fake engine instead of llama-server."""

from __future__ import annotations

import http.client
import json
import resource
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Self

import gguf
import numpy as np

from appliance.image_facts import CpuVariant, EngineFacts, dump_facts, parse_engine_facts
from tests.builders import IMAGE
from tests.fakes.quick import program
from tests.ports import free_port

ROOT = Path(__file__).parents[3]
FLAGS = (
    *("--model", "--alias", "--host", "--fit", "--ctx-size", "--cache-type-k", "--cache-type-v", "--flash-attn"),
    *(
        "--threads",
        "--threads-batch",
        "--batch-size",
        "--ubatch-size",
        "--parallel",
        "--cache-ram",
        "--log-verbosity",
        "--mmproj",
    ),
)
BUFFERS = (
    "0.00.070.001 I load_tensors:   CPU_Mapped model buffer size =    92.10 MiB",
    "0.00.085.607 I llama_kv_cache:        CPU KV buffer size =    90.00 MiB",
    "0.00.090.110 I sched_reserve:        CPU compute buffer size =    17.51 MiB",
    "0.00.084.300 I llama_context:        CPU  output buffer size =     0.75 MiB",
)
ANSWER_S = 180.0  # for what takes a second on a quiet machine


class Home:
    """A volume with one small model, the facts of an image, and an engine folder."""

    program = "appliance"  # the module that is run

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.data = folder / "data"
        self.profiles = self.data / "profiles"
        self.starts = folder / "starts"
        self.runs = 0
        self.variables: Mapping[str, str] = {}  # of the machine that is described
        self.devices = ""  # what the engine lists of its GPUs
        self.open_files: tuple[int, int] | None = None  # soft and hard limit of what is run; None: as the test's

    @classmethod
    def make(cls, folder: Path) -> Home:
        home = cls(folder)
        for name in ("data/models", "engine", "facts"):
            (folder / name).mkdir(parents=True)
        write_model(home.data / "models/small.gguf")
        engine = EngineFacts(version="1", build=1, commit="abc", flags=FLAGS, kv_types=("f16", "q8_0"))
        (folder / "facts/image_facts.json").write_text(dump_facts(IMAGE))
        (folder / "facts/engine_facts.json").write_text(dump_facts(engine))
        home.set_engine()
        return home

    @classmethod
    def tuned(cls, folder: Path) -> Home:
        """Make a home with a profile, measured by the verb `tune`. Tests take copies of it."""
        home = cls.make(folder)
        done = home.command("tune", budget_s="20")  # for more than one plan, also where a start takes seconds
        assert done.returncode == 0, done.stderr
        home.calm()
        return home

    def calm(self) -> None:
        """Mark the profiles as measured without a disturbance. Other tests may disturb a measurement, and a start on a
        machine at rest measures a disturbed profile once more."""
        for path in self.profiles.glob("*.json"):
            path.write_text(json.dumps({**json.loads(path.read_text()), "disturbance": None, "disturbed_times": 0}))

    def copy(self, folder: Path) -> Self:
        shutil.copytree(self.folder, folder)
        home = type(self)(folder)
        home.starts.unlink(missing_ok=True)
        home.set_engine()
        return home

    def set_engine(self, *knobs: str, where: str = "") -> None:
        """Give the fake engine `knobs` at starts whose command line holds `where`, and none at others. The line ends
        with ` GGML_CPU_VARIANT=…` if the variable is set."""
        buffers = [word for line in BUFFERS for word in ("--log-line", line)]
        run = shlex.join([*program("fake_engine"), *buffers])
        script = f"""#!/bin/sh
test "$*" = --list-devices && printf '%s\\n' {shlex.quote(self.devices)} && exit
said="$*${{GGML_CPU_VARIANT:+ GGML_CPU_VARIANT=$GGML_CPU_VARIANT}}"
printf '%s\\n' "$said" >>{shlex.quote(str(self.starts))}
case "$said " in
*{shlex.quote(where)}*) exec {run} {shlex.join(knobs)} "$@" ;;
*) exec {run} "$@" ;;
esac
"""
        path = self.folder / "engine/llama-server"
        path.write_text(script)
        path.chmod(0o755)

    def set_variants(self, *names: str) -> None:
        """The image has these CPU variants, which any CPU runs; the last is the fastest."""
        path = self.folder / "facts/engine_facts.json"
        variants = tuple(CpuVariant(name=name, isa=()) for name in names)
        path.write_text(dump_facts(replace(parse_engine_facts(path.read_text()), cpu_variants=variants)))

    def set_kernel_check(self, *knobs: str) -> None:
        """A kernel check in the engine's folder; `checked` tells of its runs."""
        argv = [*program("fake_kernel_check"), "--asked", str(self.folder / "checks"), *knobs]
        path = self.folder / "engine/kernel-check"
        path.write_text(f'#!/bin/sh\nexec {shlex.join(argv)} "$@"\n')
        path.chmod(0o755)

    @property
    def checked(self) -> list[str]:
        path = self.folder / "checks"
        return path.read_text().splitlines() if path.exists() else []

    @property
    def started(self) -> list[str]:
        """The command lines that the engine was started with."""
        return self.starts.read_text().splitlines() if self.starts.exists() else []

    def environment(self, runtime_dir: Path, **settings: str) -> dict[str, str]:
        found = {
            "data_dir": str(self.data),
            "engine_dir": str(self.folder / "engine"),
            "facts_dir": str(self.folder / "facts"),
            "runtime_dir": str(runtime_dir),
            "host": "127.0.0.1",
            "port": str(free_port()),  # `doctor` looks at it, and whoever has 11435 is no part of a test
            "log": "json",
            "tune": "off",  # a test of measuring says `first` or `idle`
            # All plans of a fake engine are equally fast, so that a tuner measures many before it stops.
            "budget_s": "10",
            "soak_s": "0",  # a test of the soak says how long it is
            **settings,
        }
        variables = {f"APPLIANCE_{name.upper()}": value for name, value in found.items()}
        own = {"PATH": "/usr/bin:/bin", "HOME": str(self.folder)}
        return {**own, **self.variables, **variables}

    def command(self, *words: str, beside: Serving | None = None, **settings: str) -> subprocess.CompletedProcess[str]:
        """Run a verb that ends by itself. With `beside` it shares that appliance's runtime folder, as in one
        container."""
        with short_folder() as folder:
            runtime_dir = beside.runtime_dir if beside else folder
            return subprocess.run(
                [sys.executable, "-m", self.program, *words],
                env=self.environment(runtime_dir, **settings),
                preexec_fn=self._limit,
                cwd=ROOT,
                capture_output=True,
                text=True,
                timeout=600,
                check=False,
            )

    def _limit(self) -> None:
        if self.open_files is not None:
            resource.setrlimit(resource.RLIMIT_NOFILE, self.open_files)

    def plan(self, **settings: str) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.command("plan", "--json", beside=None, **settings).stdout)["plan"]
        return found

    @property
    def key(self) -> str:
        return (self.data / "secrets/api_key").read_text().strip()

    @contextmanager
    def serving(self, **settings: str) -> Iterator[Serving]:
        """Run the appliance in the block and kill it at the end. Fails if a line of its log holds the key."""
        self.runs += 1
        log = self.folder / f"log{self.runs}"
        with short_folder() as runtime_dir:
            settings = {"port": str(free_port()), **settings}
            with log.open("wb") as file:
                process = subprocess.Popen(
                    [sys.executable, "-m", self.program, "serve"],
                    env=self.environment(runtime_dir, **settings),
                    preexec_fn=self._limit,
                    cwd=ROOT,
                    stdin=subprocess.DEVNULL,
                    stdout=file,
                    stderr=file,
                )
            serving = Serving(self, process, log, runtime_dir, int(settings["port"]))
            try:
                yield serving
            finally:
                process.kill()
                process.wait(60)
        if (self.data / "secrets/api_key").exists():
            assert self.key not in log.read_text()


class Serving:
    """One running appliance, as seen from outside."""

    def __init__(self, home: Home, process: subprocess.Popen[bytes], log: Path, runtime_dir: Path, port: int) -> None:
        self.home = home
        self.process = process
        self.port = port
        self.runtime_dir = runtime_dir
        self._log = log
        self._read_bytes = 0  # of the log: whoever waits for an event looks 50 times a second
        self._events: list[dict[str, Any]] = []
        self._socket = runtime_dir / f"appliance-{process.pid}.sock"

    @property
    def text(self) -> str:
        return self._log.read_text(errors="replace")

    @property
    def events(self) -> list[dict[str, Any]]:
        """The JSON lines so far; the last one may be half written."""
        with self._log.open("rb") as file:
            file.seek(self._read_bytes)
            whole, end, _ = file.read().rpartition(b"\n")
        self._read_bytes += len(whole + end)
        lines = whole.decode(errors="replace").splitlines()
        self._events += [json.loads(line) for line in lines if line.startswith("{") and line.endswith("}")]
        return list(self._events)

    def names(self) -> list[str]:
        return [event["event"] for event in self.events]

    def event(self, name: str, *, timeout_s: float = ANSWER_S) -> dict[str, Any]:
        """Waits for the first event of that name."""

        def find() -> dict[str, Any] | None:
            found = next((event for event in self.events if event["event"] == name), None)
            assert found or self.process.poll() is None, f"ended without {name}: {self.text}"
            return found

        event: dict[str, Any] = eventually(find, timeout_s=timeout_s, what=lambda: f"event {name} in {self.text}")
        return event

    def ask(
        self, method: str, path: str, body: Any = None, *, key: str | None = None, timeout_s: float = 60
    ) -> tuple[int, Any]:
        """Return the status, and the JSON or text of the answer; (0, None) if nobody listens or the connection
        breaks."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=timeout_s)
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        try:
            connection.request(method, path, None if body is None else json.dumps(body), headers)
            reply = connection.getresponse()
            body = reply.read()
            is_json = "json" in (reply.getheader("Content-Type") or "")
            return reply.status, json.loads(body) if is_json else body.decode()
        except (OSError, http.client.HTTPException):
            return 0, None
        finally:
            connection.close()

    def chat(self, *, key: str | None = None) -> tuple[int, Any]:
        body = {"messages": [{"role": "user", "content": "hello there"}]}
        return self.ask("POST", "/v1/chat/completions", body, key=key or self.home.key)

    def measure_now(self) -> None:
        """Ask for measuring, as a user does who waits for it. It then begins whatever else this machine does."""
        begin = lambda: self.ask("POST", "/appliance/v1/tuning", key=self.home.key)[0] == 202  # noqa: E731
        eventually(begin, what=lambda: f"measuring: {self.text}")

    def document(self, name: str) -> Any:
        status, document = self.ask("GET", f"/appliance/v1/{name}", key=self.home.key)
        assert status == 200, document
        return document

    def stream(self, **more: Any) -> socket.socket:
        """A streamed chat, begun; the caller reads and closes. `more` goes into the body."""
        data = json.dumps({"messages": [{"role": "user", "content": "hi"}], "stream": True, **more})
        head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: a\r\nAuthorization: Bearer {self.home.key}\r\n"
        connection = socket.create_connection(("127.0.0.1", self.port), timeout=60)
        connection.sendall(f"{head}Content-Length: {len(data)}\r\n\r\n{data}".encode())
        return connection

    def wait_ready(self) -> None:
        self.event("listening")
        is_ready = lambda: self.ask("GET", "/health/ready")[0] == 200 or self.process.poll() is not None  # noqa: E731
        eventually(is_ready, what=lambda: f"readiness: {self.text}")
        assert self.process.poll() is None, self.text
        self.event("ready")  # which is said a moment after it is true

    def engine_requests(self) -> Mapping[str, int]:
        """Return how often each route of the engine that runs now was asked for."""
        with socket.socket(socket.AF_UNIX) as connection:
            connection.settimeout(60)
            connection.connect(str(self._socket))
            connection.sendall(b"GET /fake/requests HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n")
            received = b"".join(iter(lambda: connection.recv(65536), b""))
        counts: Mapping[str, int] = json.loads(received.partition(b"\r\n\r\n")[2])["counts"]
        return counts

    def engine_pids(self) -> list[int]:
        """Return the pids of all processes with a socket of this appliance in their command line: engines that serve or
        are measured."""
        found = []
        for path in Path("/proc").glob("[0-9]*/cmdline"):
            try:
                words = path.read_bytes().split(b"\0")
            except OSError:
                continue  # gone since the list was made
            ours = str(self._socket).removesuffix(".sock").encode()
            if any(word.startswith(ours) and word.endswith(b".sock") for word in words):
                found.append(int(path.parent.name))
        return found

    def wait_exit(self, *, timeout_s: float = ANSWER_S) -> int:
        return self.process.wait(timeout_s)

    def terminate(self) -> float:
        """Send SIGTERM and return the seconds until the end. Fails unless it exits with 0 and leaves no engine."""
        began = time.monotonic()
        self.process.send_signal(signal.SIGTERM)
        assert self.wait_exit() == 0, self.text
        seconds = time.monotonic() - began
        assert self.engine_pids() == []
        return seconds


def eventually(ask: Callable[[], Any], *, timeout_s: float = ANSWER_S, what: Callable[[], str] = str) -> Any:
    """Return the first true answer. Fails after `timeout_s` with the text of `what`."""
    began = time.monotonic()
    while not (found := ask()):
        waited_s = time.monotonic() - began
        assert waited_s < timeout_s, f"not within {timeout_s} s: {what()}"
        # What takes long is asked for less often: each question costs a millisecond of a CPU that others compute with.
        time.sleep(min(max(0.02, waited_s / 50), 0.05))
    return found


@contextmanager
def short_folder() -> Iterator[Path]:
    """A unix socket's path may have 107 bytes, and pytest's own folders can be longer."""
    folder = Path(tempfile.mkdtemp(prefix="ap", dir="/tmp"))
    try:
        yield folder
    finally:
        shutil.rmtree(folder)


def write_model(path: Path, context: int = 4096) -> None:
    """A model of zeros."""
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(2)
    writer.add_context_length(context)
    writer.add_embedding_length(64)
    writer.add_feed_forward_length(128)
    writer.add_head_count(8)
    writer.add_head_count_kv(2)
    writer.add_token_list([f"token{number}" for number in range(100)])
    for name in ("token_embd.weight", "output.weight"):
        writer.add_tensor(name, np.zeros((100, 64), dtype=np.float32))
    writer.add_tensor("blk.1.attn_norm.weight", np.zeros(64, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False
