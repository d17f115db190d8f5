"""A program that behaves like `vllm serve` on a unix socket: its processes, its log, its routes, its ways to end.

    fake_vllm.py serve MODEL --uds /tmp/x.sock [knobs --fake-…] [any other flag of vLLM: ignored]

Three kinds of processes, as vLLM has them: the API server, EngineCore, and workers, each in the group of the first.
Tokens come from worker 0 through EngineCore, so that what is killed stops what depended on it. With --nnodes the hosts
meet at --master-addr before they load, and work as long as all are there: what 0.33.0 does not notice of another host,
this does not either. Log lines are those of 0.33.0. A line of `GET /fake/ledger` tells what was received. Only the
standard library is used.
"""

from __future__ import annotations

import argparse
import ast
import ctypes
import hashlib
import json
import math
import mmap
import os
import queue
import secrets
import select
import signal
import socket
import sys
import threading
import time
from collections import Counter
from http.server import BaseHTTPRequestHandler
from itertools import count
from pathlib import Path
from socketserver import ThreadingMixIn, UnixStreamServer
from typing import Any, NoReturn

STAGES = ("bind", "imports", "weights", "compile", "profile", "graphs", "warm-up")
# As 0.32.0 announces them for a text model, and what its development mode adds. Most say only that they were reached.
ROUTES = {
    **dict.fromkeys(
        ("/openapi.json", "/docs", "/docs/oauth2-redirect", "/redoc", "/server_info", "/is_sleeping"), "GET"
    ),
    **dict.fromkeys(("/health", "/metrics", "/version", "/load", "/kv_event_sources", "/v1/models"), "GET"),
    "/ping": "GET, POST",
    "/v1/responses/{response_id}": "GET",
    **dict.fromkeys(
        (
            *("/tokenize", "/detokenize", "/invocations", "/pause", "/resume", "/abort_requests", "/start_profile"),
            *("/stop_profile", "/scale_elastic_ep", "/is_scaling_elastic_ep", "/generative_scoring"),
            *("/v1/chat/completions", "/v1/chat/completions/batch", "/v1/chat/completions/render", "/v1/completions"),
            *("/v1/completions/render", "/v1/completions/derender", "/v1/chat/completions/derender", "/v1/systemone"),
            *("/v1/responses", "/v1/responses/render", "/v1/responses/{response_id}/cancel", "/v1/messages"),
            *("/v1/messages/render", "/v1/messages/count_tokens"),
            *("/inference/v1/generate", "/inference/v1/abort_requests", "/v1/load_lora_adapter"),
            *("/v1/unload_lora_adapter", "/collective_rpc", "/sleep", "/wake_up", "/reset_prefix_cache"),
            *("/update_weights", "/fault_tolerance/apply"),
        ),
        "POST",
    ),
}
GENERATING = ("/v1/completions", "/v1/chat/completions", "/v1/messages", "/v1/responses", "/invocations")
FULL_PER_REQUEST = 0.25  # of the KV cache
LONG_PROMPT = 2000  # tokens
SECRET_TOKEN = 6  # a word of six characters, which a number of six digits is: this engine's tokens are lengths of words
DEAD = "The server had an error while processing your request."
_LIBC = ctypes.CDLL(None)
_who = "APIServer"


def name_process(name: str) -> None:
    global _who
    _who = name
    _LIBC.prctl(15, f"VLLM::{name}"[:15].encode(), 0, 0, 0)  # PR_SET_NAME


def log(text: str, level: str = "INFO", where: str = "core.py:140") -> None:
    stamp = time.strftime("%m-%d %H:%M:%S")
    prefix = f"({_who} pid={os.getpid()}) {level} {stamp} [{where}] "
    write("".join(f"{prefix}{line}\n" for line in text.split("\n")))


def write(text: str) -> None:
    os.write(2, text.encode())  # one call a message: the processes share the pipe


def raised(head: str, error: str, where: str) -> None:
    """Log an exception in the form of `logger.exception`."""
    frame = '  File "/opt/vllm/lib/vllm/v1/engine/core.py", line 1173, in run_engine_core'
    log(
        f"{head}\nTraceback (most recent call last):\n{frame}\n    engine_core.run_busy_loop()\n{error}", "ERROR", where
    )


def leave(code: int) -> NoReturn:
    sys.stderr.flush()
    os._exit(code)


# Worker and EngineCore: each reads lines of JSON from above and writes lines of JSON upwards.


