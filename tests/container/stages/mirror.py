"""Debian archives for tests, on an address that only this machine knows: one that passes on, and copied snapshots."""

from __future__ import annotations

import re
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import docker

BASE = "debian:bookworm-slim"
TIMESTAMP = "20260718T060000Z"  # what is asked for
IMPORT = "20260718T023111Z"  # what a snapshot service has, and sends to


@dataclass(kw_only=True)
class PassingOn:
    root: str  # as --debian-mirror takes it
    asked: list[str] = field(default_factory=list)  # paths


@contextmanager
def debian_mirror(copy: Path | None = None) -> Iterator[PassingOn]:
    """Serve the public archive under another path, so that a rewrite is needed. Served files stay in `copy`, in the
    layout of `snapshot_service`."""
    archive = _archive()

    class Handler(_Quiet):
        def do_GET(self) -> None:
            found.asked.append(self.path)
            path = self.path.removeprefix("/planted")
            wanted = urllib.request.Request(archive + path)
            try:
                with urllib.request.urlopen(wanted, timeout=60) as answer:
                    body = answer.read()
            except urllib.error.HTTPError as error:
                error.close()
                return self.say(error.code)
            if copy:
                file = copy / path.lstrip("/")
                file.parent.mkdir(parents=True, exist_ok=True)
                file.write_bytes(body)
            return self.say(200, body)

    found = PassingOn(root="")
    with _served(Handler) as address:
        found.root = f"{address}/planted"
        yield found


@contextmanager
def snapshot_service(copy: Path, *, lies: str | None = None, lacks: str | None = None) -> Iterator[PassingOn]:
    """Serve a copied archive with the layout and the redirects of snapshot.debian.org.

    A file whose path ends with `lies` gets other bytes of the same length. One that ends with `lacks` gets 404.
    """

    class Handler(_Quiet):
        def do_GET(self) -> None:
            found.asked.append(self.path)
            place = re.fullmatch(r"/archive/(debian|debian-security)/(\d{8}T\d{6}Z)/(.*)", self.path)
            if place is None:
                return self.say(404)
            if place[2] != IMPORT:
                return self.say(302, location=f"/archive/{place[1]}/{IMPORT}/{place[3]}")
            file = copy / place[1] / place[3]
            if not file.is_file() or (lacks and self.path.endswith(lacks)):
                return self.say(404)
            body = file.read_bytes()
            return self.say(200, bytes(255 - byte for byte in body) if lies and self.path.endswith(lies) else body)

    found = PassingOn(root="")
    with _served(Handler) as address:
        found.root = f"{address}/archive"
        yield found


class _Quiet(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def say(self, status: int, body: bytes = b"", *, location: str | None = None) -> None:
        self.send_response(status)
        if location:
            self.send_header("Location", location)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Nothing: the paths are kept."""


@contextmanager
def _served(handler: type[BaseHTTPRequestHandler]) -> Iterator[str]:
    """Serve on the bridge's own address, which build containers can reach."""
    gateway = docker.from_env().networks.get("bridge").attrs["IPAM"]["Config"][0]["Gateway"]
    server = ThreadingHTTPServer((gateway, 0), handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://{gateway}:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def _archive() -> str:
    """Return the address from which the base itself takes its packages, without the path."""
    command = ["sh", "-c", "cat /etc/apt/sources.list /etc/apt/sources.list.d/* 2>/dev/null; true"]
    said = docker.from_env().containers.run(BASE, command, remove=True).decode()
    found = re.search(r"https?://[^/\s]+", said)
    assert found, said
    return found[0]
