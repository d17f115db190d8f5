"""A program that behaves like llama-server on a unix socket, with knobs for everything that can go wrong.

    fake_engine.py --host /tmp/x.sock [knobs] [any other llama-server flag: ignored]

It binds at once (a stale socket file makes that fail), answers 503 until it is loaded, and leaves its socket file
behind. Times of `--die-after` and `--segfault-after` count from readiness. `GET /fake/requests` tells
what was received and is answered in every state. Only the standard library is used; `tests.fakes.quick` starts it.
"""

from __future__ import annotations

import itertools
import json
import os
import select
import signal
import socket
import sys
import threading
import time
from collections import Counter
from socketserver import ThreadingMixIn, UnixStreamServer
from types import SimpleNamespace

from tests.fakes.quick.http import RequestHandler
from tests.fakes.quick.knobs import Knobs

TYPE_CHECKING = False
if TYPE_CHECKING:
    from pathlib import Path
    from typing import Any

STARTED = time.monotonic()
SECRET_TOKEN = 6  # a word of six characters, which a number of six digits is: this engine's tokens are lengths of words
TEXT_ROUTES = {"/v1/chat/completions", "/chat/completions", "/v1/completions", "/completions", "/completion", "/infill"}
MESSAGE_ROUTES = {"/v1/messages", "/responses", "/v1/responses"}


def log(level: str, text: str) -> None:
    """Write a log line in llama-server's form: minutes.seconds.milliseconds.microseconds, level, text."""
    micros = int((time.monotonic() - STARTED) * 1e6)
    stamp = f"{micros // 60_000_000}.{micros // 1_000_000 % 60:02}.{micros // 1000 % 1000:03}.{micros % 1000:03}"
    write_line(f"{stamp} {level} {text}")


def write_line(text: str) -> None:
    sys.stderr.write(text + "\n")
    sys.stderr.flush()


