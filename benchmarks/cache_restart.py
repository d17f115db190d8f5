"""Prompts on disk in the bare engine: time to the first token after a restart, equal logits, kills while it saves.

Four shapes with random weights are written at run time: plain attention, a sliding window, a Mamba hybrid, a DeltaNet
hybrid. `--model` adds a real one, such as the demo's.

- **first token**: a prompt of N tokens is read and saved, and the engine is killed. After a restart the same prompt is
  asked again; after another one, a next turn of 60 more tokens; after a third one, that turn when other conversations
  have taken the slots. The same turn is also asked without a restart: the engine's own time for 60 tokens. The clock
  runs from the request to the first token; the load is not counted. The file is dropped from the page cache before each
  restart, so it is read from the disk.
- **equal**: logits of the 32 positions after a prompt, as KL divergence from those of an engine without saved prompts.
  That engine's own difference is the largest one between reading the prompt in one go, going on from it, and having it
  back from its cache in memory after other conversations. A restart is equal if it is within that difference. The
  control is another prompt with the same last tokens: a foreign state shows if its divergence is much larger. Random
  weights repeat one token, so a text proves nothing; of a real model the greedy text is compared.
- **kills**: `kill -9` at a random moment while a prompt is written. Counted are kills in mid-write, temporary files
  that are left after the next start, and restarts whose logits are not equal.

    python3 -m benchmarks.cache_restart [--pairs 5] [--restarts 100] [--kills 100] [--tokens 8000] [--shape NAME ...]
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import itertools
import json
import math
import os
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from appliance.engines.llama.process.prompt_disk import STOP_MS, VARIABLE
from benchmarks.start import cpu_name, free_port
from tests.shapes.shape import SMALL, SMALL_VOCABULARY
from tests.shapes.write import write_gguf

ENGINE = Path(".make/engine/llama-server")
SHAPES = {
    "attention": SMALL["gqa"].changed(block_count=16, attention__head_count_kv=4),
    "sliding window": SMALL["sliding"].changed(block_count=16),
    "Mamba hybrid": SMALL["falcon-h1"].changed(block_count=8),
    "DeltaNet hybrid": SMALL["delta-net"].changed(block_count=16),
}
POSITIONS, TURN, REPETITIONS = 32, 60, 5
STRANGERS, STRANGER = 3, 200  # conversations between repetitions, and their tokens: they take the slots
PROMPT_OF_LOGITS = 1_000  # tokens
SAVED_WITHIN_S, READY_WITHIN_S = 60.0, 120.0
SAME = 8  # tokens that the control's prompt has in common with the other, at the end
LEAST_KL = 1e-6
AIM = 0.02  # of the time without a saved prompt


@dataclass(frozen=True, kw_only=True)
class Rig:
    """An engine, a model, and the folder of its prompts."""

    engine: Path
    model: Path
    folder: Path
    context: int
    limit_mib: int = 65_536
    key: str = "0"
    secret: str = "0123456789abcdef" * 2
    log: Path = Path(os.devnull)

    def files(self, end: str = ".prompt") -> list[Path]:
        return [path for path in self.folder.iterdir() if path.name.endswith(end)] if self.folder.exists() else []

    @contextlib.contextmanager
    def running(self) -> Iterator[Engine]:
        port = free_port()
        argv = [
            str(self.engine), "--model", str(self.model), "--port", str(port), "--ctx-size", str(self.context),
            "--parallel", "2", "--kv-unified", "--no-ui", "--offline", "--cache-disk", str(self.folder),
            "--cache-disk-mib", str(self.limit_mib), "--cache-disk-stop-ms", str(STOP_MS),
            *(("--cache-disk-key", self.key) if self.key else ()),
        ]  # fmt: skip
        with self.log.open("wb") as log:
            environment = {**os.environ, VARIABLE: self.secret}
            process = subprocess.Popen(argv, env=environment, stdout=log, stderr=subprocess.STDOUT)
        try:
            engine = Engine(process=process, port=port)
            engine.wait_ready()
            yield engine
        finally:
            process.kill()
            process.wait()


class Logits(NamedTuple):
    """Log-probabilities by token, a row for each position, and how many tokens of the prompt came from disk."""

    rows: list[dict[int, float]]
    disk_n: int


@dataclass(frozen=True, kw_only=True)
class Engine:
    process: subprocess.Popen[bytes]
    port: int

    def wait_ready(self) -> None:
        until = time.monotonic() + READY_WITHIN_S
        while time.monotonic() < until:
            with contextlib.suppress(OSError):
                if self.ask("GET", "/health", None, 5.0)[0] == 200:
                    return
            if self.process.poll() is not None:
                sys.exit(f"error: the engine ended with {self.process.returncode}")
            time.sleep(0.01)
        sys.exit("error: the engine was not ready in time")

    def complete(self, tokens: Sequence[int], *, count: int = 1, **fields: object) -> dict[str, Any]:
        body = {"prompt": list(tokens), "n_predict": count, "temperature": 0, "ignore_eos": True, **fields}
        status, data = self.ask("POST", "/completion", json.dumps(body), 1800.0)
        if status != 200:
            sys.exit(f"error: {status}: {data[:500].decode(errors='replace')}")
        found: dict[str, Any] = json.loads(data)
        return found

    def first_token_s(self, tokens: Sequence[int]) -> float:
        """Return the seconds from the request to the first token."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=1800)
        body = json.dumps({"prompt": list(tokens), "n_predict": 4, "temperature": 0, "stream": True})
        begun = time.monotonic()
        connection.request("POST", "/completion", body, {"Content-Type": "application/json"})
        reply = connection.getresponse()
        while not reply.readline().startswith(b"data: {"):
            pass
        seconds = time.monotonic() - begun
        reply.read()
        connection.close()
        return seconds

    def tokens_of(self, text: str) -> list[int]:
        _, data = self.ask("POST", "/tokenize", json.dumps({"content": text, "add_special": True}), 60.0)
        return [int(token) for token in json.loads(data)["tokens"]]

    def logits(self, prompt: Sequence[int], forced: Sequence[int]) -> Logits:
        """Return the log-probabilities of all tokens at each forced position after the prompt."""
        # Half of a UTF-8 character would have no probabilities, so a letter is sampled. The logits are unchanged.
        bias = [[self.tokens_of("a")[-1], 1_000]]
        answers = [
            self.complete([*prompt, *forced[:end]], n_probs=SMALL_VOCABULARY, logit_bias=bias)
            for end in range(1, len(forced) + 1)
        ]
        rows = [answer["completion_probabilities"][0]["top_logprobs"] for answer in answers]
        return Logits(
            rows=[{each["id"]: each["logprob"] for each in row} for row in rows],
            disk_n=answers[0]["timings"].get("disk_n", 0),
        )

    def ask(self, method: str, path: str, body: str | None, timeout_s: float, **headers: str) -> tuple[int, bytes]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=timeout_s)
        connection.request(method, path, body, {"Content-Type": "application/json", **headers})
        reply = connection.getresponse()
        data = reply.read()
        connection.close()
        return reply.status, data