def worker(pipe: socket.socket, rank: int, options: argparse.Namespace) -> NoReturn:
    """Generate one token for each running request every interval; requests beyond `--max-num-seqs` wait. Like vLLM's
    worker it continues if EngineCore and the API server are gone."""
    name_process(f"Worker_TP{rank}" if options.tensor_parallel_size > 1 else "Worker")
    signal.signal(signal.SIGTERM, lambda *_: leave(0))
    if options.fake_worker_error == "load":
        raised("WorkerProc failed to start.", options.fake_error, "multiproc_executor.py:1057")
        leave(1)
    running: dict[int, list[int]] = {}  # by number, tokens that were made and are wanted
    watched, rest = [pipe], b""
    made = 0
    while True:
        while options.fake_mute_after is not None and made >= options.fake_mute_after:
            signal.pause()
        if select.select(watched, [], [], options.fake_interval if running else None)[0]:
            data = _received(pipe)
            if not data:
                watched.clear()
            rest = take_orders(running, rest + data)
        for number, progress in list(running.items())[: options.max_num_seqs]:
            if options.fake_worker_error == ("first" if number == 1 else "second"):
                raised("WorkerProc hit an exception.", options.fake_error, "multiproc_executor.py:1189")
                leave(1)
            progress[0] += 1
            made += 1
            is_last = progress[0] >= progress[1]
            if rank == 0 and watched:
                _send(pipe, {"id": number, "token": progress[0], "is_last": is_last})
            if is_last:
                del running[number]


def take_orders(running: dict[int, list[int]], data: bytes) -> bytes:
    """Apply the orders in whole lines and return the bytes after the last one."""
    *lines, rest = data.split(b"\n")
    for line in lines:
        order = json.loads(line)
        if order.get("stop"):
            running.pop(order["id"], None)
        else:
            running[order["id"]] = [0, order["tokens"]]
    return rest


def engine_core(pipe: socket.socket, options: argparse.Namespace, model: Path) -> NoReturn:
    """Start the workers, load, then pass orders down and tokens up. It continues if the API server is gone."""
    name_process("EngineCore")
    signal.signal(signal.SIGTERM, lambda *_: leave(0))
    segment = shared_memory(options)
    listener = ipc_file()
    workers: list[tuple[int, socket.socket]] = []
    log(f"Initializing a V1 LLM engine (v0.33.0) with config: model='{model}', dtype=torch.bfloat16")
    pause(options, "imports")
    for rank in range(options.tensor_parallel_size):
        above, below = socket.socketpair()
        pid = os.fork()
        if pid == 0:
            pipe.close()
            above.close()
            worker(below, rank, options)
        below.close()
        workers.append((pid, above))
    if options.fake_worker_error == "load":
        os.waitpid(workers[0][0], 0)
        wrapper = "RuntimeError: WorkerProc initialization failed due to an exception in a background process."
        raised("EngineCore failed to start.", wrapper, "core.py:1583")
        leave(1)
    others = meet(options)
    load(options)
    for each in others:
        wait_loaded(each)
    _send(pipe, {"ready": True})
    if options.fake_mute_after is not None:
        threading.Thread(target=wait_aloud, daemon=True).start()
    relay(pipe, workers, (segment, listener), others)


def wait_aloud() -> NoReturn:
    """At full speed, as 0.33.0 waits for a worker (shm_broadcast.py, `SpinCondition`), and tells of it."""
    said_at = 0.0
    while True:
        if time.monotonic() - said_at > 0.1:
            said_at = time.monotonic()
            log("No available shared memory broadcast block found in 60 seconds.", where="shm_broadcast.py:112")


def meet(options: argparse.Namespace) -> list[socket.socket]:
    """Return connections to the processes of the other hosts, like those of torch.distributed."""
    if options.nnodes == 1:
        return []
    options.others = others = _met(options)
    return others


def _met(options: argparse.Namespace) -> list[socket.socket]:
    address = (options.master_addr, options.master_port)
    where = f"world_size={options.nnodes} rank={options.node_rank} distributed_init_method=tcp://{address[0]}"
    log(where, where="parallel_state.py:1903")
    if options.node_rank == 0:
        with socket.create_server(address) as listener:
            return [listener.accept()[0] for _ in range(options.nnodes - 1)]
    while True:
        try:
            return [socket.create_connection(address)]
        except ConnectionRefusedError:
            time.sleep(0.05)


def headless(options: argparse.Namespace) -> NoReturn:
    """Run a follower's launcher: it has workers, but no EngineCore and no server."""
    signal.signal(signal.SIGTERM, lambda *_: leave(0))
    pause(options, "imports")
    above, below = socket.socketpair()
    pid = os.fork()
    if pid == 0:
        above.close()
        worker(below, 0, options)
    below.close()
    held = meet(options)
    if options.fake_end_with_leader:
        threading.Thread(target=end_with_leader, args=(held[0],), daemon=True).start()
    load(options)
    for each in held:
        _send_bytes(each, b".")
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    words = f"Worker proc VllmWorker-0 died unexpectedly (exit code: {code}), shutting down executor."
    log(words, "ERROR", "multiproc_executor.py:380")
    for each in held:
        each.close()
    leave(0)


def wait_loaded(follower: socket.socket) -> None:
    """Wait until this host has loaded its part, for ever if it ended before."""
    while not _received(follower):
        signal.pause()


def end_with_leader(leader: socket.socket) -> NoReturn:
    """End once the leader closes its connection, as NCCL, Gloo and the store of torch.distributed sometimes do."""
    _received(leader)
    raised("WorkerProc hit an exception.", "RuntimeError: Connection closed by peer", "multiproc_executor.py:1189")
    leave(1)