class Ledger:
    """Record of received requests, under one lock."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.counts: Counter[str] = Counter()
        self.requests: list[dict[str, Any]] = []
        self.disconnects = 0
        self.open_streams = 0
        self.finished_streams = 0

    def record(self, handler: Handler, body: bytes) -> None:
        entry = {
            "method": handler.command,
            "path": handler.path,
            "headers": {name.lower(): value for name, value in handler.headers.items()},
            "body": body.decode("utf-8", "replace"),
        }
        with self.lock:
            self.counts[f"{handler.command} {handler.path.partition('?')[0]}"] += 1
            if handler.path != "/health":
                self.requests = [*self.requests[-199:], entry]

    def add(self, name: str, amount: int) -> None:
        with self.lock:
            setattr(self, name, getattr(self, name) + amount)

    def snapshot(self) -> dict[str, Any]:
        with self.lock:
            return {
                "counts": dict(self.counts),
                "requests": self.requests,
                "disconnects": self.disconnects,
                "open_streams": self.open_streams,
                "finished_streams": self.finished_streams,
            }


class PromptDisk:
    """Prompts on disk as images/patches/llama-prompt-disk.patch keeps them, with words for tokens, and the latest
    prompt in memory. A prompt is saved at once, not when the engine is idle."""

    def __init__(self, options: SimpleNamespace) -> None:
        self.folder: Path | None = options.cache_disk if options.cache_disk_mib else None
        self.key = options.cache_disk_key
        self.secret = os.environ.get("LLAMA_CACHE_DISK_SECRET", "")
        self.held: list[str] = []
        self.counts: Counter[str] = Counter()
        if self.folder and not (len(self.secret) == 32 and set(self.secret) <= set("0123456789abcdef")):
            log("W", "prompt disk: off: LLAMA_CACHE_DISK_SECRET is not 32 hexadecimal digits")
            self.folder = None
        if self.folder:
            self.folder.mkdir(mode=0o700, exist_ok=True)

    def read(self, words: list[str]) -> dict[str, int]:
        """Return what the timings say of the cache for this prompt; nothing without a folder."""
        if not self.folder:
            return {}
        held = self.usable(self.held, words)
        found = max(
            (self.usable(self.load(path), words) for path in self.folder.glob(f"{self.key}.*.prompt")), default=0
        )
        if found <= held:
            return {"cache_n": held, "disk_n": 0}
        self.counts.update(loads_total=1, loaded_tokens_total=found)
        log("I", f"srv  load: prompt disk: loaded {found} tokens, 0.1 MiB in 0.1 ms")
        return {"cache_n": found, "disk_n": found}

    @staticmethod
    def usable(kept: list[str], words: list[str]) -> int:
        return min(len(kept), len(words) - 1) if kept == words[: len(kept)] else 0

    def load(self, path: Path) -> list[str]:
        try:
            document = json.loads(path.read_text())
            words: list[str] = document["words"]
            if document["sum"] == self.checksum(words):
                return words
        except (OSError, ValueError, LookupError, TypeError):
            pass
        self.counts["passed_over_total"] += 1
        log("W", f"srv  pass_over: prompt disk: passed over {path.name}: damaged")
        path.unlink(missing_ok=True)
        return []

    def save(self, words: list[str], owner: str) -> None:
        self.held = words
        if not self.folder:
            return
        name = f"{self.key}.{owner}.{os.urandom(8).hex()}"
        path = self.folder / f".{name}.tmp"
        with os.fdopen(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600), "w") as file:
            json.dump({"words": words, "sum": self.checksum(words)}, file)
        path.rename(self.folder / f"{name}.prompt")
        self.counts.update(saves_total=1, saved_bytes_total=100)
        log("I", f"srv  save: prompt disk: saved {len(words)} tokens, 0.1 MiB in 0.1 ms")

    def checksum(self, words: list[str]) -> str:
        import hashlib  # slow to import, and few tests keep prompts

        return hashlib.sha256(json.dumps([self.secret, words]).encode()).hexdigest()

    def metrics(self) -> str:
        names = ("saves_total", "saved_bytes_total", "loads_total", "loaded_tokens_total", "passed_over_total")
        values = {name: self.counts[name] for name in names}
        files = list(self.folder.glob("*.prompt")) if self.folder else []
        values |= {"files": len(files), "bytes": 100 * len(files)}
        return "".join(f"llamacpp:prompt_disk_{name} {value}\n" for name, value in values.items())


RATES = ("cpu_gb_s", "pcie_gb_s", "dram_gb_s", "other_ms", "cpu_fixed_ms", "gpu_expert_ms", "gpu_fixed_ms")


class Experts:
    """Slots of experts and recorded routes, with the checks and files of llama-moe-split.patch."""

    def __init__(self, options: SimpleNamespace) -> None:
        """Raises ValueError in the engine's words."""
        self.options = options
        self.tokens = 0
        if options.moe_slots:
            self.check()
        if options.moe_trace:
            head = "# route_trace v1\n# model=fake arch=qwen3moe n_layer=1 n_expert=16 n_expert_used=2\n"
            options.moe_trace.write_text(head + "turn,phase,step,layer,slot,expert,weight,residency,expert_bytes\n")

    def check(self) -> None:
        if why := self.why_refused():
            raise ValueError(why)

    def why_refused(self) -> str:
        options, top_k = self.options, self.options.moe_top_k
        rates = json.loads(options.moe_rates.read_text()) if options.moe_rates else dict.fromkeys(RATES, 0.0)
        missing = [name for name in RATES if not isinstance(rates.get(name), int | float)]
        if missing:
            return f"{options.moe_rates} is no JSON object with a number {missing[0]}"
        if not options.n_cpu_moe:
            return "--moe-slots: no layer can have slots: of 4 layers with experts, 4 have them on a GPU"
        if options.moe_slots < top_k:
            return f"--moe-slots {options.moe_slots}: a token uses {top_k} experts of layer 0, give at least {top_k}"
        for name in RATES[:3]:
            if not 0 < rates[name] < float("inf"):
                return f"--moe-slots, --moe-rates: a rate must be positive and finite: {name} {rates[name]:f}"
        return ""

    def decode(self, tokens: int) -> None:
        """Note the tokens that were made, each with experts 0 and 1 of the only layer."""
        if self.options.moe_trace:
            with self.options.moe_trace.open("a") as file:
                for step in range(self.tokens, self.tokens + tokens):
                    file.writelines(f"0,1,{step},0,{slot},{slot},0.5,0,0\n" for slot in range(2))
        self.tokens += tokens

    def metrics(self) -> str:
        if not self.options.moe_slots:
            return ""
        counts = {"layer_tokens_total": self.tokens, "hits_total": 6 * self.tokens, "cpu_total": 2 * self.tokens}
        counts |= dict.fromkeys(("fetched_total", "uploads_total", "copied_bytes_total"), 0) | {"rule": 3}
        seconds = {"predicted_seconds_total": 0.0001 * self.tokens, "measured_seconds_total": 0.0002 * self.tokens}
        return "".join(f"llamacpp:moe_{name} {value}\n" for name, value in (counts | seconds).items())

    def end(self) -> None:
        if self.options.moe_slots and self.options.moe_uses:
            self.options.moe_uses.write_text("moe-uses-1 0000000000000000\nsum 0000000000000000\n")