def divergence(reference: Logits, other: Logits) -> float:
    """Return the largest KL divergence over the positions, in nats."""
    return max(
        sum(math.exp(logprob) * (logprob - there.get(token, -100.0)) for token, logprob in here.items())
        for here, there in zip(reference.rows, other.rows, strict=True)
    )


def wait_saved(rig: Rig) -> None:
    until = time.monotonic() + SAVED_WITHIN_S
    while not rig.files():
        if time.monotonic() > until:
            sys.exit("error: the prompt was not saved in time")
        time.sleep(0.001)


def drop_from_memory(rig: Rig) -> None:
    """Write the files to the disk and drop them from the page cache."""
    for path in rig.files():
        handle = os.open(path, os.O_RDONLY)
        os.fsync(handle)
        os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(handle)


def serve_strangers(engine: Engine, rng: random.Random) -> None:
    """Take all slots with other conversations."""
    for _ in range(STRANGERS):
        engine.complete(tokens(rng, STRANGER))


def time_first_tokens(
    rig: Rig, prompts: Sequence[Sequence[int]], turn: Sequence[int], rng: random.Random
) -> dict[str, list[float]]:
    """Return seconds to the first token, prompt by prompt: without a file, with one, of a longer next turn, of that
    turn after other conversations, and of that turn without a restart."""
    found: dict[str, list[float]] = {
        "without": [], "with": [], "next turn": [], "after others": [], "next turn, no restart": [],
    }  # fmt: skip
    for prompt in prompts:
        shutil.rmtree(rig.folder, ignore_errors=True)
        with rig.running() as engine:
            found["without"].append(engine.first_token_s(prompt))
            wait_saved(rig)
            found["next turn, no restart"].append(engine.first_token_s([*prompt, *turn]))
        for name, asked in (("with", prompt), ("next turn", [*prompt, *turn]), ("after others", [*prompt, *turn])):
            drop_from_memory(rig)
            with rig.running() as engine:
                if name == "after others":
                    serve_strangers(engine, rng)
                found[name].append(engine.first_token_s(asked))
    return found


