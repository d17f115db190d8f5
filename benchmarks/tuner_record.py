"""Fills the recorded table from the real llama-server, cell by cell; what is in the table already is not done again.

    python3 -m benchmarks.tuner --record --engine .make/engine --model SmolLM2-135M=FILE [--cells 3]

Each cell is one start and three depths. The first cell of a model is measured four times over: its noise. A cell during
which other processes took more than a little of the machine is measured again. Two more models, a dense one and a
mixture of experts, are written here with random weights.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import datetime
import itertools
import json
import os
import platform
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf

from appliance.command import Command
from appliance.engines.engine import Install
from appliance.engines.llama.engine import ENGINE as LLAMA
from appliance.engines.llama.process.facts import query_facts
from appliance.errors import EngineError
from appliance.supervisor import Supervisor
from appliance.tune.trials.run_trial import Probe
from benchmarks import tuner_table
from tests.shapes import SMALL, write_gguf

GRID: dict[str, tuple[Any, ...]] = {
    "kv_type": ("f16", "q8_0"),
    "load_mode": ("mmap", "none"),
    "threads": (1, 2),
    "ubatch": (128, 512, 1024),
}
DEPTHS = (32, 512, 2048)
REPEATS = 4
TOKENS = 32
SYNTHETIC = {
    "dense-150M": SMALL["gqa"].changed(
        block_count=12, embedding_length=1024, feed_forward_length=2816, attention__head_count=16,
        attention__head_count_kv=4,
    ),
    "moe-16x": SMALL["moe"].changed(
        block_count=12, embedding_length=768, attention__head_count=12, attention__head_count_kv=4,
        expert_count=16, expert_used_count=4, expert_feed_forward_length=512,
    ),
}  # fmt: skip
FOREIGN = 0.03  # of the machine, taken by others meanwhile: above it a cell is measured again
TRIES = 4


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--record", action="store_true", help="measure what the recorded table still lacks")
    parser.add_argument("--engine", type=Path, metavar="FOLDER", help="with --record: where llama-server is")
    parser.add_argument("--model", action="append", default=[], metavar="NAME=FILE", help="with --record: a GGUF file")
    parser.add_argument("--cells", type=int, metavar="N", help="with --record: stop after so many cells")


def record(table: Path, options: argparse.Namespace) -> int:
    if options.engine is None:
        sys.exit("error: --record needs --engine")
    rows = tuner_table.read(table)
    with tempfile.TemporaryDirectory(prefix="tuner-") as folder:
        models = dict(word.split("=", 1) for word in options.model)
        for name, shape in SYNTHETIC.items():
            path = Path(folder) / f"{name}.gguf"
            models[name] = str(write_gguf(path, shape, quantization="Q4_K_M", with_data=True))
        _add_facts(table, rows, models, options.engine)
        left = list(_left(rows, models))[: options.cells]
        for at, cell in enumerate(left):
            measured = _undisturbed(options.engine.resolve() / "llama-server", Path(models[cell["model"]]), cell)
            _append(table, measured)
            said = measured["error"] or ", ".join(f"{1000 / p['decode_ms']:.1f} tok/s" for p in measured["points"])
            said += f" ({measured['foreign']:.1%} foreign)"
            print(f"{at + 1} of {len(left)}: {cell['model']} {tuner_table.key_of(cell)}: {said}", file=sys.stderr)
    return 0


def _undisturbed(binary: Path, model: Path, cell: dict[str, Any]) -> dict[str, Any]:
    """The least disturbed of a few tries, the first that was left alone."""
    tries: list[dict[str, Any]] = []
    while len(tries) < TRIES and not any(seen["foreign"] <= FOREIGN for seen in tries):
        began, busy, own = time.monotonic(), _busy_s(), sum(os.times()[:4])
        measured = asyncio.run(_measure(binary, model, cell))
        others = _busy_s() - busy - (sum(os.times()[:4]) - own)
        share = max(0.0, others) / ((time.monotonic() - began) * (os.cpu_count() or 1))
        tries.append({**measured, "foreign": round(share, 4)})
    return min(tries, key=lambda seen: float(seen["foreign"]))


def _busy_s() -> float:
    """CPU seconds of everything on this machine, and those that its host took away, since it started."""
    words = Path("/proc/stat").read_text().splitlines()[0].split()[1:]
    user, nice, system, _idle, _wait, irq, soft, steal = (int(word) for word in words[:8])
    return (user + nice + system + irq + soft + steal) / os.sysconf("SC_CLK_TCK")


def _left(rows: list[dict[str, Any]], models: dict[str, str]) -> Iterator[dict[str, Any]]:
    done = {(row["model"], tuner_table.key_of(row), row["repeat"]) for row in rows if row["kind"] == "cell"}
    for model in models:
        cells = [dict(zip(GRID, values, strict=True)) for values in itertools.product(*GRID.values())]
        repeated = [(cells[0], repeat) for repeat in range(1, REPEATS)]
        for cell, repeat in (*((cell, 0) for cell in cells), *repeated):
            if (model, tuner_table.key_of(cell), repeat) not in done:
                yield {"kind": "cell", "model": model, **cell, "repeat": repeat}


async def _measure(binary: Path, model: Path, cell: dict[str, Any]) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="tuner-") as folder:
        began = time.monotonic()
        command = _command(binary, model, cell, Path(folder))
        supervisor = Supervisor()
        found: dict[str, Any] = {"points": [], "error": None, "load_s": 0.0}
        try:
            supervisor.start(command)
            crash = await supervisor.wait_ready()
            if crash is not None:
                return {**cell, **found, "error": str(crash)[:200], "seconds": round(time.monotonic() - began, 2)}
            found["load_s"] = round(time.monotonic() - began, 3)
            async with LLAMA.client(command) as client:
                probe = await Probe.of(client)
                await probe.warm()
                points = [await probe.run(depth, TOKENS) for depth in DEPTHS]
            found["points"] = [_rounded(dataclasses.asdict(point)) for point in points]
        except EngineError as error:
            found["error"] = error.message
        finally:
            await supervisor.stop()
        return {**cell, **found, "seconds": round(time.monotonic() - began, 2), "load_1": round(os.getloadavg()[0], 2)}


def _command(binary: Path, model: Path, cell: dict[str, Any], folder: Path) -> Command:
    """Command with which the product starts the plan of a cell."""
    install = Install(engine_dir=binary.parent, facts=query_facts(binary), cache_dir=folder)
    return LLAMA.command(tuner_table.plan_of(cell, str(model)), install, folder / "s.sock")


def _rounded(point: dict[str, Any]) -> dict[str, Any]:
    return {name: round(value, 4) if isinstance(value, float) else value for name, value in point.items()}


def _add_facts(table: Path, rows: list[dict[str, Any]], models: dict[str, str], engine: Path) -> None:
    if not any(row["kind"] == "machine" for row in rows):
        _append(table, _machine(engine))
    for name, path in models.items():
        if not any(row["kind"] == "model" and row["name"] == name for row in rows):
            _append(table, {"kind": "model", "name": name, **_model(Path(path))})


def _machine(engine: Path) -> dict[str, Any]:
    cpu = next(
        line.partition(":")[2].strip()
        for line in Path("/proc/cpuinfo").read_text().splitlines()
        if line.startswith("model name")
    )
    libraries = sorted(path.name for path in engine.glob("libllama.so.*"))
    return {
        "kind": "machine",
        "cpu": cpu,
        "cores": len(os.sched_getaffinity(0)),
        "memory_mib": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2**20,
        "kernel": platform.release(),
        "engine": libraries[-1] if libraries else None,
        "date": datetime.datetime.now(tz=datetime.UTC).date().isoformat(),
    }


def _model(path: Path) -> dict[str, Any]:
    """What a planner knows of it: bytes that a token reads, values of the cache a token."""
    reader = gguf.GGUFReader(path)
    architecture = str(reader.fields["general.architecture"].contents())

    def number(key: str, default: int) -> int:
        field = reader.fields.get(f"{architecture}.{key}")
        return int(field.contents()) if field else default

    used = number("expert_used_count", 1) / max(1, number("expert_count", 1))
    sizes = {tensor.name: int(tensor.n_bytes) for tensor in reader.tensors}
    is_tied = "output.weight" not in sizes
    read = sum(
        size * (used if "_exps" in name else 1.0)
        for name, size in sizes.items()
        if is_tied or name != "token_embd.weight"
    )
    heads = number("attention.head_count", 1)
    width = number("attention.key_length", number("embedding_length", 1) // heads)
    kv_values = 2 * number("block_count", 1) * number("attention.head_count_kv", heads) * width
    return {
        "bytes": path.stat().st_size,
        "read_mb": read / 1e6,
        "kv_values": kv_values,
        "cores": len(os.sched_getaffinity(0)),
    }


def _append(table: Path, row: dict[str, Any]) -> None:
    with table.open("a", encoding="utf-8") as file:
        file.write(json.dumps(row) + "\n")