class Engine(ThreadingMixIn, UnixStreamServer):
    daemon_threads = True
    request_queue_size = 512

    def __init__(self, options: SimpleNamespace) -> None:
        self.options = options
        self.ledger = Ledger()
        self.is_loaded = threading.Event()
        self.is_terminating = threading.Event()
        self.worked = 0
        self.slot: list[int] = []  # the tokens that the cache of the only slot holds
        self.prompt_disk = PromptDisk(options)
        self.experts = Experts(options)
        super().__init__(options.host, Handler)

    def handle_error(self, request: Any, client_address: Any) -> None:
        error = sys.exc_info()[1]
        if not isinstance(error, ConnectionError):
            log("E", f"srv  handle: {error!r}")


class Handler(RequestHandler):
    server: Engine

    def log_message(self, format: str, *args: Any) -> None:
        if "/health" not in self.path and "/fake/" not in self.path:
            log("I", f"srv  log_server_r: {format % args}")

    def answer(self, body: bytes) -> None:
        path = self.path.partition("?")[0]
        if path == "/fake/requests":
            return self.reply(200, self.server.ledger.snapshot())
        self.server.ledger.record(self, body)
        if not self.server.is_loaded.is_set():
            return self.fail(503, "unavailable_error", "Loading model")
        if self.command == "POST":
            return self.answer_post(path, body)
        return self.answer_get(path)

    def answer_get(self, path: str) -> None:
        model = self.server.options.alias
        if path in ("/health", "/v1/health"):
            return self.reply(200, {"status": "ok"})
        if path in ("/v1/models", "/models"):
            meta = {"n_ctx_train": 8192, "n_params": 134_515_008}
            return self.reply(200, {"object": "list", "data": [{"id": model, "object": "model", "meta": meta}]})
        if path == "/slots":
            return self.reply(200, self.slots())
        if path == "/props":
            return self.reply(200, {"model_path": "/data/models/fake.gguf", "total_slots": 1})
        if path == "/metrics" and self.server.options.metrics:
            return self.reply(200, self.server.prompt_disk.metrics() + self.server.experts.metrics())
        return self.fail(404, "not_found_error", "File Not Found")

    def slots(self) -> list[dict[str, Any]]:
        """Return one slot with 1,024 tokens for each open stream, and an idle slot that still has its tokens."""
        streams = self.server.ledger.snapshot().get("open_streams", 0)
        busy = [{"id": number, "is_processing": True, "n_prompt_tokens": 1024} for number in range(1, streams + 1)]
        if self.server.options.tells_work:
            busy.append({"id": 9, "is_processing": True, "n_prompt_tokens_processed": self.server.worked})
        idle = {"id": 0, "is_processing": False, "n_prompt_tokens": 512, "prompt": "secret of another client"}
        return [idle, *busy]

    def answer_post(self, path: str, body: bytes) -> None:
        options = self.server.options
        if options.sigill_on_request:
            os.kill(os.getpid(), signal.SIGILL)
            time.sleep(3600)  # another thread may be the one that dies of it: this one must not answer meanwhile
        if options.die_on_request is not None and options.die_on_request == 0:
            self.die_as_asked()
        try:
            request = json.loads(body or b"{}")
        except ValueError as error:
            return self.fail(400, "invalid_request_error", f"[json.exception.parse_error.101] {error}")
        if path in TEXT_ROUTES | MESSAGE_ROUTES | {"/v1/embeddings"} and not self.work():
            self.server.ledger.add("disconnects", 1)
            return None
        if path in TEXT_ROUTES | MESSAGE_ROUTES:
            return self.stream(path, request) if request.get("stream") else self.complete(path, request)
        if path == "/apply-template":
            return self.reply(200, {"prompt": f"<user> {prompt_of(request)} <assistant>"})
        if path == "/tokenize":
            return self.reply(200, {"tokens": [len(word) for word in str(request.get("content", "")).split()]})
        if path == "/v1/messages/count_tokens":
            return self.reply(200, {"input_tokens": len(prompt_of(request).split())})
        if path in ("/v1/embeddings", "/embeddings"):
            return self.reply(200, {"object": "list", "data": [{"index": 0, "embedding": [0.0, 1.0]}]})
        if path == "/props":
            return self.reply(200, {"success": True})
        return self.fail(404, "not_found_error", "File Not Found")

    def work(self) -> bool:
        """Wait before the first byte of an answer. Returns False if the client left meanwhile."""
        options = self.server.options
        until = time.monotonic() + options.works_s
        while (left_s := until - time.monotonic()) > 0:
            if self.client_left(min(left_s, 60.0 if options.sleeps else 0.0)):
                self.close_connection = True
                return False
            for _ in range(0 if options.sleeps else 10_000):
                self.server.worked += 1
        return True

    def complete(self, path: str, request: dict[str, Any]) -> None:
        if path == "/completion" and self.server.options.hang_on_completion:
            select.select([self.connection], [], [])  # neither an answer nor work, as after a lock that nobody lets go
            self.server.ledger.add("disconnects", 1)
            return None
        if self.server.options.says:
            return self.reply(200, json.loads(self.server.options.says.read_text())["whole"])
        text = prompt_of(request)
        words = max(1, len(text.split()))
        is_of_tokens = path == "/completion" and isinstance(request.get("prompt"), list)
        reply: dict[str, Any] = {
            "id": "chatcmpl-fake",
            "object": "chat.completion" if "chat" in path else "text_completion",
            "model": self.server.options.alias,
            "content": text,
            "choices": [
                {
                    "index": 0,
                    "finish_reason": "stop",
                    "text": text,
                    "message": {"role": "assistant", "content": text},
                }
            ],
            "usage": {"prompt_tokens": words, "completion_tokens": words, "total_tokens": 2 * words},
            "timings": self.token_timings(request) if is_of_tokens else self.text_timings(request, words),
        }
        self.server.experts.decode(words)
        if request.get("return_tokens"):
            made = reply["timings"]["predicted_n"]
            reply["tokens"] = [0] * made if self.server.options.loop else self.tokens(request.get("prompt"), made)
        return self.reply(200, reply)

    def tokens(self, prompt: Any, made: int) -> list[int]:
        """Return an answer that depends on the place alone, so that it goes on where an earlier one was cut."""
        options = self.server.options
        begin = len(prompt) if isinstance(prompt, list) else 0
        if options.recalls is not None and begin <= options.recalls:
            return [SECRET_TOKEN] * made
        changes = options.changes if options.spec_type != "none" else 0.0
        places = range(begin, begin + made)
        return [-1 if place * 7919 % 1000 < 1000 * changes else place for place in places]

    def text_timings(self, request: dict[str, Any], words: int) -> dict[str, Any]:
        """Return timings with what the cache had of the conversation, and keep it."""
        spoken = conversation_of(request)
        with self.server.ledger.lock:
            kept = self.server.prompt_disk.read(spoken)
            self.server.prompt_disk.save(spoken, self.headers.get("X-Cache-Owner", "none"))
        return {**timings(len(spoken) - kept["cache_n"] if kept else words, words), **kept}

    def token_timings(self, request: dict[str, Any]) -> dict[str, Any]:
        """Return timings like llama-server's: tokens that the slot already holds are not read again, and n tokens take
        n - 1 steps."""
        prompt, made = request["prompt"], request["n_predict"]
        with self.server.ledger.lock:
            held = self.server.slot if request.get("cache_prompt", True) else []
            same = next((i for i, (a, b) in enumerate(zip(prompt, held, strict=False)) if a != b), len(held))
            cached = max(0, min(same, len(prompt) - 1))
            self.server.slot = prompt
        options = self.server.options
        read = len(prompt) - cached
        slower = float(options.slowdown.read_text()) if options.slowdown and options.slowdown.exists() else 1.0
        step_ms = slower * by_number(options.decode_ms, options.threads) * (1 + len(prompt) / 2048)
        prefill_ms = slower * by_number(options.prefill_ms, options.ubatch_size)
        steps, guessed, right = drafts(options, max(1, made - 1), request.get("seed", 1))
        return {
            "cache_n": cached,
            "prompt_n": read,
            "prompt_ms": read * prefill_ms,
            "predicted_n": made,
            "predicted_ms": steps * step_ms,
            **({"draft_n": guessed, "draft_n_accepted": right} if guessed else {}),
        }

    def stream(self, path: str, request: dict[str, Any]) -> None:
        self.send_response(200)
        self.send_header("X-Accel-Buffering", "no")
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        ledger = self.server.ledger
        ledger.add("open_streams", 1)
        try:
            is_whole = self.send_events(path, prompt_of(request))
        except OSError:
            is_whole = False
        finally:
            ledger.add("open_streams", -1)
        ledger.add("finished_streams" if is_whole else "disconnects", 1)
        self.close_connection = self.close_connection or not is_whole

    def send_events(self, path: str, text: str) -> bool:
        """Stream an answer. Returns False if the client left before the end."""
        options = self.server.options
        if options.says:
            for event in json.loads(options.says.read_text())["events"]:
                self.send_event(event)
            self.send_chunk(b"data: [DONE]\n\n")
            self.send_chunk(b"")
            return True
        words = itertools.cycle(text.split() or ["nothing"])
        for index, word in enumerate(words if options.until else itertools.islice(words, options.chunks)):
            if options.until and options.until.exists():
                break
            self.server.experts.decode(1)
            if options.die_on_request is not None and index >= options.die_on_request:
                self.die_as_asked()
            if self.client_left(options.chunk_interval if index else 0.0):
                return False
            if self.server.is_terminating.is_set():
                return not self.hold()
            choice = {"index": 0, "finish_reason": None, "text": f"{word} ", "delta": {"content": f"{word} "}}
            kind = "chat.completion.chunk" if "chat" in path else "text_completion"
            self.send_event({"id": "chatcmpl-fake", "object": kind, "model": options.alias, "choices": [choice]})
        last = {"choices": [{"index": 0, "finish_reason": "stop", "delta": {}}], "timings": timings(1, options.chunks)}
        self.send_event({"id": "chatcmpl-fake", "object": "chat.completion.chunk", "model": options.alias, **last})
        self.send_chunk(b"data: [DONE]\n\n")
        self.send_chunk(b"")
        return True

    def hold(self) -> bool:
        """After SIGTERM nothing more is decoded, but the stream stays open until the client leaves."""
        while not self.client_left(60.0):
            pass
        return True

    def client_left(self, wait_s: float) -> bool:
        """Waits up to `wait_s`, or until the connection says something; True when that something is its end."""
        deadline = time.monotonic() + wait_s
        while True:
            left_s = max(0.0, deadline - time.monotonic())
            # Short steps: a SIGTERM must end the wait for the next chunk too.
            if select.select([self.connection], [], [], min(left_s, 0.05))[0]:
                return not self.connection.recv(1, socket.MSG_PEEK)
            if left_s == 0.0 or (wait_s < 60.0 and self.server.is_terminating.is_set()):
                return False

    def send_event(self, event: dict[str, Any]) -> None:
        self.send_chunk(f"data: {json.dumps(event)}\n\n".encode())

    def send_chunk(self, data: bytes) -> None:
        self.wfile.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")
        self.wfile.flush()

    def die_as_asked(self) -> None:
        log("E", "srv  update_slots: fake engine was asked to die")
        die(1)

    def fail(self, status: int, kind: str, message: str) -> None:
        self.reply(status, {"error": {"code": status, "message": message, "type": kind}})

    def reply(self, status: int, value: Any) -> None:
        body = value.encode() if isinstance(value, str) else json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json; charset=utf-8")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(b"" if self.command == "HEAD" else body)


