"""A Debian mirror for tests: it passes on what the public archive has, from an address that only this machine knows."""

from __future__ import annotations

import re
import shutil
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import docker

BASE = "debian:bookworm-slim"


@dataclass(kw_only=True)
class PassingOn:
    root: str  # as --debian-mirror takes it
    asked: list[str] = field(default_factory=list)  # paths


@contextmanager
def debian_mirror() -> Iterator[PassingOn]:
    """On the bridge's own address, which build containers reach. A path of its own, so that a rewrite is needed."""
    archive = _archive()
    gateway = docker.from_env().networks.get("bridge").attrs["IPAM"]["Config"][0]["Gateway"]
    found = PassingOn(root="")

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            found.asked.append(self.path)
            wanted = urllib.request.Request(archive + self.path.removeprefix("/planted"))
            try:
                with urllib.request.urlopen(wanted, timeout=60) as answer:
                    self.send_response(answer.status)
                    self.send_header("Content-Length", answer.headers["Content-Length"])
                    self.end_headers()
                    shutil.copyfileobj(answer, self.wfile)
            except urllib.error.HTTPError as error:
                with error:
                    self.send_response(error.code)
                    self.send_header("Content-Length", "0")
                    self.end_headers()

        def log_message(self, format: str, *args: object) -> None:
            """Nothing: the paths are kept."""

    server = ThreadingHTTPServer((gateway, 0), Handler)
    found.root = f"http://{gateway}:{server.server_port}/planted"
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield found
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def _archive() -> str:
    """Where the base itself takes its packages from, without the path."""
    command = ["sh", "-c", "cat /etc/apt/sources.list /etc/apt/sources.list.d/* 2>/dev/null; true"]
    said = docker.from_env().containers.run(BASE, command, remove=True).decode()
    found = re.search(r"https?://[^/\s]+", said)
    assert found, said
    return found[0]
