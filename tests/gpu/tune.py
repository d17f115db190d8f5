"""The tuner on a real machine against a coarse sweep through the same probe: regret and seconds.

    python -m tests.gpu.tune --shape moe --engine DIR --facts DIR --work DIR --out DIR [--cells 20] [--until-s 560]

All that was seen is kept below `work` and copied to `out`, so a run that was cut short goes on where it ended.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import json
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

from appliance.errors import FatalError
from appliance.plan import Plan
from appliance.probe import as_document
from appliance.probe.load.watch import Watch
from appliance.profile import Profile, ProfileStore
from appliance.selection.select import read_inputs
from appliance.settings import Settings, load_settings, process_environment
from appliance.start.inputs import StartInputs
from appliance.supervisor import become_subreaper
from appliance.tune.figures.curve import Curve
from appliance.tune.figures.workload import cost_s, parse_mix, scaled_mix
from appliance.tune.trials import engine
from appliance.tune.trials.run_trial import Sampling, Step, measure
from tests.gpu.ballast import held
from tests.gpu.grid import CASES, PICK, Case, Row, cells, judge, name_of, table
from tests.shapes import write_gguf

SPARE_S = 15.0  # to stop, and to write what was seen
FIRST_CELL_S = 45.0  # what a start may take, before one was seen
GRACE_S = 30.0
DEPTHS = (32, 640, 2048)


class Bench:
    """One case on this machine. `rows` are what was seen of it, here, on this engine, with this much memory."""

    def __init__(self, options: argparse.Namespace) -> None:
        self._began = time.monotonic()
        self._options = options
        self._case: Case = CASES[options.shape]
        self._environment = process_environment()
        data_dir = options.work.resolve() / "data"
        asked = dict(word.split("=", 1) for word in options.set)
        swept = {name: values for name, values in self._case.grid.items() if name not in asked}
        self._cells = cells(swept, options.cells)
        self._model = data_dir / "models" / f"{self._case.shape.name}.gguf"  # cases share it
        self._base = {
            "model": str(self._model),
            "data_dir": str(data_dir),
            "engine_dir": str(options.engine.resolve()),
            "facts_dir": str(options.facts.resolve()),
            "ctx_size": str(options.ctx_size or self._case.ctx_size),
            "mode": "speed",
            "log": "text",
            **asked,
        }
        self._kept = options.work / f"rows-{options.shape}.jsonl"
        self.rows: list[Row] = []
        self._where = ""

    @property
    def left_s(self) -> float:
        return float(self._options.until_s) - SPARE_S - (time.monotonic() - self._began)

    def run(self) -> int:
        self._write_model()
        leave_mib = self._case.leave_mib if self._options.leave_mib is None else self._options.leave_mib or None
        with held(self._options.engine, leave_mib) as taken:
            print(f"GPU memory taken by a second process: {taken or 'none'}", flush=True)
            settings = self._settings({})
            found = read_inputs(settings, self._environment)
            self._where = self._place(found, leave_mib)
            self._load_rows()
            profile = self._tuned(settings, found)
            if profile is not None:
                asyncio.run(self._sweep(found, profile))
            return self._report(found, profile, taken)

    def _settings(self, cell: Mapping[str, str]) -> Settings:
        return load_settings({**self._base, **cell}, self._environment)

    def _place(self, found: StartInputs, leave_mib: int | None) -> str:
        gpu = (
            ", ".join(each.name or "GPU" for each in found.inputs.hardware.gpus.gpus)
            or found.inputs.hardware.cpu.model_name
        )
        own = name_of({name: self._base[name] for name in sorted(self._base) if not name.endswith(("dir", "model"))})
        return f"{gpu}; {found.inputs.image.build_id}; {leave_mib or 'all'} MiB; {own}"

    def _write_model(self) -> None:
        if self._model.exists():
            return
        began = time.monotonic()
        self._model.parent.mkdir(parents=True, exist_ok=True)
        unfinished = self._model.with_suffix(".unfinished")
        write_gguf(unfinished, self._case.shape, quantization="Q4_K_M", with_data=True).rename(self._model)
        size = self._model.stat().st_size / 1e9
        print(f"wrote {self._model.name}: {size:.1f} GB in {time.monotonic() - began:.1f} s", flush=True)

    def _tuned(self, settings: Settings, found: StartInputs) -> Profile | None:
        """Return the profile of `appliance tune`, run in the way that a user runs it; None if it needs another call to
        end."""
        store = ProfileStore(settings.profiles_dir, lambda words: print(words, file=sys.stderr))
        if profile := store.peek(found.key):
            return profile
        if self.left_s < self._options.budget_s + GRACE_S:  # with less time it would choose worse than it can
            print(f"no time to tune in: {self.left_s:.0f} s are left; give a later --until-s or a smaller --budget-s")
            return None
        flags = [word for name, value in self._base.items() for word in (f"--{name.replace('_', '-')}", value)]
        argv = [sys.executable, "-m", "appliance", "tune", *flags, "--budget-s", f"{self._options.budget_s:.0f}"]
        with subprocess.Popen(argv) as child:
            try:
                code = child.wait(max(1.0, self.left_s))
            except subprocess.TimeoutExpired:
                child.send_signal(signal.SIGTERM)  # it keeps what it measured, and goes on with that
                child.wait()
                return None
        if code:
            sys.exit(f"error: appliance tune ended with {code}")
        return store.peek(found.key)

    async def _sweep(self, found: StartInputs, profile: Profile) -> None:
        """The choice first and last: how far it moved meanwhile is the noise that regret is read against."""
        if not self._looks_at_pick and self._has_time:
            await self._look(found, PICK, profile.plan)
        for cell in self._cells:
            if name_of(cell) in {row.cell for row in self.rows}:
                continue
            if not self._has_time:
                return
            try:
                plan = found.engine.space(replace(found.inputs, settings=self._settings(cell))).best
            except FatalError as error:  # what the planner refuses cannot be measured through it: the table says so
                self._add(Row(where=self._where, cell=name_of(cell), error=f"refused: {error.message}"))
                continue
            await self._look(found, name_of(cell), plan)
        if self._looks_at_pick < 2 and self._has_time:
            await self._look(found, PICK, profile.plan)

    @property
    def _looks_at_pick(self) -> int:
        return sum(row.cell == PICK for row in self.rows)

    @property
    def _has_time(self) -> bool:
        slowest = max((row.seconds for row in self.rows if row.job_s is not None), default=FIRST_CELL_S)
        return self.left_s > 1.2 * slowest

    async def _look(self, found: StartInputs, cell: str, plan: Plan) -> None:
        settings = self._settings({})
        look = Sampling(depths=tuple(depth for depth in DEPTHS if depth <= plan.context // 2), is_long=True)
        began = time.monotonic()

        socket_path = self._settings({}).runtime_dir / "appliance-sweep.sock"
        bench = engine.Bench(engine=found.engine, install=found.install, socket_path=socket_path)

        row = Row(where=self._where, cell=cell, plan=plan.key)
        try:
            async with asyncio.timeout(max(1.0, self.left_s)):  # the engine is gone when it ends, and nothing is kept
                seen = await measure(plan, look, bench=bench, on_step=_silent, watch=self._watch(found))
        except TimeoutError:
            print(f"{cell}: no time was left for it", flush=True)
            return
        except FatalError as error:
            row = replace(row, error=f"exit code {error.exit_code}: {error.message}")
        else:
            mix = scaled_mix(parse_mix(settings.workload), plan.context)
            row = replace(
                row,
                job_s=cost_s(Curve(points=seen.points), mix),
                decode_ms={str(point.depth): point.decode_ms for point in seen.points},
                disturbance=seen.disturbance,
            )
        self._add(replace(row, seconds=time.monotonic() - began))

    def _watch(self, found: StartInputs) -> Callable[[], Watch]:
        return lambda: Watch(found.inputs.hardware, self._environment)

    def _load_rows(self) -> None:
        lines = self._kept.read_text(encoding="utf-8").splitlines() if self._kept.exists() else []
        self.rows = [row for line in lines if (row := Row(**json.loads(line))).where == self._where]

    def _add(self, row: Row) -> None:
        self.rows.append(row)
        with self._kept.open("a", encoding="utf-8") as file:
            file.write(json.dumps(dataclasses.asdict(row)) + "\n")
        said = f"job {row.job_s:.3f} s" if row.job_s is not None else row.error
        print(f"{len(self.rows)}: {row.cell}: {said} ({row.seconds:.0f} s)", flush=True)

    def _report(self, found: StartInputs, profile: Profile | None, taken: Mapping[str, int]) -> int:
        """Write the report and return the exit code: 0 if every cell was seen, 75 (try again) if another call must go
        on."""
        kv_check = judge(self.rows)
        wanted = {PICK, *map(name_of, self._cells)}
        is_whole = profile is not None and wanted <= {row.cell for row in self.rows}
        tuned = profile and {
            "plan": profile.plan.key,
            "seconds": profile.seconds,
            "measurements": len(profile.measurements),
            "stopped_by": profile.stopped_by,
            "speed": profile.speed,
            "disturbance": profile.disturbance,
        }
        document = {
            "shape": self._options.shape,
            "where": self._where,
            "taken": taken,
            "is_whole": is_whole,
            "tuned": tuned,
            "verdict": kv_check and dataclasses.asdict(kv_check),
            "rows": [dataclasses.asdict(row) for row in self.rows],
            "hardware": as_document(found.inputs.hardware),
        }
        out = self._options.out
        out.mkdir(parents=True, exist_ok=True)
        (out / f"tune-{self._options.shape}.json").write_text(json.dumps(document, indent=1, default=str) + "\n")
        if self._kept.exists():
            shutil.copy(self._kept, out)
        print(f"\n{self._where}\n{table(self.rows)}")
        if tuned:
            print(f"tuner: {tuned['plan']} in {tuned['seconds']:.0f} s, {tuned['measurements']} measurements")
        if kv_check:
            spread = "unknown" if kv_check.spread is None else f"{kv_check.spread:.1%}"
            print(f"regret {kv_check.regret:+.1%} against {kv_check.best} ({kv_check.measured} cells); spread {spread}")
        if not is_whole:
            print("not whole: the same command again goes on", file=sys.stderr)
        return 0 if is_whole else 75


def _silent(_: Step) -> None:
    """Each row is told when it is there."""


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=sorted(CASES), required=True)
    for name in ("engine", "facts", "work", "out"):
        parser.add_argument(f"--{name}", type=Path, required=True, metavar="DIR")
    parser.add_argument("--cells", type=int, default=20, help="of the sweep, at most [20]")
    parser.add_argument("--leave-mib", type=int, help="GPU memory that a second process leaves free, 0 for all of it")
    parser.add_argument("--ctx-size", type=int)
    parser.add_argument("--set", action="append", default=[], metavar="NAME=VALUE", help="setting, as n_cpu_moe=24")
    parser.add_argument("--budget-s", type=float, default=180.0, help="of the tuner [180]")
    parser.add_argument("--until-s", type=float, default=560.0, help="this call ends by then [560]")
    become_subreaper()
    return Bench(parser.parse_args(argv)).run()


if __name__ == "__main__":
    sys.exit(main())