def prompt_of(request: dict[str, Any]) -> str:
    """Return the last words of a request of any shape, which the answer repeats."""
    messages = request.get("messages")
    content = messages[-1].get("content", "") if messages else request.get("prompt", request.get("input", ""))
    if isinstance(content, list):
        return " ".join(str(part.get("text", "")) if isinstance(part, dict) else str(part) for part in content)
    return str(content)


def conversation_of(request: dict[str, Any]) -> list[str]:
    """Return the words of all messages of a chat, or of a prompt."""
    messages = request.get("messages") or [request]
    return " ".join(prompt_of({"messages": [each]} if "role" in each else each) for each in messages).split()


def timings(prompt_n: int, predicted_n: int) -> dict[str, Any]:
    return {
        "prompt_n": prompt_n,
        "prompt_ms": prompt_n * 4.0,
        "prompt_per_second": 250.0,
        "predicted_n": predicted_n,
        "predicted_ms": predicted_n * 10.0,
        "predicted_per_second": 100.0,
    }


def drafts(options: SimpleNamespace, made: int, seed: int) -> tuple[float, int, int]:
    """How many steps' time `made` tokens take, how many were guessed, and how many of those were right. As llama-server
    it guesses at most as many as are left after the next one."""
    cost, chances = next((draft[1:] for draft in options.guess if draft[0] == options.spec_type), (0.0, ()))
    at_most = options.spec_ngram_mod_n_max if options.spec_type == "ngram-mod" else options.spec_draft_n_max
    at_most = min(at_most, made - 1)
    if not chances or not at_most:
        return made, 0, 0
    chance = chances[seed % len(chances)]
    right = sum(chance**i for i in range(1, at_most + 1))
    steps = made / (1 + right)
    return steps * (1 + cost * at_most), round(steps * at_most), round(steps * right)


