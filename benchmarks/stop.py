"""How long a stop takes: from SIGTERM to the end of `appliance serve`, with nothing left of its engine.

The appliance runs as a process with the settings that ship, on volumes made here: idle; while it fetches a model from
a hub on this machine; and in mid-stream, with a client that stays to the end. A running stream gets the drain time to
finish, and this one never does: a stop takes that long there, and what it takes beside that is what counts.

The engine is the real one where there is one in --engine-dir with a model beside it, else the tests' fake, which keeps
a stream open after SIGTERM as llama-server does.

    python3 -m benchmarks.stop [--runs 5] [--engine-dir .make/engine] [--json]
"""

from __future__ import annotations

# Started with another Python, it goes on in the project's own.
import images.own_python  # noqa: F401 # isort: skip

import argparse
import json
import os
import shutil
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from appliance.engines.llama.process.facts import query_facts
from appliance.image_facts import dump_facts
from appliance.settings import resolve_settings
from tests.process.stages.boot import Home, Serving, eventually
from tests.process.stages.recipe import cached, empty_home, fill_hub

ROOT = Path(__file__).parents[1]
AIM_S = 2.0  # beside the drain time
HUB_PACE = "--bytes-per-s=200000"  # the file takes a quarter of a minute
ENDLESS = {"max_tokens": 100_000, "ignore_eos": True}


@dataclass(frozen=True, kw_only=True)
class Case:
    """`home` is a volume and an engine; `stop` ends what serves it and tells the seconds."""

    name: str
    home: Callable[[Path], Iterator[Home]]
    stop: Callable[[Serving], float]
    drain_s: float = 0.0  # of these the stop takes all

    def measure(self, folder: Path, runs: int) -> list[float]:
        found = []
        for number in range(runs):
            own = folder / f"{self.name}-{number}"
            with contextmanager(self.home)(own) as home, home.serving() as serving:
                found.append(self.stop(serving))
            print(f"{self.name}: {number + 1} of {runs}: {found[-1]:.2f} s", file=sys.stderr)
        return found


@dataclass(frozen=True, kw_only=True)
class Row:
    case: str
    runs: int
    median_s: float
    worst_s: float
    drain_s: float
    beside_drain_s: float  # of the worst


def main() -> int:
    options = _parse()
    binary = options.engine_dir / "llama-server"
    models = sorted((options.engine_dir.parent / "models").glob("*.gguf"))
    real = (binary, models[0]) if binary.exists() and models else None
    drain_s = resolve_settings({}, {}).drain_s
    cases = [
        Case(name="idle", home=lambda folder: _served(folder, real), stop=_idle),
        Case(name="fetching", home=_fetching, stop=_in_mid_fetch),
        Case(name="in mid-stream", home=lambda folder: _served(folder, real), stop=_in_mid_stream, drain_s=drain_s),
    ]
    with tempfile.TemporaryDirectory() as folder:
        rows = [_row(case, case.measure(Path(folder), options.runs)) for case in cases]
    result: dict[str, object] = {
        "cpus": len(os.sched_getaffinity(0)),
        "engine": "real" if real else "fake",
        "aim_s": AIM_S,
        "rows": [asdict(row) for row in rows],
    }
    print(json.dumps(result, indent=1) if options.json else _in_words(result, rows))
    return 0 if all(row.beside_drain_s <= AIM_S for row in rows) else 1


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=5, help="stops of each kind [5]")
    parser.add_argument("--engine-dir", type=Path, default=ROOT / ".make/engine", help="of llama-server")
    parser.add_argument("--json", action="store_true", help="for scripts")
    options = parser.parse_args()
    if options.runs < 1:
        parser.error(f"--runs must be at least 1: {options.runs}")
    return options


def _served(folder: Path, real: tuple[Path, Path] | None) -> Iterator[Home]:
    home = Home.make(folder / "home")
    home.set_engine("--chunks", "100000", "--chunk-interval", "0.02", "--hold-streams")
    if real:
        binary, model = real
        shutil.rmtree(home.folder / "engine")
        (home.folder / "engine").symlink_to(binary.parent.resolve())
        (home.folder / "facts/engine_facts.json").write_text(dump_facts(query_facts(binary)))
        (home.data / "models/small.gguf").unlink()
        (home.data / "models" / model.name).symlink_to(model.resolve())
    yield home


def _fetching(folder: Path) -> Iterator[Home]:
    with empty_home(folder, fill_hub(folder / "hub"), HUB_PACE) as (home, _):
        yield home


def _idle(serving: Serving) -> float:
    serving.wait_ready()
    return serving.terminate()


def _in_mid_fetch(serving: Serving) -> float:
    eventually(lambda: any(part.stat().st_size for part in cached(serving.home, ".incomplete")))
    return serving.terminate()


def _in_mid_stream(serving: Serving) -> float:
    serving.wait_ready()
    with serving.stream(**ENDLESS) as connection:
        received = connection.recv(65536)
        began = time.monotonic()
        serving.process.send_signal(signal.SIGTERM)
        while data := connection.recv(65536):
            received += data
    code = serving.wait_exit()
    seconds = time.monotonic() - began
    if code or b'data: {"error"' not in received or serving.engine_pids():
        sys.exit(f"error: a stop in mid-stream left something: exit code {code}\n\n{serving.text}")
    return seconds


def _row(case: Case, seconds: Sequence[float]) -> Row:
    return Row(
        case=case.name,
        runs=len(seconds),
        median_s=round(statistics.median(seconds), 2),
        worst_s=round(max(seconds), 2),
        drain_s=case.drain_s,
        beside_drain_s=round(max(seconds) - case.drain_s, 2),
    )


def _in_words(result: dict[str, object], rows: Sequence[Row]) -> str:
    lines = [f"{result['cpus']} CPUs, {result['engine']} engine; seconds from SIGTERM to the end of the process"]
    lines.append(f"{'':<14} {'runs':>5} {'median':>7} {'worst':>7} {'drain':>6} {'worst beside it':>16}")
    lines += [
        f"{row.case:<14} {row.runs:>5} {row.median_s:>7.2f} {row.worst_s:>7.2f} {row.drain_s:>6.2f}"
        f" {row.beside_drain_s:>16.2f}"
        for row in rows
    ]
    return "\n".join([*lines, f"aim: {AIM_S:g} s beside the drain time"])


if __name__ == "__main__":
    sys.exit(main())