def relay(
    pipe: socket.socket,
    workers: list[tuple[int, socket.socket]],
    _held: tuple[object, ...],
    others: list[socket.socket],
) -> NoReturn:
    """Tokens go up as long as every host is there: none tells of one that is gone, everything waits."""
    watched = [pipe, *(each for _, each in workers), *others]
    is_whole = True
    while True:
        for one in select.select(watched, [], [])[0]:
            data = _received(one)
            if one in others:
                is_whole = False
                watched.remove(one)
            elif one is pipe and not data:
                watched.remove(pipe)  # the API server is gone: EngineCore computes on
            elif one is pipe:
                for _, each in workers:
                    each.sendall(data)
            elif data:
                if is_whole:
                    _send_bytes(pipe, data)
            else:
                worker_died(workers, one)


def worker_died(workers: list[tuple[int, socket.socket]], pipe: socket.socket) -> NoReturn:
    rank = next(number for number, (_, each) in enumerate(workers) if each is pipe)
    code = os.waitstatus_to_exitcode(os.waitpid(workers[rank][0], 0)[1])
    where = "multiproc_executor.py:380"
    log(f"Worker proc VllmWorker-{rank} died unexpectedly (exit code: {code}), shutting down executor.", "ERROR", where)
    for pid, each in workers:
        if each is not pipe:
            os.kill(pid, signal.SIGTERM)
    raised("EngineCore encountered a fatal error.", "RuntimeError: cancelled", "core.py:1586")
    leave(1)


def _received(pipe: socket.socket) -> bytes:
    try:
        return pipe.recv(65536)
    except (BlockingIOError, ConnectionError):
        return b""


def _send(pipe: socket.socket, value: Any) -> None:
    _send_bytes(pipe, json.dumps(value).encode() + b"\n")


def _send_bytes(pipe: socket.socket, data: bytes) -> None:
    pipe.setblocking(True)
    try:
        pipe.sendall(data)
    except ConnectionError:
        return  # nobody is above any more


def shared_memory(options: argparse.Namespace) -> mmap.mmap:
    """What EngineCore and its workers share, as Python names it, and a semaphore as the C library makes it: mapped
    under another name than it is left with. Both stay behind by whoever is killed."""
    if options.fake_segments is None:
        return mmap.mmap(-1, 4096)
    folder = Path("/dev/shm")
    path, semaphore = folder / f"psm_{secrets.token_hex(4)}", folder / f"sem.mp-{secrets.token_hex(4)}"
    with options.fake_segments.open("a") as names:
        names.write(f"{path}\n{semaphore}\n")
    unnamed = folder / f"sem.{secrets.token_hex(3)}"
    options.held = new_mapping(unnamed)
    semaphore.hardlink_to(unnamed)
    unnamed.unlink()
    return new_mapping(path)


def new_mapping(path: Path) -> mmap.mmap:
    with path.open("w+b") as file:
        file.truncate(4096)
        return mmap.mmap(file.fileno(), 4096)


def ipc_file() -> socket.socket:
    """The end of a queue between processes; its file is left behind."""
    listener = socket.socket(socket.AF_UNIX)
    if folder := os.environ.get("VLLM_RPC_BASE_PATH"):
        listener.bind(str(Path(folder) / secrets.token_hex(8)))
    return listener


# The ladder of a start.


def pause(options: argparse.Namespace, stage: str) -> None:
    """The share of the load that a stage takes; a knob may hang it there, or end it."""
    time.sleep(options.fake_load_s / len(STAGES))
    if options.fake_end_at == stage:
        replay(options)
    while options.fake_hang_at == stage:
        if options.fake_hang_line:
            log(options.fake_hang_line, where="shm_broadcast.py:112")
        time.sleep(0.5)


def replay(options: argparse.Namespace) -> NoReturn:
    """Ends as a kept log tells, all of it: from the middle of this program's tree."""
    if options.fake_replay:
        write(options.fake_replay.read_text())
    if options.headless:
        leave(options.fake_exit)
    for each in options.others:
        each.close()
    time.sleep(options.fake_core_first_s)
    os.kill(os.getppid(), signal.SIGUSR1)  # the API server, which ends with the code that was asked for
    while True:
        signal.pause()