def draft(text: str) -> tuple[str, float, list[float]]:
    """`draft-mtp:0.5,0.8`: a guess of that kind costs half a step, and each is right with a chance of 0.8;
    `draft-mtp:0.5,0.8/0.1`: with 0.8 for even seeds and 0.1 for odd ones."""
    kind, _, numbers = text.partition(":")
    cost, _, chances = numbers.partition(",")
    return kind, float(cost), [float(chance) for chance in chances.split("/")]


def path(text: str) -> Path:
    from pathlib import Path  # slow to import, and few tests give a file

    return Path(text)


def by_number(table: str, number: int) -> float:
    """`20` is 20 for all; `1:40,2:20` is looked up, and what is not in it gets the last."""
    pairs = [pair.rpartition(":") for pair in table.split(",")]
    values = {int(key): float(value) for key, _, value in pairs if key}
    return values.get(number, float(pairs[-1][2]))


def die(code: int) -> None:
    """End the whole process at once, from any thread."""
    os._exit(code)


def parse_options(arguments: list[str]) -> SimpleNamespace:
    knobs = Knobs()
    add = knobs.add_argument
    add("--host", help="path of the unix socket")
    add("--alias", "-a", default=None, help="model name in replies; the model's path when it is not given")
    add("--model", "-m", default="/data/models/fake.gguf")
    add("--load-seconds", type=float, default=0.0)
    add("--load-until", type=path, metavar="FILE", help="it is loaded when the file is there")
    add("--ignore-sigterm", action="store_true")
    add("--hold-streams", action="store_true", help="after SIGTERM stay alive until every streaming client has left")
    add("--die-before-ready", type=int, metavar="CODE")
    add("--die-after", type=float, metavar="SECONDS", help="exit 1 so long after readiness")
    add("--die-on-request", type=int, nargs="?", const=0, metavar="CHUNKS", help="exit 1 at a POST, after CHUNKS")
    add("--segfault-after", type=float, metavar="SECONDS", help="SIGSEGV to itself so long after readiness")
    add("--sigill-before-ready", action="store_true", help="SIGILL to itself while loading")
    add("--sigill-on-request", action="store_true", help="SIGILL to itself at a POST")
    add("--double-fork", action="store_true", help="leave a detached grandchild, which keeps the log pipe open")
    add("--hang-on-completion", action="store_true", help="/completion is taken and never answered")
    add("--pid-file", type=path, help="where the grandchild's pid is written")
    add("--flood-log", type=int, default=0, metavar="LINES", help="write so many lines before getting ready")
    add("--hang", action="store_true", help="never ready, no log, no CPU time")
    add("--works-s", type=float, default=0.0, help="an answer takes so long before its first byte; inf: none comes")
    add("--sleeps", action="store_true", help="meanwhile it uses no CPU time, else a whole core")
    add("--tells-work", action="store_true", help="meanwhile /slots tells how far it is")
    add("--log-every-s", type=float, default=0.0, help="it says so often that it waits")
    add("--chunk-interval", type=float, default=0.01, metavar="SECONDS")
    add("--chunks", type=int, default=5)
    add("--says", type=path, metavar="FILE", help="answers as in the file: `events` of a stream, one `whole` document")
    add("--until", type=path, metavar="FILE", help="not so many chunks: a stream goes on until the file is there")
    add("--error-line", metavar="TEXT", help="logged at level E while loading, with other lines after it")
    add("--log-line", action="append", default=[], metavar="TEXT", help="written as it is while loading; repeatable")
    add("--cache-disk", type=path, metavar="DIR", help="keeps prompts there")
    add("--cache-disk-mib", type=int, default=8192)
    add("--cache-disk-key", default="0")
    add("--cache-disk-stop-ms", type=int, default=1200)
    add("--n-cpu-moe", type=int, default=0)
    add("--moe-slots", type=int, default=0)
    add("--moe-rates", type=path)
    add("--moe-uses", type=path)
    add("--moe-trace", type=path)
    add("--moe-top-k", type=int, default=8, help="experts of a token")
    add("--metrics", action="store_true", help="answers /metrics")
    add("--threads", type=int, default=1)
    add("--ubatch-size", type=int, default=512)
    add(
        "--slowdown",
        type=path,
        metavar="FILE",
        help="all takes as many times as long as the file says, once it is there",
    )
    add(
        "--decode-ms", default="10", metavar="TABLE", help="a token, by --threads: 1:40,2:20 (timings only, no waiting)"
    )
    add("--prefill-ms", default="4", metavar="TABLE", help="a token, by --ubatch-size: 256:5,512:4")
    add("--spec-type", default="none")
    add("--spec-draft-n-max", type=int, default=3)
    add("--spec-ngram-mod-n-max", type=int, default=64)
    add(
        "--guess",
        type=draft,
        action="append",
        default=[],
        metavar="KIND:COST,CHANCE[/CHANCE]",
        help="of each step, of a guess",
    )
    add("--changes", type=float, default=0.0, metavar="RATE", help="of tokens, if it speculates")
    add("--recalls", type=int, metavar="TOKENS", help="finds a secret number in prompts of so many tokens at most")
    add("--loop", action="store_true", help="every answer is one token over and over")
    add("--port-taken", action="store_true", help="end as if the address were in use")
    options = knobs.parse(arguments)
    options.alias = options.alias or options.model
    return options


