"""A Docker daemon on a unix socket with containers that only look alive: each answers as an appliance, by the knobs.

    python fake_daemon.py SOCKET --ready-after 0.3 --image appliance:llama-cpu

Prints "ready" when it listens. What was asked of it stands in SOCKET.log, one JSON line a request.
"""

from __future__ import annotations

import argparse
import io
import json
import socket
import sys
import tarfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, parse_qsl, unquote, urlsplit

KEY = "sk-fake"
WORDS = ("It ", "guides ", "ships.")
SPEEDS = {
    "measured": {
        "at": [{"depth": 32, "decode_tokens_per_s": 100.0, "decode_uncertainty": 0.0, "prefill_tokens": 32,
                "prefill_tokens_per_s": 300.0}],
        "jobs": [{"workload": "chat", "tokens_in": 512, "tokens_out": 256, "ttft_s": 1.0, "job_s": 3.0}],
    },
    "predicted": None,
}  # fmt: skip


@dataclass
class Container:
    id: str
    name: str
    config: dict[str, Any]
    host: dict[str, Any]
    state: str = "created"
    exit_code: int = 0
    began_s: float = 0.0
    told: list[str] = field(default_factory=list)  # the phases that somebody has been told of
    server: ThreadingHTTPServer | None = None
    key: bytes = (KEY + "\n").encode()
    mode: str = "balanced"
    posted: int = 0  # requests for work
    written: bytes = b""  # the last archive that was put onto the volume through it
    log: list[bytes] = field(default_factory=list)


class Daemon:
    def __init__(self, knobs: argparse.Namespace) -> None:
        self.knobs = knobs
        self.containers: dict[str, Container] = {}
        self.starts = 0
        # One change of a container at a time, as a daemon does: who removes one that is being started waits for that.
        self.changing = threading.RLock()

    def find(self, word: str) -> Container | None:
        found = self.containers.values()
        return next((each for each in found if word in (each.id, each.name, "/" + each.name)), None)

    def start(self, container: Container) -> tuple[int, Any]:
        with self.changing:
            return self._started(container)

    def remove(self, container: Container) -> None:
        with self.changing:
            self.end(container)
            self.containers.pop(container.id, None)

    def _started(self, container: Container) -> tuple[int, Any]:
        if container.id not in self.containers:
            return 404, {"message": f"No such container: {container.id}"}
        if container.server:
            return 304, None
        self.starts += 1
        if self.knobs.refuse_start:
            return 500, {"message": self.knobs.refuse_start}
        [(bind, port)] = self.bindings(container)
        try:
            container.server = _appliance(self, container, bind, port)
        except OSError:
            return 500, {"message": f"Bind for {bind}:{port} failed: port is already allocated"}
        container.state, container.began_s = "running", time.time()
        container.log = [line.encode() for line in self.knobs.log]
        if self.knobs.exit is not None and self.starts > self.knobs.exit_from:
            self.end(container, self.knobs.exit)
        return 204, None

    def bindings(self, container: Container) -> list[tuple[str, int]]:
        each = next(iter((container.host.get("PortBindings") or {}).values()))[0]
        return [(each["HostIp"], int(each["HostPort"]))]

    def end(self, container: Container, code: int = 0) -> None:
        with self.changing:
            if container.server:
                container.server.shutdown()
                container.server.server_close()
            container.server, container.state, container.exit_code = None, "exited", code

    def phase(self, container: Container) -> dict[str, Any]:
        """The document of readiness. However late somebody asks, no phase is over before it was told."""
        document = self._phase(container, time.time() - container.began_s)
        if container.config["Image"].startswith(self.knobs.loading_image):
            document = {"status": "not ready", "phase": "loading", "message": "the model is being loaded: m.gguf"}
        container.told.append(document.get("phase", "ready"))
        return document

    def _phase(self, container: Container, age: float) -> dict[str, Any]:
        if self.knobs.fetch_for and (age < self.knobs.fetch_for or "fetching" not in container.told):
            done = int(4_900_000_000 * min(1.0, age / self.knobs.fetch_for))
            return {"status": "not ready", "phase": "fetching", "message": "weights are fetched", "bytes_done": done,
                    "bytes_total": 4_900_000_000, "bytes_per_s": 38e6, "seconds_left": 97.0}  # fmt: skip
        is_loading = age < self.knobs.fetch_for + self.knobs.ready_after or "loading" not in container.told
        if self.knobs.ready_after and is_loading:
            return {"status": "not ready", "phase": "loading", "message": "the model is being loaded: m.gguf"}
        return {"status": "ready"}

    def status(self, container: Container) -> dict[str, Any]:
        ready = self.phase(container)
        speeds = json.loads(json.dumps(SPEEDS))
        if container.config["Image"].startswith(self.knobs.slow_image):
            speeds["measured"]["at"][0]["decode_tokens_per_s"] = 90.0
        is_measured = self.knobs.tuning == "measured"
        return {
            "phase": ready.get("phase", "ready"), "message": ready.get("message", "the model is ready"),
            "version": "0.1.0", "model": "m", "context": 8192, "chosen": "2 threads", "mode": container.mode,
            "modes": [{"mode": "balanced", "plan": "2 threads", "context": 8192, "decode_tokens_per_s": 100.0,
                       "prefill_tokens_per_s": None, "is_measured": True, "is_serving": container.mode == "balanced"},
                      {"mode": "speed", "plan": None, "context": None, "decode_tokens_per_s": None,
                       "prefill_tokens_per_s": None, "is_measured": False, "is_serving": False}],
            "mode_switch": None,
            "speed": "decodes 100 tok/s" if is_measured else None, "predicted_speed": "120 tok/s of decode",
            "speeds": speeds if is_measured else {"measured": None, "predicted": None},
            "tuning": self.knobs.tuning, "engine_restarts": 0,
            "allocated": {"model": self.knobs.held_mib, "kv": 50.0, "compute": 5.0, "output": 1.0, "recurrent": 0.0,
                          "repacked": 0.0, "devices": [["GPU0", 120.0]]},
            **({"fetch": ready} if ready.get("phase") == "fetching" else {}),
        }  # fmt: skip


