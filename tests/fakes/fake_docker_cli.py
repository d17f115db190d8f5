#!/usr/bin/env python3
"""The `docker` command for programs that start containers one by one and wait for their port.

What it was called with is a line of JSON in $FAKE_DOCKER/calls. `run … plan --dry-run` prints $FAKE_DOCKER/planned; any
other `run` is an HTTP server of its own until `rm` ends it. It answers 503 to the first request, as the appliance does
before its engine is ready, and 200 from then on.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

HERE = Path(os.environ["FAKE_DOCKER"])


class Handler(BaseHTTPRequestHandler):
    asked = 0

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        type(self).asked += 1
        self.send_response(503 if self.asked == 1 else 200)
        self.send_header("Content-Length", "2")
        self.end_headers()
        self.wfile.write(b"{}")

    def log_message(self, format: str, *args: object) -> None:
        """The log of a container is its engine's."""


def main(words: list[str]) -> int:
    with (HERE / "calls").open("a", encoding="utf-8") as calls:
        calls.write(json.dumps(words) + "\n")
    verb = words[0]
    if verb == "run" and words[-2:] == ["plan", "--dry-run"]:
        print((HERE / "planned").read_text(encoding="utf-8"))
    elif verb == "run":
        _serve(words[words.index("--name") + 1])
    elif verb == "port":
        container = HERE / f"{words[1]}.json"
        if not container.exists():
            return 1
        print(f"127.0.0.1:{json.loads(container.read_text())['port']}")
    elif verb == "rm":
        container = HERE / f"{words[-1]}.json"
        os.kill(json.loads(container.read_text())["pid"], signal.SIGTERM)
    return 0


def _serve(name: str) -> None:
    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        whole = HERE / f"{name}.new"
        whole.write_text(json.dumps({"port": server.server_port, "pid": os.getpid()}), encoding="utf-8")
        whole.rename(HERE / f"{name}.json")
        print("Application startup complete", flush=True)
        server.serve_forever()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