def double_fork(pid_file: Path | None) -> None:
    """Start a grandchild in its own session that ignores SIGTERM and sleeps. Its parent has ended."""
    reads, writes = os.pipe()
    if os.fork():
        os.wait()
        os.close(writes)
        pid = os.read(reads, 32)  # the grandchild lives from here on, whatever this program does next
        os.close(reads)
        if pid_file:
            pid_file.write_bytes(pid)
        return
    os.setsid()
    if os.fork():
        os._exit(0)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    os.write(writes, str(os.getpid()).encode())
    os.close(reads)
    os.close(writes)
    while True:
        signal.pause()


def load(engine: Engine) -> None:
    """Loads the model, with all that may happen meanwhile; then lives or dies as asked."""
    options = engine.options
    log("I", f"srv  load_model: loading model '{options.model}'")
    for text in options.log_line:
        write_line(text)
    if options.error_line:
        log("E", f"srv  load_model: {options.error_line}")
        for text in ("cleaning up before exit", "freeing the context", "bye"):
            log("I", f"srv  operator(): {text}")
    for index in range(options.flood_log):
        write_line(f"0.00.000.000 I flood line {index} " + "x" * 60)
    time.sleep(options.load_seconds)
    while options.load_until and not options.load_until.exists():
        time.sleep(0.01)
    if options.die_before_ready is not None:
        die(options.die_before_ready)
    if options.sigill_before_ready:
        os.kill(os.getpid(), signal.SIGILL)
    engine.is_loaded.set()
    log("I", "main: model loaded")
    log("I", f"main: server is listening on {options.host}")
    while options.log_every_s:
        log("W", "srv  update_slots: still waiting")
        time.sleep(options.log_every_s)
    if options.die_after is not None:
        time.sleep(options.die_after)
        log("E", "srv  update_slots: fake engine was asked to die")
        die(1)
    if options.segfault_after is not None:
        time.sleep(options.segfault_after)
        os.kill(os.getpid(), signal.SIGSEGV)