def _appliance(daemon: Daemon, container: Container, bind: str, port: int) -> ThreadingHTTPServer:
    server = ApplianceServer(daemon, container, bind, port)
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
    return server


class _Quiet(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def say(self, code: int, document: Any = None) -> None:
        self.send(code, b"" if document is None else json.dumps(document).encode(), "application/json")

    def send(self, code: int, data: bytes, kind: str, headers: dict[str, str] | None = None) -> None:
        self.send_response(code)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(data)))
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(data)

    def chunk(self, *chunks: bytes) -> None:
        """Send chunks of a chunked body. An empty chunk ends the body."""
        for data in chunks:
            self.wfile.write(b"%x\r\n%b\r\n" % (len(data), data))

    def address_string(self) -> str:
        return "unix"

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing: what was asked is written as JSON."""


class ApplianceServer(ThreadingHTTPServer):
    allow_reuse_address = True

    def __init__(self, daemon: Daemon, container: Container, bind: str, port: int) -> None:
        self.daemon, self.container = daemon, container
        super().__init__((bind, port), ApplianceHandler)


class ApplianceHandler(_Quiet):
    server: ApplianceServer

    @property
    def knobs(self) -> argparse.Namespace:
        return self.server.daemon.knobs

    def do_GET(self) -> None:
        if self.path == "/health/ready":
            document = self.server.daemon.phase(self.server.container)
            return self.say(200 if document["status"] == "ready" else 503, document)
        if self._is_stranger():
            return self.say(401, {"error": {"message": "invalid API key", "code": "invalid_api_key"}})
        if self.path == "/v1/models":
            return self.say(200, {"object": "list", "data": [{"id": "m", "object": "model", "context_length": 8192}]})
        if self.path == "/metrics":
            in_flight = 0 if self.server.container.posted else 1  # the client of before leaves
            text = (
                f"# TYPE a gauge\nappliance_requests_in_flight {in_flight}\nappliance_stream_events_per_second 42.5\n"
            )
            route = 'method="POST",route="/v1/completions",status="200"'
            text += f"appliance_requests_total{{{route}}} {self.server.container.posted}\n"
            return self.send(200, text.encode(), "text/plain")
        if self.path == "/appliance/v1/events":
            event = b'event: requests\ndata: {"requests":[]}\n\n'
            return self.send(200, event, "text/event-stream")
        if self.path.startswith("/appliance/v1/usage?"):
            sums = {"requests": 3, "errors": 1, "uncounted": 1, "tokens_in": 1200, "tokens_cached": 0, "tokens_out": 34,
                    "seconds": 2.5}  # fmt: skip
            asked = dict(parse_qsl(self.path.partition("?")[2]))
            rows = [{"key": "ci", **sums}, {"key": "", **sums}]
            document = {"days": int(asked["days"]), "since": "2026-01-01", "by": asked.get("by"), "rows": rows}
            return self.say(200, {**document, "total": {**sums, "requests": 6}, "problem": None})
        documents = {"status": self.server.daemon.status(self.server.container), "tuning": {"measurements": [{}]}}
        return self.say(200, documents[self.path.rsplit("/", 1)[-1]])

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self._is_stranger():
            return self.say(401, {"error": {"message": "invalid API key", "code": "invalid_api_key"}})
        if self.path == "/appliance/v1/tuning":
            if self.knobs.tuning == "off":
                return self.say(409, {"error": {"message": "measuring is off", "code": "tuning_off"}})
            return self.say(200, {"state": self.knobs.tuning})
        if self.path == "/appliance/v1/mode":
            if body["mode"] == "context":
                return self.say(409, {"error": {"message": "plans are being measured", "code": "mode_switching"}})
            self.server.container.mode = body["mode"]
            return self.say(202, {"mode": body["mode"], "plan": "2 threads", "state": "switching"})
        if self.path == "/v1/completions":
            self.server.container.posted += 1
            return self._complete()
        if self.knobs.answer == "refused":
            return self.say(503, {"error": {"message": "the model is being loaded", "code": "model_loading"}})
        return self._stream(len(body["messages"]))

    def _complete(self) -> None:
        """Answer in four events, with the times of a small engine."""
        slow = 1.3 if self.server.container.config["Image"].startswith(self.knobs.slow_image) else 1.0
        self._begin_stream()
        for wait_s in (0.12, 0.08, 0.08, 0.08):
            time.sleep(wait_s * slow)
            self._event({"choices": [{"text": "ship", "logprobs": {"content": [{"token": "ship", "logprob": -0.5}]}}]})
        self.chunk(b"data: [DONE]\n\n", b"")

    def _begin_stream(self) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        self.close_connection = True

    def _stream(self, messages: int) -> None:
        self._begin_stream()
        for word in (f"{messages}: ", *WORDS):
            if self.knobs.answer == "error" and word == WORDS[-1]:
                self._event({"error": {"message": "shutting down"}})
                break
            if self.knobs.answer == "torn" and word == WORDS[-1]:
                return None
            self._event({"choices": [{"delta": {"content": word}}]})
        return self.chunk(b"data: [DONE]\n\n", b"")

    def _event(self, document: Any) -> None:
        self.chunk(f"data: {json.dumps(document)}\n\n".encode())

    def _is_stranger(self) -> bool:
        wanted = self.knobs.wanted_key
        return bool(wanted) and self.headers.get("Authorization") != f"Bearer {wanted}"


class DockerHandler(_Quiet):
    server: UnixServer

    @property
    def daemon(self) -> Daemon:
        return self.server.daemon

    @property
    def knobs(self) -> argparse.Namespace:
        return self.daemon.knobs

    def do_GET(self) -> None:
        self._answer("GET")

    def do_HEAD(self) -> None:
        self.say(404)

    def do_POST(self) -> None:
        self._answer("POST")

    def do_DELETE(self) -> None:
        self._answer("DELETE")

    def do_PUT(self) -> None:
        self._answer("PUT")

    def _answer(self, method: str) -> None:
        parts = urlsplit(self.path)
        length = int(self.headers.get("Content-Length") or 0)
        data = self.rfile.read(length)
        if method == "PUT":  # of an archive
            self.daemon.containers[parts.path.split("/")[-2]].written = data
            return self.say(200)
        self.body = json.loads(data or b"null")
        self.query = {name: values[0] for name, values in parse_qs(parts.query).items()}
        words = parts.path.split("/")[2:] if parts.path.startswith("/v1.") else parts.path.split("/")[1:]
        with self.server.log.open("a") as file:
            file.write(json.dumps({"method": method, "path": "/".join(words), "body": self.body}) + "\n")
        if self.knobs.broken and words[-1] != "version":
            return self.say(500, {"message": self.knobs.broken})
        name = "_".join((method.lower(), words[0], *([words[-1]] if len(words) > 1 else [])))
        if words[0] == "volumes":
            inspected = {"Name": words[1], "Labels": None, "Mountpoint": self.knobs.volume}
            return self.say(200, inspected) if self.knobs.volume else self.say(404, {"message": "no such volume"})
        if words[0] == "networks":  # all are of the project that somebody asks for
            names = [{"Name": each} for each in self.knobs.network]
            return self.say(200, names if method == "GET" else None)
        if words[0] in ("containers", "images") and len(words) > 2:
            return self._of_one(method, words)
        answers: dict[str, Callable[[], None]] = {
            "get_version": lambda: self.say(200, {"ApiVersion": "1.45", "Version": "26.1"}),
            "get_info": self._info,
            "get_containers_json": self._list,
            "post_containers_create": self._create,
            "get_images_json": lambda: self.say(200, [_image_row(each, self.knobs) for each in self.knobs.image]),
            "post_images_create": self._pull,
        }
        if method == "DELETE":
            return self._remove(words[1])
        return answers[name]()

    def _info(self) -> None:
        runtimes: dict[str, Any] = {"runc": {}, **({"nvidia": {}} if self.knobs.nvidia_runtime else {})}
        devices = [{"Source": "cdi", "ID": each} for each in self.knobs.cdi]
        self.say(200, {"Runtimes": runtimes, "DiscoveredDevices": devices, "SecurityOptions": self.knobs.security})

    def _list(self) -> None:
        filters = json.loads(self.query.get("filters", "{}"))
        rows = [_row(self.daemon, each) for each in self.daemon.containers.values()]
        for wanted in filters.get("name", []):
            rows = [row for row in rows if row["Names"][0].lstrip("/") == wanted[3:-1]]
        for wanted in filters.get("label", []):
            rows = [row for row in rows if wanted in row["Labels"]]
        self.say(200, rows)

    def _create(self) -> None:
        name = self.query.get("name") or f"made-{len(self.daemon.containers)}"
        if self.daemon.find(name):
            return self.say(409, {"message": f'Conflict. The container name "/{name}" is already in use'})
        if self.body["Image"] not in self.knobs.image:
            return self.say(404, {"message": f"No such image: {self.body['Image']}"})
        id_ = f"{len(self.daemon.containers) + 1:064x}"
        made = Container(id=id_, name=name, config=self.body, host=self.body.pop("HostConfig"))
        made.key = b"" if self.knobs.key == "empty" else made.key
        self.daemon.containers[id_] = made
        return self.say(201, {"Id": id_, "Warnings": []})

    def _of_one(self, method: str, words: list[str]) -> None:
        if words[0] == "images":
            name = unquote("/".join(words[1:-1]))  # of `@` before a digest
            if name not in self.knobs.image:
                return self.say(404, {"message": f"No such image: {name}"})
            return self.say(200, _image(name, self.knobs))
        found = self.daemon.find(words[1])
        if found is None:
            return self.say(404, {"message": f"No such container: {words[1]}"})
        return self._of_container(words[-1], found)

    def _of_container(self, word: str, found: Container) -> None:
        if word == "json":
            return self.say(200, _inspected(self.daemon, found))
        if word == "start":
            return self.say(*self.daemon.start(found))
        if word == "stop":
            self.daemon.end(found)
            return self.say(204)
        if word == "kill":  # with the exit code in place of a signal
            self.daemon.end(found, int(self.query["signal"]))
            return self.say(204)
        if word == "update":
            found.host.update(self.body)
            return self.say(200, {"Warnings": []})
        if word == "rename":
            found.name = self.query["name"]
            return self.say(204)
        if word == "logs":
            return self._logs(found)
        if word == "stats" and self.knobs.cpu_time == "own":  # all that this machine does
            return self.say(200, {"cpu_stats": {"cpu_usage": {"total_usage": int(time.time() * 1e12)}}})
        if word == "archive" and self.query["path"].endswith("/court"):
            if not found.written:
                return self.say(404, {"message": "Could not find the file"})
            return self.send(200, found.written, "application/x-tar", {"X-Docker-Container-Path-Stat": "e30="})
        if word == "archive" and self.knobs.key != "none":
            return self.send(200, _tar(found.key), "application/x-tar", {"X-Docker-Container-Path-Stat": "e30="})
        return self.say(404, {"message": f"Could not find the file in container: {word}"})

    def _logs(self, found: Container) -> None:
        tail = self.query.get("tail", "all")
        lines = found.log if tail == "all" else found.log[len(found.log) - int(tail) :]
        if self.query.get("follow") != "1":
            return self.send(200, b"".join(map(_framed, lines)), "application/vnd.docker.raw-stream")
        self.send_response(200)
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        self.chunk(*map(_framed, lines))
        while found.server:  # it is alive
            self.chunk(_framed(b"still here"))
            time.sleep(0.05)
        return self.chunk(b"")

    def _remove(self, id_: str) -> None:
        found = self.daemon.find(id_)
        if found is None:
            return self.say(404, {"message": f"No such container: {id_}"})
        self.daemon.remove(found)
        return self.say(204)

    def _pull(self) -> None:
        tag = self.query["tag"]
        name = f"{self.query['fromImage']}{'@' if tag.startswith('sha256:') else ':'}{tag}"
        if self.knobs.pull == "refused":
            return self.say(404, {"message": f"pull access denied for {name}"})
        self.knobs.image.append(name)
        events = [{"status": "Downloading", "id": "a", "progressDetail": {"current": 5, "total": 10}}]
        if self.knobs.pull == "error":
            events.append({"error": "unexpected EOF"})
        if self.knobs.pull == "tampered":
            said = f"unexpected commit digest sha256:0, expected {tag}: failed precondition"
            events.append({"error": f"failed commit on ref {tag}: {said}"})
        self.send_response(200)
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        return self.chunk(*(json.dumps(event).encode() + b"\r\n" for event in events), b"")


def _framed(line: bytes) -> bytes:
    """Return a log line with the header that Docker puts before lines of standard output."""
    return b"\x01\0\0\0" + (len(line) + 1).to_bytes(4, "big") + line + b"\n"


def _tar(content: bytes) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as tar:
        info = tarfile.TarInfo("api_key")
        info.size = len(content)
        tar.addfile(info, io.BytesIO(content))
    return out.getvalue()


def _labels(image: str, knobs: argparse.Namespace) -> dict[str, str]:
    cell = image.rsplit(":", 1)[-1]
    given = dict(each.split("=", 1) for each in knobs.label)
    return {"io.appliance.cell": cell, "io.appliance.sm": "none", "org.opencontainers.image.version": image, **given}


def _image(name: str, knobs: argparse.Namespace) -> dict[str, Any]:
    return {"Id": f"sha256:{name}", "Config": {"Labels": _labels(name, knobs)}}


def _image_row(name: str, knobs: argparse.Namespace) -> dict[str, Any]:
    return {"Id": f"sha256:{name}", "RepoTags": [name], "Labels": _labels(name, knobs)}


def _row(daemon: Daemon, each: Container) -> dict[str, Any]:
    bound = [{"IP": bind, "PrivatePort": 11435, "PublicPort": port} for bind, port in daemon.bindings(each)]
    image = each.config["Image"]
    labels = {**_labels(image, daemon.knobs), **(each.config.get("Labels") or {})}
    words = "Up" if each.server else f"Exited ({each.exit_code})"
    return {"Id": each.id, "Names": [f"/{each.name}"], "Image": image, "ImageID": f"sha256:{image}",
            "State": each.state, "Created": int(each.began_s), "Status": words,
            "Labels": labels, "Ports": bound if each.server else []}  # fmt: skip


def _inspected(daemon: Daemon, each: Container) -> dict[str, Any]:
    began = time.strftime("%Y-%m-%dT%H:%M:%S.000000001Z", time.gmtime(each.began_s))
    state = {"Status": each.state, "ExitCode": each.exit_code, "OOMKilled": daemon.knobs.oom, "StartedAt": began}
    return {"Id": each.id, "Name": each.name, "State": state, "Config": {**each.config, "Tty": False}, "Mounts": []}


class UnixServer(ThreadingHTTPServer):
    address_family = socket.AF_UNIX
    daemon_threads = True

    def __init__(self, address: Any, daemon: Daemon, log: Path) -> None:
        self.daemon, self.log = daemon, log
        super().__init__(address, DockerHandler)

    def server_bind(self) -> None:
        self.socket.bind(self.server_address)  # its path
        self.server_name, self.server_port = "unix", 0

    def handle_error(self, *_: Any) -> None:
        """Ignore a client that was killed before it read the answer."""

    def get_request(self) -> tuple[Any, Any]:
        request, _ = super().get_request()
        return request, ("unix", 0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("socket", type=Path)
    parser.add_argument("--image", action="append", default=[], help="that is here")
    parser.add_argument("--label", action="append", default=[], help="NAME=VALUE of every image")
    parser.add_argument("--volume", help="every volume is there, with its contents in this folder")
    parser.add_argument("--network", action="append", default=[], help="that is here")
    parser.add_argument("--nvidia-runtime", action="store_true")
    parser.add_argument("--cdi", action="append", default=[], help="name of a device")
    parser.add_argument("--security", action="append", default=[])
    parser.add_argument("--fetch-for", type=float, default=0.0)
    parser.add_argument("--ready-after", type=float, default=0.0)
    parser.add_argument("--exit", type=int, help="each container ends with it at once")
    parser.add_argument("--exit-from", type=int, default=0, help="only after so many starts")
    parser.add_argument("--oom", action="store_true")
    parser.add_argument("--log", action="append", default=[])
    parser.add_argument("--key", choices=("whole", "empty", "none"), default="whole")
    parser.add_argument("--wanted-key", default=KEY)
    parser.add_argument("--answer", choices=("whole", "error", "refused", "torn"), default="whole")
    parser.add_argument("--tuning", default="measured")
    parser.add_argument("--loading-image", default="none", help="it loads for ever")
    parser.add_argument("--slow-image", default="none", help="its decode is 10 %% slower, its completions are 30 %%")
    parser.add_argument("--held-mib", type=float, default=100.0, help="size of the weights in memory")
    parser.add_argument("--cpu-time", choices=("own", "unknown"), default="own", help="of containers")
    parser.add_argument("--refuse-start", help="what Docker says instead of starting")
    parser.add_argument("--broken", help="what Docker says to everything")
    parser.add_argument("--pull", choices=("whole", "refused", "error", "tampered"), default="whole")
    knobs = parser.parse_args()
    address: Any = str(knobs.socket)
    server = UnixServer(address, Daemon(knobs), knobs.socket.with_suffix(".log"))
    print("ready", flush=True)
    sys.stdin.close()
    server.serve_forever(poll_interval=0.05)


if __name__ == "__main__":
    main()