def own_difference(
    rig: Rig, prompt: Sequence[int], forced: Sequence[int], rng: random.Random
) -> tuple[Logits, dict[str, float]]:
    """Return logits without saved prompts, and KL divergences: the engine's own largest one, and the control's.

    The engine reads the prompt in one go with what follows, or goes on from it, or has it back from its own memory.
    """
    plain = replace(rig, limit_mib=0)
    with plain.running() as engine:
        at_once = engine.logits(prompt, forced)
    with plain.running() as engine:
        engine.complete(prompt)
        found = [engine.logits(prompt, forced)]
        for _ in range(REPETITIONS):
            serve_strangers(engine, rng)
            found.append(engine.logits(prompt, forced))
        control = engine.logits([*tokens(rng, len(prompt) - SAME), *prompt[-SAME:]], forced)
    own = max(divergence(one, other) for one, other in itertools.permutations([at_once, *found], 2))
    return found[0], {"own_kl": own, "control_kl": divergence(found[0], control)}


def count_equal(rig: Rig, rng: random.Random, restarts: int) -> dict[str, Any]:
    """Return in how many restarts the logits are as equal as without one."""
    prompt, forced = (tokens(rng, count) for count in (PROMPT_OF_LOGITS, POSITIONS))
    reference, scale = own_difference(rig, prompt, forced, rng)
    shutil.rmtree(rig.folder, ignore_errors=True)
    with rig.running() as engine:
        engine.complete(prompt)
        wait_saved(rig)
        kept = {path.name: path.read_bytes() for path in rig.files()}
    found, from_disk = [], 0
    for number in range(restarts):
        shutil.rmtree(rig.folder)
        rig.folder.mkdir()
        for name, data in kept.items():
            (rig.folder / name).write_bytes(data)
        with rig.running() as engine:
            logits = engine.logits(prompt, forced)
        from_disk += logits.disk_n >= len(prompt) - 8  # a checkpoint may be some tokens before its end
        found.append(divergence(reference, logits))
        progress(f"restart {number + 1} of {restarts}")
    equal = sum(each <= scale["own_kl"] + LEAST_KL for each in found)
    return {"restarts": restarts, "equal": equal, "from_disk": from_disk, "worst_kl": max(found), **scale}


def count_texts(rig: Rig, prompt: Sequence[int], restarts: int) -> dict[str, Any]:
    """Return in how many restarts the greedy text is one that the engine gives without a restart."""
    shutil.rmtree(rig.folder, ignore_errors=True)
    with rig.running() as engine:
        own = {str(engine.complete(prompt, count=POSITIONS)["content"]) for _ in range(REPETITIONS)}
        wait_saved(rig)
    equal = from_disk = 0
    for number in range(restarts):
        with rig.running() as engine:
            answer = engine.complete(prompt, count=POSITIONS)
        equal += answer["content"] in own
        from_disk += answer["timings"]["disk_n"] >= len(prompt) - 8
        progress(f"restart {number + 1} of {restarts}")
    return {"restarts": restarts, "equal": equal, "from_disk": from_disk, "own_texts": len(own)}


def count_kills(rig: Rig, rng: random.Random, kills: int, count: int) -> dict[str, int]:
    """Kill the engine while it writes; return what was left, and how often the next start was wrong."""
    found = {"kills": kills, "in mid-write": 0, "whole files": 0, "left behind": 0, "wrong": 0}
    prompt, forced = tokens(rng, count), tokens(rng, 2)
    reference, scale = own_difference(rig, prompt, forced, rng)
    longest_s = 0.0
    for number in range(-1, kills):
        shutil.rmtree(rig.folder, ignore_errors=True)
        with rig.running() as engine:
            engine.complete(prompt)
            begun = wait_write(rig)
            if number < 0:  # how long a write takes
                wait_saved(rig)
                longest_s = time.monotonic() - begun
                continue
            time.sleep(rng.uniform(0, longest_s))
        found["in mid-write"] += len(rig.files(".tmp"))
        found["whole files"] += len(rig.files())
        with rig.running() as engine:
            found["left behind"] += len(rig.files(".tmp"))
            found["wrong"] += divergence(reference, engine.logits(prompt, forced)) > scale["own_kl"] + LEAST_KL
        progress(f"kill {number + 1} of {kills}")
    return found


