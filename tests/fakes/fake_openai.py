"""An OpenAI endpoint of set pace, with knobs for what servers do differently and what goes wrong.

    fake_openai.py --prefill 2000 --inter-token-ms 20

Prints its port when it listens on 127.0.0.1. Tokens come at absolute times, so that what one write costs does not add
up: the first at `--ttft-ms` + prompt tokens / `--prefill`, each further one `--inter-token-ms` later. A prompt has 4
tokens for every 3 words and 10 beside them. `GET /fake/requests` tells what was asked. Only the standard library is
used.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

OVERHEAD = 10


def tokens_in(text: str) -> int:
    return OVERHEAD + len(text.split()) * 4 // 3


class Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 512

    def __init__(self, options: argparse.Namespace) -> None:
        super().__init__(("127.0.0.1", options.port), Handler)
        self.options = options
        self.lock = threading.Lock()
        self.slots = threading.Semaphore(options.slots)
        self.requests: list[dict[str, Any]] = []
        self.chats = 0  # chat requests that got beyond their checks
        self.random = random.Random(1)

    def handle_error(self, request: Any, client_address: Any) -> None:
        error = sys.exc_info()[1]
        if not isinstance(error, ConnectionError):
            super().handle_error(request, client_address)


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Server
    disable_nagle_algorithm = True

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing is logged."""

    def do_GET(self) -> None:
        knobs = self.server.options
        if self.path == "/fake/requests":
            return self.reply(200, self.server.requests)
        if not self.is_allowed():
            return None
        if self.path != "/v1/models" or knobs.no_models:
            return self.fail(404, "not_found", "no such route")
        if knobs.models_body is not None:
            return self.send(200, knobs.models_body.encode())
        rows = [{"id": name, "object": "model", "max_model_len": knobs.context} for name in knobs.model.split(",")]
        return self.reply(200, {"object": "list", "data": rows})

    def do_POST(self) -> None:
        began = time.monotonic()
        body = json.loads(self.rfile.read(int(self.headers.get("Content-Length") or 0)))
        if not self.is_allowed():
            return None
        if self.path != "/v1/chat/completions":
            return self.fail(404, "not_found", "no such route")
        with self.server.lock:
            self.server.requests.append(body)
        if said := self.refusal(body):
            return self.fail(400, *said)
        with self.server.lock:
            self.server.chats += 1
            number = self.server.chats
        if self.server.options.busy_after is not None and number > self.server.options.busy_after:
            return self.fail(503, "model_loading", "the model is being loaded")
        with self.server.slots:
            return self.stream(body, number, began)

    def is_allowed(self) -> bool:
        key = self.server.options.key
        if key and self.headers.get("Authorization") != f"Bearer {key}":
            self.fail(401, "invalid_api_key", "this key is not known")
            return False
        return True

    def refusal(self, body: dict[str, Any]) -> tuple[str, str] | None:
        knobs = self.server.options
        if knobs.strict and "ignore_eos" in body:
            return "unknown_parameter", "Unknown parameter: 'ignore_eos'"
        if knobs.new_style and "max_tokens" in body:
            return "unsupported_parameter", "Use 'max_completion_tokens' instead"
        wanted = tokens_in(prompt_of(body)) + length_of(body)
        if wanted > knobs.context and knobs.cut_prompts_to is None:
            return "context_length_exceeded", f"maximum context length is {knobs.context} tokens, not {wanted}"
        return None

    def stream(self, body: dict[str, Any], number: int, began: float) -> None:
        knobs = self.server.options
        read = min(tokens_in(prompt_of(body)), knobs.cut_prompts_to or 2**31)
        first_s = (knobs.ttft_ms + (knobs.first_slow_ms if number == 1 else 0.0)) / 1000.0 + read / knobs.prefill
        is_bad = bool(knobs.bad_every) and number > knobs.bad_after and number % knobs.bad_every == 0
        made = min(length_of(body), knobs.stop_after or 2**31)
        self.begin_stream()
        self.event({"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}]})
        for token in range(0, made, knobs.tokens_per_chunk):
            if is_bad and token >= knobs.bad_at:
                return self.end_badly()
            stall_ms = knobs.stall_ms if knobs.stall_every and token and token % knobs.stall_every == 0 else 0.0
            began += stall_ms / 1000.0
            jitter = self.server.random.uniform(0.0, knobs.jitter_ms)
            self.wait_until(began + first_s + (token * knobs.inter_token_ms + jitter) / 1000.0)
            delta = {knobs.field: "word " * min(knobs.tokens_per_chunk, made - token)}
            self.event({"choices": [{"index": 0, "delta": delta, "finish_reason": None}]})
        self.event({"choices": [{"index": 0, "delta": {}, "finish_reason": "length"}]})
        if (body.get("stream_options") or {}).get("include_usage") and not knobs.no_usage:
            self.event({"choices": [], "usage": usage_of(read, made, round(read * knobs.cached_share))})
        self.chunk(b"data: [DONE]\n\n")
        return self.chunk(b"")

    def end_badly(self) -> None:
        how = self.server.options.bad
        if how == "error":
            self.event({"error": {"message": "engine died", "type": "server_error", "code": "engine_died"}})
        if how == "json":
            self.chunk(b"data: {what\n\n")
        if how == "stall":
            time.sleep(3600)
        if how in ("error", "json", "end"):
            self.chunk(b"")  # a body that is whole to HTTP and not to its reader
        self.close_connection = True

    def begin_stream(self) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()

    def event(self, event: dict[str, Any]) -> None:
        row = {"id": "chatcmpl-1", "object": "chat.completion.chunk", "created": 1, "model": "fake", **event}
        self.chunk(f"data: {json.dumps(row)}\n\n".encode())

    def chunk(self, data: bytes) -> None:
        self.wfile.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")

    @staticmethod
    def wait_until(at: float) -> None:
        time.sleep(max(0.0, at - time.monotonic()))

    def fail(self, status: int, code: str, message: str) -> None:
        self.reply(status, {"error": {"message": message, "type": code, "code": code, "param": None}})

    def reply(self, status: int, value: Any) -> None:
        self.send(status, json.dumps(value).encode())

    def send(self, status: int, data: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


def prompt_of(body: dict[str, Any]) -> str:
    return " ".join(str(message["content"]) for message in body["messages"])


def length_of(body: dict[str, Any]) -> int:
    return int(body.get("max_tokens") or body.get("max_completion_tokens") or 16)


def usage_of(read: int, made: int, cached: int) -> dict[str, Any]:
    return {
        "prompt_tokens": read,
        "completion_tokens": made,
        "total_tokens": read + made,
        "prompt_tokens_details": {"cached_tokens": cached},
    }


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    number: dict[str, Any] = {"type": float, "default": 0.0}
    whole: dict[str, Any] = {"type": int, "default": 0}
    parser.add_argument("--port", **whole)
    parser.add_argument("--ttft-ms", **number)
    parser.add_argument("--prefill", type=float, default=100_000.0, help="prompt tokens per second")
    parser.add_argument("--inter-token-ms", **number)
    parser.add_argument("--jitter-ms", **number, help="each token comes up to this much later")
    parser.add_argument("--stall-every", **whole, help="tokens, after which nothing comes for --stall-ms")
    parser.add_argument("--stall-ms", **number)
    parser.add_argument("--first-slow-ms", **number, help="the first request waits this much longer")
    parser.add_argument("--tokens-per-chunk", type=int, default=1)
    parser.add_argument("--slots", type=int, default=4096, help="further requests wait for one")
    parser.add_argument("--stop-after", **whole, help="the model ends its answers after so many tokens")
    parser.add_argument("--context", type=int, default=1_000_000)
    parser.add_argument("--cut-prompts-to", type=int, help="in silence")
    parser.add_argument("--cached-share", **number, help="of each prompt's tokens")
    parser.add_argument("--field", default="content", help="of the delta that holds the text")
    parser.add_argument("--model", default="fake", help="names, with commas")
    parser.add_argument("--models-body", help="what GET /v1/models answers instead")
    parser.add_argument("--no-models", action="store_true")
    parser.add_argument("--no-usage", action="store_true")
    parser.add_argument("--strict", action="store_true", help="refuse ignore_eos, as OpenAI does")
    parser.add_argument("--new-style", action="store_true", help="refuse max_tokens")
    parser.add_argument("--key")
    parser.add_argument("--busy-after", type=int, metavar="N", help="503 after N requests")
    parser.add_argument("--bad-every", **whole, help="each Nth answer ends as --bad says")
    parser.add_argument("--bad-after", type=int, default=2, help="but none of the first N")
    parser.add_argument("--bad-at", type=int, default=2, help="after so many tokens")
    parser.add_argument("--bad", choices=("reset", "end", "error", "json", "stall"), default="reset")
    return parser.parse_args()


if __name__ == "__main__":
    server = Server(parse_options())
    print(server.server_address[1], flush=True)
    server.serve_forever()
