"""How long `appliance plan` takes as a process, imports included, and how much memory: for one card and for eight.

    python3 -m benchmarks.plan [--runs 5] [--json] [--imports]

Each machine is a file, as `plan --machine` takes it, and each model a published shape written as a GGUF file that is a
hole behind its header. `user` are the process's own CPU seconds, which other load on this machine does not lengthen
much; `elapsed` is what a user waits. `--imports` prints what of them are imports, and the ten slowest.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from appliance.image_facts import dump_facts
from appliance.probe import Hardware, as_document
from tests.builders import facts_for
from tests.golden.machines import MACHINES
from tests.shapes import PUBLISHED, write_gguf

ROOT = Path(__file__).parents[1]
ONE_CARD_S, EIGHT_CARDS_S = 0.3, 1.0  # aims
MODELS = (
    ("llama-3.1-8b", "Q4_K_M"),
    ("qwen3-30b-a3b-2507", "Q4_K_M"),
    ("gpt-oss-120b", "MXFP4"),
    ("deepseek-v3", "Q2_K"),
)
MIB = 2**20


@dataclass(frozen=True, kw_only=True)
class Run:
    elapsed_s: float
    user_s: float
    peak_mib: float


@dataclass(frozen=True, kw_only=True)
class Row:
    machine: str
    model: str
    exit_code: int
    runs: tuple[Run, ...]
    aim_s: float

    @property
    def median(self) -> Run:
        def middle(name: str) -> float:
            return statistics.median(getattr(run, name) for run in self.runs)

        return Run(elapsed_s=middle("elapsed_s"), user_s=middle("user_s"), peak_mib=max(r.peak_mib for r in self.runs))


def main() -> int:
    options = _options()
    with tempfile.TemporaryDirectory(prefix="bench-plan-") as name:
        folder = Path(name)
        if options.imports:
            print(_imports(_argv(folder, "laptop-5060", machines()["laptop-5060"], _file(folder, *MODELS[1]))))
            return 0
        rows = list(_rows(folder, options.runs))
    around = {
        "cpus": len(os.sched_getaffinity(0)),
        "load": round(os.getloadavg()[0], 1),
        "python": sys.version.split()[0],
    }
    if options.json:
        print(json.dumps({**around, "rows": [_document(row) for row in rows]}, indent=1))
    else:
        print(f"Python {around['python']}, {around['cpus']} CPUs, load {around['load']}; medians of {options.runs}")
        print("\n".join(_lines(rows)))
    return 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=5, help="of each row [5]")
    parser.add_argument("--json", action="store_true", help="for scripts")
    parser.add_argument("--imports", action="store_true", help="what the imports cost")
    options = parser.parse_args()
    if options.runs < 1:
        parser.error(f"--runs must be at least 1: {options.runs}")
    return options


def machines() -> dict[str, Hardware]:
    eight = MACHINES["4x2080ti-22g"]
    mixed = MACHINES["3090+4090+5060"]
    return {
        "laptop-5060": MACHINES["laptop-5060"],
        "4090-measured": MACHINES["4090-measured"],
        "8x2080ti-22g": _with_cards(eight, (0, 1, 2, 3, 0, 1, 2, 3)),
        "8 cards of 3 kinds": _with_cards(mixed, (0, 0, 0, 1, 1, 1, 2, 2)),
    }


def _with_cards(hardware: Hardware, of: Sequence[int]) -> Hardware:
    found = [hardware.gpus.gpus[kind] for kind in of]
    gpus = tuple(replace(gpu, index=at, uuid=f"GPU-{at}", nvlink_peers=()) for at, gpu in enumerate(found))
    memory = replace(hardware.memory, total_mib=256_000, available_mib=250_000)
    return replace(hardware, memory=memory, gpus=replace(hardware.gpus, gpus=gpus))


def _rows(folder: Path, runs: int) -> Iterator[Row]:
    files = {f"{name}@{quantization}": _file(folder, name, quantization) for name, quantization in MODELS}
    for name, hardware in machines().items():
        aim = ONE_CARD_S if len(hardware.gpus.gpus) == 1 else EIGHT_CARDS_S
        for model, path in files.items():
            argv = _argv(folder, name, hardware, path)
            timed = [_timed(argv) for _ in range(runs + 1)][1:]  # the first compiles and fills caches
            yield Row(machine=name, model=model, exit_code=timed[0][1], runs=tuple(run for run, _ in timed), aim_s=aim)


def _file(folder: Path, name: str, quantization: str) -> Path:
    return write_gguf(folder / f"{name}-{quantization}.gguf", PUBLISHED[name], quantization=quantization)


def _argv(folder: Path, name: str, hardware: Hardware, model: Path) -> list[str]:
    facts = folder / name
    facts.mkdir(exist_ok=True)
    image, engine = facts_for(hardware)
    sms = tuple(sorted({gpu.sm for gpu in hardware.gpus.gpus if gpu.sm}))
    (facts / "image_facts.json").write_text(dump_facts(replace(image, cuda="13.0", sm=sms)))
    (facts / "engine_facts.json").write_text(dump_facts(engine))
    (facts / "machine.json").write_text(json.dumps(as_document(hardware)))
    words = ("--facts-dir", str(facts), "--data-dir", str(folder / "data"), "--model", str(model))
    return ["-m", "appliance", "plan", *words, "--machine", str(facts / "machine.json")]


def _timed(argv: Sequence[str]) -> tuple[Run, int]:
    """Time and peak memory of one child. The child is waited for by itself, so that the peak is its own."""
    began = time.perf_counter()
    with subprocess.Popen(
        (sys.executable, *argv), cwd=ROOT, env=_environment(), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    ) as child:
        _, status, used = os.wait4(child.pid, 0)
        elapsed = time.perf_counter() - began
        child.returncode = os.waitstatus_to_exitcode(status)
    run = Run(elapsed_s=elapsed, user_s=used.ru_utime + used.ru_stime, peak_mib=used.ru_maxrss * 1024 / MIB)
    return run, child.returncode


def _environment() -> dict[str, str]:
    """An image has byte code, so the child may keep what it compiled."""
    return {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}


def _imports(argv: Sequence[str]) -> str:
    words = (sys.executable, "-X", "importtime", *argv)
    done = subprocess.run(words, cwd=ROOT, env=_environment(), capture_output=True, text=True)
    found = [
        (int(own), name.strip())
        for own, name in re.findall(r"^import time:\s+(\d+) \|\s+\d+ \|(.*)$", done.stderr, re.MULTILINE)
    ]
    slowest = "\n".join(f"{own / 1000:8.1f} ms  {name}" for own, name in sorted(found, reverse=True)[:10])
    return f"{sum(own for own, _ in found) / 1000:.0f} ms for {len(found)} modules\n{slowest}"


def _document(row: Row) -> dict[str, object]:
    middle = row.median
    figures = {
        "elapsed_s": round(middle.elapsed_s, 3),
        "user_s": round(middle.user_s, 3),
        "peak_mib": round(middle.peak_mib),
    }
    return {"machine": row.machine, "model": row.model, "exit_code": row.exit_code, **figures, "aim_s": row.aim_s}


def _lines(rows: Sequence[Row]) -> Iterator[str]:
    yield f"{'machine':20} {'model':26} {'elapsed':>8} {'CPU':>8} {'peak':>8} {'aim':>7}"
    for row in rows:
        middle = row.median
        ending = "" if row.exit_code == 0 else f"  exit {row.exit_code}"
        late = "  late" if middle.user_s > row.aim_s else ""
        yield (
            f"{row.machine:20} {row.model:26} {middle.elapsed_s:6.3f} s {middle.user_s:6.3f} s "
            f"{middle.peak_mib:4.0f} MiB {row.aim_s:5.1f} s{late}{ending}"
        )


if __name__ == "__main__":
    sys.exit(main())