def wait_write(rig: Rig) -> float:
    """Return as soon as a prompt is being written."""
    until = time.monotonic() + SAVED_WITHIN_S
    while not rig.files(".tmp") and not rig.files():
        if time.monotonic() > until:
            sys.exit("error: no prompt was written in time")
        time.sleep(0.0005)
    return time.monotonic()


def tokens(rng: random.Random, count: int) -> list[int]:
    return [rng.randrange(3, SMALL_VOCABULARY) for _ in range(count)]


def progress(text: str) -> None:
    print(f"\r{text:<40}", end="", file=sys.stderr, flush=True)


def measure(options: argparse.Namespace, name: str, rig: Rig) -> dict[str, Any]:
    rng = random.Random(options.seed)
    found: dict[str, Any] = {}
    if options.pairs:
        prompts = [tokens(rng, options.tokens) for _ in range(options.pairs)]
        found["seconds"] = time_first_tokens(rig, prompts, tokens(rng, TURN), rng)
    if options.restarts and name in SHAPES:
        found["equal"] = count_equal(rig, rng, options.restarts)
    elif options.restarts:
        with rig.running() as engine:
            prompt = engine.tokens_of("A story of a fox and a river, told by an old wizard.\n" * 20 + "It begins: ")
        found["texts"] = count_texts(rig, prompt, options.restarts)
    if options.kills and name in SHAPES:
        found["killed"] = count_kills(rig, rng, options.kills, min(options.tokens, 4_000))
    return found


def in_words(name: str, found: dict[str, Any]) -> str:
    words = []
    if seconds := found.get("seconds"):
        without = seconds["without"]
        words.append(f"first token {statistics.median(without):.2f} s; aim {AIM}, bound 0.1")
        for key, times in seconds.items():
            if times is not without:
                ratio = statistics.median(after / before for after, before in zip(times, without, strict=True))
                words.append(f"{key} {statistics.median(times):.3f} s ({ratio:.4f})")
    if equal := found.get("equal"):
        words.append(
            f"equal in {equal['equal']} of {equal['restarts']} restarts, {equal['from_disk']} read from disk; "
            f"worst KL {equal['worst_kl']:.2e}, own {equal['own_kl']:.2e}, control {equal['control_kl']:.2e}"
        )
    if texts := found.get("texts"):
        words.append(
            f"same greedy text in {texts['equal']} of {texts['restarts']}, {texts['from_disk']} read from disk "
            f"({texts['own_texts']} without)"
        )
    if killed := found.get("killed"):
        words.append(", ".join(f"{value} {key}" for key, value in killed.items()))
    return f"{name}: " + "; ".join(words)


def main() -> int:
    options = _parse()
    results = {}
    print(f"{os.cpu_count()} CPUs: {cpu_name()}; {options.tokens:,} tokens, medians of {options.pairs} pairs")
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        models = {name: Path(folder) / f"{number}.gguf" for number, name in enumerate(options.shape or SHAPES)}
        for name, path in models.items():
            shape = SHAPES[name].changed(context_length=options.tokens + 1_024)
            write_gguf(path, shape, quantization="Q8_0", with_data=True)
        if options.model:
            models[options.model.name] = options.model
        for name, path in models.items():
            rig = Rig(
                engine=options.engine, model=path, folder=Path(folder) / "prompts", context=options.tokens + 1_024
            )
            results[name] = measure(options, name, rig)
            progress("")
            print(f"\r{in_words(name, results[name])}", flush=True)
    if options.json:
        print(json.dumps(results))
    return 0


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine", type=Path, default=ENGINE, help="llama-server (default: of `make engine`)")
    parser.add_argument("--shape", action="append", choices=SHAPES, help="only these shapes")
    parser.add_argument("--model", type=Path, help="a GGUF file to measure as well")
    parser.add_argument("--folder", type=Path, default=Path("/var/tmp"), help="where models and prompts are written")
    parser.add_argument("--tokens", type=int, default=8_000)
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--restarts", type=int, default=100, help="for equal logits or texts, of each model")
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    if not options.engine.is_file():
        parser.error(f"no engine: {options.engine}; `make engine` takes it from the image")
    return options


if __name__ == "__main__":
    sys.exit(main())
