"""A Docker engine of one container, and that container's port: answers docker-py over TCP, as the knobs say.

    python fake_docker.py --ports bound --status-document error

Prints its own address when it listens. `--gone-after N` forgets the container after N looks at it, `--break-after N`
answers 500 from then on. Each change of its policy of restarts is printed.
`--tuning STATE` is what it says of its measuring, which ends with the third request for it.
"""

from __future__ import annotations

import argparse
import io
import json
import tarfile
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

STATUS = {
    **{"model": "m", "context": 512, "chosen": "2 threads", "speed": "10 tok/s"},
    **{"predicted_speed": "12 tok/s of decode", "tuning": "measured"},
}
WORDS = ("It ", "guides ", "ships", " at ", "night.")
TOKEN_S = 0.1
ERROR = {"error": {"message": "shutting down", "type": "service_unavailable", "param": None, "code": "shutting_down"}}


class Handler(BaseHTTPRequestHandler):
    knobs: argparse.Namespace
    looks = 0
    asked = 0
    policy = "on-failure"

    def do_GET(self) -> None:
        path = self.path.split("?")[0]
        if path.endswith("/version"):
            self._json({"ApiVersion": "1.45", "Version": "26"})
        elif path.endswith("/containers/json"):
            self._list()
        elif path.endswith("/containers/c1/json"):
            self._container()
        elif path.endswith("/containers/c1/archive"):
            self._bytes(key_archive(), "application/x-tar", stat="e30=")
        elif path.endswith("/containers/c1/logs"):
            data = "\n".join(self.knobs.log).encode()
            self._bytes(b"\x01\0\0\0" + len(data).to_bytes(4, "big") + data, "application/vnd.docker.raw-stream")
        elif path == "/health/ready":
            self._json({"status": "ready" if self.knobs.ready else "loading", "message": "loading the model"})
        elif path == "/appliance/v1/status":
            status = STATUS | ({} if self.knobs.tuning == "measured" else {"speed": None})
            status["tuning"] = self.knobs.tuning
            unfit = {**status, "speed": None}
            new = {**status, "measured_since_start": True}
            told = {"whole": status, "new": new, "unfit": unfit, "error": ERROR, "list": [1]}
            self._json(told[self.knobs.status_document])
        elif path == "/appliance/v1/tuning":
            self._json({"state": self.knobs.tuning, "measurements": [{}] * type(self).asked})
        else:
            self._json({"message": "no such thing"}, 404)

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        path = self.path.split("?")[0]
        if path.endswith("/containers/c1/update"):
            type(self).policy = json.loads(body)["RestartPolicy"]["Name"]
            print(f"restarts: {self.policy}", flush=True)
            self._json({"Warnings": []})
        elif path == "/appliance/v1/tuning":
            self._begin_tuning()
        elif path == "/v1/chat/completions":
            self._stream()
        else:
            self._json({"message": "no such thing"}, 404)

    def _stream(self) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.end_headers()
        for word in ("".join(WORDS),) if self.knobs.answer == "at-once" else WORDS:
            if self.knobs.answer == "error" and word == WORDS[-1]:
                self._event(ERROR)
                return
            self._event({"choices": [{"delta": {"content": word}}]})
            time.sleep(TOKEN_S)
        self._event({"choices": [], "usage": {"completion_tokens": len(WORDS)}})
        self.wfile.write(b"data: [DONE]\n\n")

    def _event(self, document: Any) -> None:
        self.wfile.write(f"data: {json.dumps(document)}\n\n".encode())

    def _begin_tuning(self) -> None:
        type(self).asked += 1
        if self.knobs.tuning in ("off", "failed"):
            code = f"tuning_{self.knobs.tuning}"
            self._json({"error": {"message": f"it is {self.knobs.tuning}", "code": code}}, 409)
            return
        if type(self).asked > 2:
            self.knobs.tuning = "measured"
        self._json({"state": self.knobs.tuning}, 202)

    def _container(self) -> None:
        type(self).looks += 1
        if self.knobs.gone_after is not None and self.looks > self.knobs.gone_after:
            self._json({"message": "No such container: c1"}, 404)
            return
        if self.knobs.break_after is not None and self.looks > self.knobs.break_after:
            self._json({"message": "the disk of the engine is full"}, 500)
            return
        if self.knobs.end_after is not None and self.looks > self.knobs.end_after:
            # As Docker has it: of one that is started again the code of its end is soon forgotten.
            self.knobs.state = "exited" if self.policy == "no" else "running"
        state = {"Status": self.knobs.state, "ExitCode": 0 if self.knobs.state == "running" else 30}
        self._json({"Id": "c1", "Name": "/one", "State": state, "Config": {"Tty": False}})

    def _list(self) -> None:
        if self.knobs.gone_after == 0:
            self._json([])
            return
        bound = {"IP": "127.0.0.1", "PrivatePort": 11435, "PublicPort": self.connection.getsockname()[1]}
        ports = {"bound": [bound], "exposed": [{"PrivatePort": 11435, "Type": "tcp"}], "absent": [], "none": None}
        row = {"Id": "c1", "Names": ["/one"], "Image": "i", "ImageID": "sha256:i", "State": self.knobs.state,
               "Created": 1, "Status": "Up", "Labels": {"io.appliance.cell": "llama-cpu"}}  # fmt: skip
        self._json([{**row, "Ports": ports[self.knobs.ports]}])

    def _json(self, document: Any, code: int = 200) -> None:
        self._bytes(json.dumps(document).encode(), "application/json", code)

    def _bytes(self, data: bytes, kind: str, code: int = 200, *, stat: str | None = None) -> None:
        self.send_response(code)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(data)))
        if stat:
            self.send_header("X-Docker-Container-Path-Stat", stat)
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: Any) -> None:
        pass


def key_archive() -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as tar:
        info = tarfile.TarInfo("api_key")
        info.size = 5
        tar.addfile(info, io.BytesIO(b"sk-1\n"))
    return out.getvalue()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ports", choices=("bound", "exposed", "absent", "none"), default="bound")
    parser.add_argument("--state", default="running")
    parser.add_argument("--ready", type=int, default=1)
    parser.add_argument(
        "--answer",
        choices=("whole", "error", "at-once"),
        default="whole",
        help="error: breaks off with one; at-once: all in one piece",
    )
    parser.add_argument("--status-document", choices=("whole", "new", "unfit", "error", "list"), default="whole")
    states = ("measured", "waiting", "measuring", "off", "failed")
    parser.add_argument("--tuning", choices=states, default="measured")
    parser.add_argument("--gone-after", type=int)
    parser.add_argument("--end-after", type=int, help="it ends after so many looks")
    parser.add_argument("--log", action="append", default=[])
    parser.add_argument("--break-after", type=int)
    Handler.knobs = parser.parse_args()
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    print(f"tcp://127.0.0.1:{server.server_address[1]}", flush=True)
    server.serve_forever()


if __name__ == "__main__":
    main()