def terminate(engine: Engine) -> None:
    """What llama-server does after SIGTERM: no new work; with --hold-streams it waits for the clients to leave."""
    engine.is_terminating.set()
    log("I", "srv  operator(): cleaning up before exit...")
    while engine.options.hold_streams and engine.ledger.snapshot()["open_streams"]:
        time.sleep(0.01)
    engine.experts.end()
    die(0)


def main(arguments: list[str]) -> int:
    options = parse_options(arguments)
    if options.ignore_sigterm:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if options.double_fork:
        double_fork(options.pid_file)
    while options.hang:
        signal.pause()
    try:
        if options.port_taken:
            raise OSError(98, "Address already in use")
        engine = Engine(options)
    except ValueError as error:
        log("E", f"llama_init_from_model: failed to initialize the context: {error}")
        log("E", "srv  llama_server: exiting due to model loading error")
        return 1
    except OSError as error:
        log("E", f"srv  start: couldn't bind HTTP server socket, hostname: {options.host}: {error.strerror}")
        log("I", "srv  operator(): cleaning up before exit...")
        log("E", "main: exiting due to HTTP server error")
        return 1
    if not options.ignore_sigterm:
        stop = threading.Thread(target=terminate, args=(engine,), daemon=True)
        signal.signal(signal.SIGTERM, lambda *_: None if stop.is_alive() else stop.start())
    threading.Thread(target=load, args=(engine,), daemon=True).start()
    engine.serve_forever(poll_interval=60.0)  # it ends by `die`, which waits for nothing
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