def load(options: argparse.Namespace) -> None:
    pause(options, "weights")
    log("Starting to load model /data/models/m...", where="gpu_model_runner.py:4979")
    log("Loading weights took 0.31 seconds", where="default_loader.py:507")
    log("Model loading took 0.25 GiB memory and 0.802113 seconds", where="gpu_model_runner.py:5089")
    if not options.enforce_eager:
        compile_model(options)
    pause(options, "profile")
    given = f"reserved {options.kv_cache_memory_bytes / 2**30:.2f} GiB memory for KV Cache as specified by "
    log(
        f"Initial free memory 20.1 GiB, {given}kv_cache_memory_bytes config and skipped memory profiling.",
        where="gpu_worker.py:665",
    )
    blocks = options.kv_cache_memory_bytes // options.fake_block_bytes
    concurrency = blocks / -(-options.max_model_len // options.block_size)
    tokens = f"{tokens_of(options):,}"
    words = f"GPU KV cache size: {tokens} tokens, Maximum concurrency for {options.max_model_len:,} tokens per request"
    log(f"{words}: {concurrency:.2f}x", where="kv_cache_utils.py:2327")
    if not options.enforce_eager:
        pause(options, "graphs")
        log("Graph capturing finished in 2 secs, took 0.05 GiB", where="gpu_model_runner.py:6517")
    pause(options, "warm-up")
    log("init engine (profile, create kv cache, warmup model) took 2.90 s", where="core.py:413")


def tokens_of(options: argparse.Namespace) -> int:
    """Return the cache capacity in tokens for all requests together: the number of contexts in all blocks, times the
    context."""
    blocks = options.kv_cache_memory_bytes // options.fake_block_bytes
    return int(blocks / -(-options.max_model_len // options.block_size) * options.max_model_len)


def hold_gpu(options: argparse.Namespace, pid: int, *, has_grown: bool) -> None:
    """The driver's view of EngineCore. Whoever gave the file brings it back once the engine is gone."""
    if options.fake_gpu is None:
        return
    mib = options.fake_gpu_mib + options.fake_gpu_growth_mib * has_grown
    held = options.kv_cache_memory_bytes + mib * 2**20
    lines = [line for line in options.fake_gpu.read_text().splitlines() if not line.endswith("# engine")]
    free = next(int(line.partition("=")[2]) for line in lines if line.startswith("gpu.0.memory_free="))
    own = [f"gpu.0.compute.0={pid}:{held}# engine", f"gpu.0.memory_free={free - held}# engine"]
    written = options.fake_gpu.with_suffix(".new")
    written.write_text("\n".join([*own, *lines]) + "\n")
    written.replace(options.fake_gpu)  # a driver that is asked meanwhile reads all of it


def compile_model(options: argparse.Namespace) -> None:
    """Reads and writes its cache as vLLM does: not at one stroke, so that a kill may leave half a file."""
    words = f"{options.max_model_len} {options.max_num_seqs} {options.max_num_batched_tokens}"
    words += f" {options.kv_cache_dtype} {options.block_size}"
    key = hashlib.sha256(words.encode()).hexdigest()[:10]
    root = Path(os.environ.get("VLLM_CACHE_ROOT", "/nonexistent"))
    folder = root / "torch_compile_cache" / key / "rank_0_0" / "backbone"
    log("Starting torch.compile", where="monitor.py:37")
    folder.mkdir(parents=True, exist_ok=True)
    log(f"Using cache directory: {folder} for vLLM's torch.compile", where="backends.py:1126")
    path = folder / "vllm_compile_cache.py"
    if path.exists():
        ast.literal_eval(path.read_text())  # a half file ends the start, as it does there
        where = "backends.py:311"
        log("Directly load the compiled graph(s) for compile range (1, 2048) from the cache, took 0.812 s", where=where)
        return
    log("Dynamo bytecode transform time: 3.21 s", where="backends.py:1188")
    pause(options, "compile")
    with path.open("w") as file:
        file.write("{((1, 2048), 0, 'inductor'): {'graph_handle': ")
        file.flush()
        time.sleep(options.fake_write_s)
        file.write("('f1', '/f1.py')}}")
    log("Compiling a graph for compile range (1, 2048) takes 10.11 s", where="backends.py:418")
    log("torch.compile took 13.40 s in total", where="monitor.py:71")


# The API server.


class Ledger:
    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.counts: Counter[str] = Counter()
        self.open_streams = 0
        self.disconnects = 0

    def add(self, name: str, amount: int) -> None:
        with self.lock:
            setattr(self, name, getattr(self, name) + amount)


class Api(ThreadingMixIn, UnixStreamServer):
    daemon_threads = True
    request_queue_size = 512

    def __init__(self, options: argparse.Namespace, core: socket.socket) -> None:
        self.options, self.core, self.core_pid = options, core, 0
        self.prompts: list[int] = []  # tokens of each
        self.ledger = Ledger()
        self.is_dead = threading.Event()
        self.is_stopping = threading.Event()
        self.numbers = count(1)
        self.answers: dict[int, queue.Queue[dict[str, Any] | None]] = {}
        self.kept: dict[str, list[int]] = {}  # by salt, the last prompt
        super().__init__(str(options.uds), Handler, bind_and_activate=False)
        self.server_bind()

    def handle_error(self, request: Any, client_address: Any) -> None:
        error = sys.exc_info()[1]
        if not isinstance(error, ConnectionError):
            log(f"{error!r}", "ERROR", "uvicorn")

    def listen_to_core(self) -> None:
        rest = b""
        while data := _received(self.core):
            *lines, rest = (rest + data).split(b"\n")
            for line in lines:
                said = json.loads(line)
                with self.ledger.lock:
                    waiting = self.answers.get(said.get("id", 0))
                if waiting:
                    waiting.put(said)
        self.core_died()

    def core_died(self) -> None:
        if self.is_stopping.is_set():
            return
        self.is_dead.set()
        words = "[shutdown] MPClient: engine core exited unexpectedly; starting cleanup"
        log(words, "WARNING", "core_client.py:840")
        with self.ledger.lock:
            waiting = list(self.answers.values())
        for each in waiting:
            each.put(None)
        time.sleep(self.options.fake_watchdog_s)
        error = "vllm.v1.engine.exceptions.EngineDeadError: EngineCore encountered an issue. See stack trace (above)"
        raised("AsyncLLM output_handler failed.", f"{error} for the root cause.", "async_llm.py:701")
        log("[shutdown] API server: shutting down FastAPI HTTP server", where="launcher.py:306")
        leave(0)

    def begin(self, tokens: int) -> tuple[int, queue.Queue[dict[str, Any] | None]]:
        answer: queue.Queue[dict[str, Any] | None] = queue.Queue()
        with self.ledger.lock:
            number = next(self.numbers)
            self.answers[number] = answer
        _send(self.core, {"id": number, "tokens": tokens})
        if self.is_dead.is_set():
            answer.put(None)
        return number, answer

    def histogram(self) -> list[str]:
        name = 'vllm:request_prefill_kv_computed_tokens_bucket{engine="0",le='
        edges = [digit * 10**power for power in range(5) for digit in (1, 2, 5)]
        with self.ledger.lock:
            prompts = list(self.prompts)
        shown = [f'{name}"{edge}.0"}} {sum(n <= edge for n in prompts)}.0' for edge in edges]
        return [*shown, f'{name}"+Inf"}} {len(prompts)}.0']

    def forget(self, number: int) -> None:
        with self.ledger.lock:
            self.answers.pop(number, None)
        _send(self.core, {"id": number, "stop": True})

    def read(self, tokens: int) -> None:
        with self.ledger.lock:
            self.prompts.append(tokens)
            hold_gpu(self.options, self.core_pid, has_grown=max(self.prompts) >= LONG_PROMPT)

    def cached(self, prompt: list[int], salt: str) -> int:
        """Return the number of cached tokens of a prompt. Only whole blocks count, and never the last token."""
        with self.ledger.lock:
            held, self.kept[salt] = self.kept.get(salt, []), prompt
        same = next(
            (i for i, (a, b) in enumerate(zip(prompt, held, strict=False)) if a != b), min(len(prompt), len(held))
        )
        block_size: int = self.options.block_size
        return min(same, len(prompt) - 1) // block_size * block_size


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Api

    def address_string(self) -> str:
        return "unix"

    def log_message(self, format: str, *args: Any) -> None: ...

    def do_GET(self) -> None:
        self.answer(b"")

    def do_POST(self) -> None:
        self.answer(self.rfile.read(int(self.headers.get("Content-Length", "0"))))

    def answer(self, body: bytes) -> None:
        path = self.path.partition("?")[0]
        ledger = self.server.ledger
        if path == "/fake/ledger":
            with ledger.lock:
                shown = {
                    "counts": ledger.counts,
                    "open_streams": ledger.open_streams,
                    "disconnects": ledger.disconnects,
                }
            return self.reply(200, shown)
        with ledger.lock:
            ledger.counts[f"{self.command} {path}"] += 1
        if path == "/health":
            return self.reply(503 if self.server.is_dead.is_set() else 200, None)
        if self.command not in ROUTES.get(path, "").split(", "):
            return self.reply(405 if path in ROUTES else 404, {"detail": "Not Found"})
        request = json.loads(body) if body else {}
        if path in GENERATING:
            return self.generate(path, request)
        return self.reply(200, self.document(path, request)) if path != "/metrics" else self.metrics()

    def document(self, path: str, request: dict[str, Any]) -> Any:
        if path == "/v1/models":
            model = {"id": self.server.options.served_model_name[0], "object": "model", "root": "/data/models/m"}
            return {"object": "list", "data": [model]}
        if path == "/tokenize":
            words = text_of(request).split()
            tokens = [len(word) for word in words]
            return {
                "count": len(tokens),
                "max_model_len": 2048,
                "tokens": [1, *tokens] if "messages" in request else tokens,
            }
        if path == "/v1/messages/count_tokens":
            return {"input_tokens": len(text_of(request).split())}
        return {"reached": path}

    def metrics(self) -> None:
        options = self.server.options
        blocks = options.kv_cache_memory_bytes // options.fake_block_bytes
        tokens = tokens_of(options) - options.fake_tokens_less
        told = {  # as 0.33.0 has them: every field of its CacheConfig as a text, sorted
            "block_size": options.block_size,
            "cache_dtype": "auto",
            "enable_prefix_caching": True,
            "engine": 0,
            "gpu_memory_utilization": 0.92,
            "kv_cache_dtype_skip_layers": [],
            "kv_cache_max_concurrency": tokens / options.max_model_len,
            "kv_cache_memory_bytes": options.kv_cache_memory_bytes,
            "kv_cache_size_tokens": tokens,
            "num_cpu_blocks": None,
            "num_gpu_blocks": blocks + options.fake_more_blocks,
            "num_gpu_blocks_override": None,
        }
        labels = ",".join(f'{name}="{value}"' for name, value in told.items())
        running = len(self.server.answers)
        lines = [
            "# HELP vllm:cache_config_info Information of the LLMEngine CacheConfig",
            "# TYPE vllm:cache_config_info gauge",
            f"vllm:cache_config_info{{{labels}}} 1.0",
            f"vllm:num_requests_running {running:.1f}",
            f"vllm:kv_cache_usage_perc {min(running * FULL_PER_REQUEST, 1.0)}",
            *self.server.histogram(),
        ]
        body = "".join(f"{line}\n" for line in lines).encode()
        self.send_response(200)
        self.send_header("Content-Type", "text/plain; version=0.0.4")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def generate(self, path: str, request: dict[str, Any]) -> None:
        options = self.server.options
        if (name := request.get("model")) and name not in options.served_model_name:
            message = f"The model `{name}` does not exist."
            return self.reply(
                404, {"error": {"message": message, "type": "NotFoundError", "param": "model", "code": 404}}
            )
        if request.get("tools") and not (options.enable_auto_tool_choice and options.tool_call_parser):
            message = '"auto" tool choice requires --enable-auto-tool-choice and --tool-call-parser to be set'
            return self.reply(400, {"error": {"message": message, "type": "BadRequestError", "code": 400}})
        if self.server.is_dead.is_set():
            return self.reply(500, error_document())
        self.server.read(len(prompt_of(request)))
        tokens = request.get("max_tokens") or request.get("max_output_tokens") or 16
        number, answer = self.server.begin(tokens)
        try:
            if request.get("stream"):
                self.stream(path, request, tokens, answer)
            else:
                self.whole(path, request, tokens, answer)
        finally:
            self.server.forget(number)

    def whole(
        self, path: str, request: dict[str, Any], tokens: int, answer: queue.Queue[dict[str, Any] | None]
    ) -> None:
        while (said := answer.get()) and not said["is_last"]:
            if self.client_left(0):
                self.close_connection = True
                return None
        if said is None:
            return self.reply(500, error_document())
        return self.reply(200, self.completion(path, request, tokens))

    def completion(self, path: str, request: dict[str, Any], tokens: int) -> dict[str, Any]:
        options = self.server.options
        if path == "/v1/messages":
            content = [{"type": "text", "text": "word " * tokens}]
            return {"type": "message", "role": "assistant", "content": content, "stop_reason": "max_tokens"}
        choice: dict[str, Any] = {"index": 0, "finish_reason": "length", "text": "word " * tokens}
        choice["message"] = {"role": "assistant", "content": "word " * tokens}
        if request.get("return_token_ids"):
            choice["token_ids"] = self.token_ids(request, tokens)
        if "logprobs" in request and "chat" not in path:
            likely = (options.fake_likely, 1 - options.fake_likely)
            named = {f"token_id:{token}": math.log(share) for token, share in enumerate(likely)}
            choice["logprobs"] = {"top_logprobs": [named] * tokens}
        kind = "chat.completion" if "chat" in path else "text_completion"
        usage, metrics = self.figures(request, tokens)
        return {"id": "cmpl-1", "object": kind, "choices": [choice], "usage": usage, "metrics": metrics}

    def token_ids(self, request: dict[str, Any], made: int) -> list[int]:
        """Return an answer that depends on the place alone, so that it goes on where an earlier one was cut."""
        options, begin = self.server.options, len(prompt_of(request))
        if options.fake_recalls is not None and begin <= options.fake_recalls:
            return [SECRET_TOKEN] * made
        places = range(begin, begin + made)
        return [-1 if place * 7919 % 1000 < 1000 * options.fake_changes else place for place in places]

    def figures(self, request: dict[str, Any], made: int) -> tuple[dict[str, Any], dict[str, Any]]:
        """Usage, and the engine's own clock as the knobs have it: nothing is waited for."""
        options, prompt = self.server.options, prompt_of(request)
        salt = str(request.get("cache_salt", ""))
        cached = 0 if "--no-enable-prefix-caching" in options.rest else self.server.cached(prompt, salt)
        read = len(prompt) - cached
        step_ms = options.fake_decode_ms * (1 + len(prompt) / 2048)
        details = {"prompt_tokens_details": {"cached_tokens": cached}} if options.enable_prompt_tokens_details else {}
        usage = {"prompt_tokens": len(prompt), "completion_tokens": made, "total_tokens": len(prompt) + made, **details}
        metrics: dict[str, Any] = {
            "time_to_first_token_ms": read * options.fake_prefill_ms + step_ms,
            "generation_time_ms": (made - 1) * step_ms,
            "queue_time_ms": 0.01,
        }
        if options.speculative_config:
            steps = max(1, made // 2)
            counts = {"num_spec_steps": steps, "num_draft_tokens": 3 * steps, "num_accepted_draft_tokens": steps}
            metrics["speculative_decoding"] = counts
        return usage, metrics

    def stream(
        self, path: str, request: dict[str, Any], tokens: int, answer: queue.Queue[dict[str, Any] | None]
    ) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream; charset=utf-8")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        self.server.ledger.add("open_streams", 1)
        try:
            self.send_tokens(path, request, tokens, answer)
        except OSError:
            self.server.ledger.add("disconnects", 1)
            self.close_connection = True
        finally:
            self.server.ledger.add("open_streams", -1)

    def send_tokens(
        self, path: str, request: dict[str, Any], tokens: int, answer: queue.Queue[dict[str, Any] | None]
    ) -> None:
        while True:
            said = self.next_of(answer)
            if said is None:
                return self.send_failure(path)
            self.send_event(self.event(path, request, said["token"], is_last=said["is_last"]))
            if said["is_last"]:
                break
        if (request.get("stream_options") or {}).get("include_usage"):
            usage, metrics = self.figures(request, tokens)
            self.send_event({"choices": [], "usage": usage, "metrics": metrics})
        return self.send_end(path)

    def next_of(self, answer: queue.Queue[dict[str, Any] | None]) -> dict[str, Any] | None:
        """The next token. With a hang at SIGTERM nothing more comes, and the stream does not end either."""
        while True:
            try:
                said = answer.get(timeout=0.1)
            except queue.Empty:
                said = {}
            if self.server.is_stopping.is_set() and self.server.options.fake_hang_at_sigterm:
                while not self.client_left(1.0):
                    pass
                raise ConnectionResetError
            if said != {}:
                return said
            if self.client_left(0):
                raise ConnectionResetError

    def event(self, path: str, request: dict[str, Any], number: int, *, is_last: bool) -> dict[str, Any]:
        if path == "/v1/messages":
            return {"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": "word "}}
        reason = "length" if is_last else None
        choice: dict[str, Any] = {"index": 0, "finish_reason": reason, "text": "word ", "delta": {"content": "word "}}
        if request.get("return_token_ids"):
            choice["token_ids"] = [number]
        return {"id": "cmpl-1", "object": "text_completion", "choices": [choice]}

    def send_failure(self, path: str) -> None:
        """The HTTP status was 200 long ago; what follows looks like a proper end."""
        if path == "/v1/messages":
            error = {"type": "error", "error": {"type": "api_error", "message": DEAD}}
            self.send_chunk(f"event: error\ndata: {json.dumps(error)}\n\n".encode())
        else:
            self.send_event(error_document())
        self.send_end(path)

    def send_end(self, path: str) -> None:
        if path != "/v1/messages":
            self.send_chunk(b"data: [DONE]\n\n")
        self.send_chunk(b"")

    def send_event(self, event: dict[str, Any]) -> None:
        head = f"event: {event['type']}\n" if "type" in event else ""
        self.send_chunk(f"{head}data: {json.dumps(event)}\n\n".encode())

    def send_chunk(self, data: bytes) -> None:
        self.wfile.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")
        self.wfile.flush()

    def client_left(self, wait_s: float) -> bool:
        if not select.select([self.connection], [], [], wait_s)[0]:
            return False
        return not self.connection.recv(1, socket.MSG_PEEK)

    def reply(self, status: int, value: Any) -> None:
        body = b"" if value is None else json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


def error_document() -> dict[str, Any]:
    return {"error": {"message": DEAD, "type": "InternalServerError", "param": None, "code": 500}}


def text_of(request: dict[str, Any]) -> str:
    messages = request.get("messages")
    return str(messages[-1].get("content", "") if messages else request.get("prompt", request.get("input", "")))


def prompt_of(request: dict[str, Any]) -> list[int]:
    prompt = request.get("prompt")
    return prompt if isinstance(prompt, list) else [len(word) for word in text_of(request).split()] or [1]


# The program.


def parse_options(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, prog="vllm serve", allow_abbrev=False)
    add = parser.add_argument
    add("verb", choices=["serve"])
    add("model", type=Path)
    add("--uds", type=Path, required=True)
    add("--served-model-name", nargs="+", default=["m"])
    add("--max-model-len", type=int, default=2048)
    add("--max-num-seqs", type=int, default=4)
    add("--max-num-batched-tokens", type=int, default=2048)
    add("--block-size", type=int, default=16)
    add("--kv-cache-dtype", default="auto")
    add("--kv-cache-memory-bytes", type=int, default=2**30)
    add("--tensor-parallel-size", type=int, default=1)
    add("--nnodes", type=int, default=1)
    add("--node-rank", type=int, default=0)
    add("--master-addr", default="127.0.0.1")
    add("--master-port", type=int, default=29501)
    add("--headless", action="store_true", help="workers alone, for the EngineCore of node rank 0")
    add("--enforce-eager", action="store_true")
    add("--speculative-config", default="")
    add("--enable-prompt-tokens-details", action="store_true")
    add("--enable-auto-tool-choice", action="store_true")
    add("--tool-call-parser")
    add("--fake-load-s", type=float, default=0.0, help="of the whole ladder")
    add("--fake-interval", type=float, default=0.005, help="seconds a token")
    add("--fake-decode-ms", type=float, default=10.0, help="a token, by the engine's clock: nothing is waited for")
    add("--fake-prefill-ms", type=float, default=1.0)
    add("--fake-changes", type=float, default=0.0, metavar="RATE", help="of tokens")
    add("--fake-likely", type=float, default=0.9, metavar="SHARE", help="probability of the likeliest of two tokens")
    add("--fake-recalls", type=int, metavar="TOKENS", help="finds a secret number in prompts of so many tokens at most")
    add("--fake-block-bytes", type=int, default=368_640)
    add("--fake-more-blocks", type=int, default=0, help="in its metrics than it was given bytes for")
    add("--fake-tokens-less", type=int, default=0, help="in its metrics than in its log")
    add("--fake-write-s", type=float, default=0.0, help="a compile cache is half a file for so long")
    add("--fake-watchdog-s", type=float, default=0.2, help="from EngineCore's death to the end; vLLM takes up to 5")
    add("--fake-hang-at", choices=STAGES, help="no line and no work from there on")
    add("--fake-hang-line", help="said over and over while it hangs")
    add("--fake-hang-at-sigterm", action="store_true", help="an open stream keeps the API server for good")
    add("--fake-end-at", choices=STAGES, help="there the log of --fake-replay is written, and all end")
    add("--fake-replay", type=Path)
    add("--fake-exit", type=int, default=1)
    add("--fake-core-first-s", type=float, default=0.0, help="other hosts notice an end so long before the API server")
    add("--fake-end-with-leader", action="store_true", help="a headless process, once the leader's is gone")
    add("--fake-worker-error", choices=["load", "first", "second"], help="a worker raises: as it loads, at a request")
    add("--fake-mute-after", type=int, help="tokens of all; then workers make none, and EngineCore waits at full speed")
    add("--fake-error", default="AssertionError")
    add("--fake-gpu", type=Path, metavar="FILE", help="what fakes/nvml reads: its first card has this engine's memory")
    add("--fake-gpu-mib", type=int, default=0, help="of that card beside the KV cache, as it is ready")
    add("--fake-gpu-growth-mib", type=int, default=0, help="more of it since a prompt of 2,000 tokens")
    add("--fake-segments", type=Path, metavar="FILE", help="its shared memory has a name, and it stands there")
    options, rest = parser.parse_known_args(arguments)
    options.rest = rest
    options.others = []
    return options


def bind(options: argparse.Namespace, core: socket.socket) -> Api:
    try:
        return Api(options, core)
    except OSError as error:
        raised("Traceback", f"OSError: [Errno {error.errno}] {error.strerror}", "api_server.py:512")
        leave(1)


def start_core(options: argparse.Namespace) -> tuple[int, socket.socket]:
    above, below = socket.socketpair()
    pid = os.fork()
    if pid == 0:
        above.close()
        try:
            engine_core(below, options, options.model)
        except (SyntaxError, ValueError) as error:
            raised("EngineCore failed to start.", f"{type(error).__name__}: {error}", "core.py:1583")
            leave(1)
    below.close()
    return pid, above


def wait_for_core(core: socket.socket, pid: int) -> None:
    """Up to its word that it is ready; the API server fails for it when it ends before."""
    data = b""
    while not data.endswith(b"\n"):
        got = core.recv(4096)
        if not got:
            code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
            words = "RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): "
            words += f"{{'EngineCore': {code}}}"
            write(f'Traceback (most recent call last):\n  File "/opt/vllm/bin/vllm", line 8\n{words}\n')
            leave(1)
        data += got


def stop(server: Api, core_pid: int) -> None:
    server.is_stopping.set()
    log("[shutdown] API server: shutdown triggered", where="launcher.py:256")
    try:
        os.kill(core_pid, signal.SIGTERM)
    except ProcessLookupError:
        log("[shutdown] MPClient: complete", where="core_client.py:799")
    with server.ledger.lock:
        waiting = list(server.answers.values())
    for each in waiting:
        each.put(None)
    if server.options.fake_hang_at_sigterm and server.ledger.open_streams:
        write("INFO:     Waiting for connections to close. (CTRL+C to force quit)\n")
        return
    deadline = time.monotonic() + 1.0
    while server.ledger.open_streams and time.monotonic() < deadline:
        time.sleep(0.01)
    leave(0)


def main(arguments: list[str]) -> int:
    options = parse_options(arguments)
    name_process("MainProcess" if options.headless else "APIServer")
    signal.signal(signal.SIGUSR1, lambda *_: leave(options.fake_exit))
    if options.fake_end_at == "bind":
        if options.fake_replay:
            write(options.fake_replay.read_text())
        leave(options.fake_exit)
    words = {"uds": str(options.uds), "model": str(options.model)}
    if options.headless:
        headless(options)
    server = bind(options, socket.socket())
    log("vLLM API server version 0.33.0", where="startup.py:120")
    log(f"non-default args: {words}", where="startup.py:96")
    core_pid, core = start_core(options)
    server.core, server.core_pid = core, core_pid
    wait_for_core(core, core_pid)
    hold_gpu(options, core_pid, has_grown=False)
    threading.Thread(target=server.listen_to_core, daemon=True).start()
    ending = threading.Thread(target=stop, args=(server, core_pid), daemon=True)
    signal.signal(signal.SIGTERM, lambda *_: None if ending.is_alive() else ending.start())
    log(f"Starting vLLM server on unix:{options.uds}", where="entry.py:139")
    log("Available routes are:", where="launcher.py:188")
    for path, methods in ROUTES.items():
        log(f"Route: {path}, Methods: {methods}", where="launcher.py:197")
    server.server_activate()
    write("INFO:     Application startup complete.\n")
    server.serve_forever(poll_interval=0.05)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
