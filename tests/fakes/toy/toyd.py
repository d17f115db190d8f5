"""toyd.py lanes=N [step-ms=LANES:MS,…] [ouch=LINE] MODEL SOCKET: serves words. Only the standard library is used."""

from __future__ import annotations

import json
import socketserver
import sys
import time
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

*WORDS, MODEL, SOCKET = sys.argv[1:]
OPTIONS = dict(word.split("=", 1) for word in WORDS)
STEP_MS = dict(pair.split(":") for pair in OPTIONS.get("step-ms", "1:8,2:4,4:6").split(","))
STEP_S = float(STEP_MS[OPTIONS["lanes"]]) / 1000
KEPT: list[int] = []


def go(words: list[int], more: int, *, keep: bool) -> dict[str, Any]:
    same = 0
    while keep and same < min(len(KEPT), len(words) - 1) and KEPT[same] == words[same]:
        same += 1
    reading_s, making_s = (len(words) - same) * STEP_S / 40, (more - 1) * STEP_S
    time.sleep(reading_s + making_s)
    KEPT[:] = words
    # As told, not as it took: how busy this machine is decides nothing.
    return {"read": len(words) - same, "kept": same, "made": [7] * more,
            "reading_us": 1e6 * reading_s, "making_us": 1e6 * making_s}  # fmt: skip


class Handler(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        reply: dict[str, Any] = {"words": [len(word) for word in body.get("text", "").split()]}
        if self.path == "/toy/go":
            reply = go(body["words"], body["more"], keep=body["keep"])
        elif self.path == "/toy/chat":
            message = {"role": "assistant", "content": f"{OPTIONS['lanes']} lanes"}
            reply = {"object": "chat.completion", "choices": [{"index": 0, "message": message}]}
        data = json.dumps(reply).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: object) -> None: ...

    def address_string(self) -> str:
        return "unix"


if "ouch" in OPTIONS:
    print(f"toyd OUCH {OPTIONS['ouch']}", file=sys.stderr)
    raise SystemExit(3)
print(f"toyd holding {Path(MODEL).stat().st_size} bytes", file=sys.stderr, flush=True)
with socketserver.ThreadingUnixStreamServer(SOCKET, Handler) as server:
    server.serve_forever()
