"""How near the tuner comes to the best there is, and at what price: against others, on machines that are simulated and
on a table that was recorded.

Ours is `appliance.tune.tuner.Tuner` in the mode `speed`, with its own settings, in simulated time: with the budget that
a start has unless told otherwise, and with 20 minutes, a quarter of either kept for speculative decoding as a start
keeps it. Regret is (T_pick - T_best) / T_best, of the noiseless time of a chat job as the product weighs it: a first
token later than its limit counts tenfold for what it is late. Seconds count loads. A run is asked for its pick after 3,
6 and 12 measurements, and in the end. `off` are the same machines with each predicted rate wrong by a factor of 2.

    python3 -m benchmarks.tuner [--seeds 20] [--json] [--plot FOLDER]   simulated, and the recorded table if it is there
    python3 -m benchmarks.tuner --recorded [--json]                     the recorded table alone
    python3 -m benchmarks.tuner --record [--cells N]                    fill the table from the real llama-server
"""

from __future__ import annotations

# First: the project's own Python takes over where this one lacks what follows.
import images.own_python  # noqa: F401 # isort: skip

import argparse
import asyncio
import json
import math
import random
import statistics
import sys
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from appliance.errors import EngineError
from appliance.settings import resolve_settings
from appliance.tune.figures.curve import LONGER, Curve, Point
from appliance.tune.figures.workload import CHAT, Workload, cost_s, only
from appliance.tune.search.candidates import EMPTY
from appliance.tune.search.cost_terms import Candidate
from appliance.tune.trials.run_trial import DECODE_TOKENS
from benchmarks import tuner_record, tuner_table
from benchmarks.tuner_machines import CASES, Machine
from benchmarks.tuner_ours import Engine, Planned, World, tune
from benchmarks.tuner_rivals import RIVALS, Seen
from benchmarks.tuner_time import SimulatedTime

AT = (3, 6, 12)
COLUMNS = (*map(str, AT), "end")
OFF = ", off by 2"
FIRST_SEED = 100  # the few constants of the search were chosen on seeds below it
RECORDED_SEEDS = 20
TABLE = Path(__file__).with_name("tuner_table.jsonl")
WALKED = ((20,), 200)  # a prompt of about 20 tokens, 200 decoded after it
BUDGETS = {"ours": resolve_settings({}, {}).budget_s, "ours, 20 minutes": 1200.0}


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """One run of one tuner: regret and seconds after so many measurements."""

    name: str
    where: str
    regret: Mapping[str, float]
    seconds: Mapping[str, float]


class Course:
    """One run: every measurement is made through it, and it remembers what would have been picked after each."""

    def __init__(self, world: World, planned: Planned, workload: Workload, seed: int) -> None:
        self._world = world
        self._planned = planned
        self._workload = workload
        self._seed = seed
        self._draw = random.Random(seed)
        self._best_s = min(world.cost_s(candidate, workload) for candidate in planned.found)
        self._time = asyncio.Runner(loop_factory=SimulatedTime)
        self._regrets: list[float] = []
        self._seconds: list[float] = []

    def ours(self, name: str, where: str, budget_s: float) -> Outcome:
        with self._time:
            self._time.run(tune(self._planned, self._world, self._start, only(self._workload), budget_s, self._pick))
            return self._outcome(name, where)

    def rival(self, name: str, where: str) -> Outcome:
        """Each measurement is a long one, and the last few are not measured again: no such tool does that."""
        best: tuple[float, Candidate | None] = (math.inf, None)
        depths, tokens = WALKED if name == "walk-down" else ((EMPTY, self._workload.depth), DECODE_TOKENS * LONGER)

        def measure(candidate: Candidate) -> Seen:
            nonlocal best
            points = self._time.run(self._points(candidate, depths, tokens))
            seen = Seen(job_s=math.inf, empty_ms=math.inf)
            if points:
                seen = Seen(job_s=cost_s(Curve(points=points), only(self._workload)), empty_ms=points[0].decode_ms)
            value = seen.empty_ms if name == "walk-down" else seen.job_s
            best = min(best, (value, candidate), key=lambda pair: pair[0]) if math.isfinite(value) else best
            self._pick(best[1])
            return seen

        with self._time:
            RIVALS[name](self._planned.found, measure, max(AT), random.Random(self._seed))
            return self._outcome(name, where)

    def _start(self, candidate: Candidate) -> Engine:
        return Engine(self._world, candidate, self._draw)

    async def _points(self, candidate: Candidate, depths: Sequence[int], tokens: int) -> tuple[Point, ...]:
        engine = self._start(candidate)
        try:
            await engine.load()
        except EngineError:
            return ()
        return tuple([await engine.run(depth, tokens) for depth in depths])

    def _pick(self, candidate: Candidate | None) -> None:
        """After a measurement. Nothing that works yet is as bad as ten times the best."""
        picked = self._world.cost_s(candidate, self._workload) if candidate else math.inf
        self._regrets.append(min(10.0, picked / self._best_s - 1))
        self._seconds.append(self._time.get_loop().time())

    def _outcome(self, name: str, where: str) -> Outcome:
        last = len(self._regrets) - 1
        at = dict(zip(COLUMNS, (*(min(n - 1, last) for n in AT), last), strict=True))
        return Outcome(
            name=name,
            where=where,
            regret={n: self._regrets[i] for n, i in at.items()},
            seconds={n: self._seconds[i] for n, i in at.items()},
        )


def courses(
    world: World, planned: Planned, workload: Workload, seed: int, where: str, names: Iterable[str]
) -> list[Outcome]:
    outcomes = []
    for name in names:
        course = Course(world, planned, workload, seed)
        outcomes.append(course.ours(name, where, BUDGETS[name]) if name in BUDGETS else course.rival(name, where))
    return outcomes


def simulated(task: tuple[int, bool]) -> list[Outcome]:
    """One seed on every machine."""
    seed, is_off = task
    outcomes = []
    for case in CASES:
        planned = case.planned(off=random.Random(seed) if is_off else None)
        where = case.name + OFF if is_off else case.name
        names = BUDGETS if is_off else (*BUDGETS, *RIVALS)  # the others predict nothing that could be off
        outcomes += courses(Machine(case, seed), planned, CHAT, seed, where, names)
    return outcomes


def summary(outcomes: Iterable[Outcome]) -> dict[str, dict[str, dict[str, float]]]:
    """Median and worst regret as fractions, and mean seconds, by tuner and number of measurements."""
    outcomes = list(outcomes)
    found: dict[str, dict[str, dict[str, float]]] = {}
    for name in dict.fromkeys(outcome.name for outcome in outcomes):
        own = [outcome for outcome in outcomes if outcome.name == name]
        found[name] = {n: _cell([o.regret[n] for o in own], [o.seconds[n] for o in own]) for n in COLUMNS}
    return found


def _cell(regrets: Sequence[float], seconds: Sequence[float]) -> dict[str, float]:
    return {
        "median": round(statistics.median(regrets), 4),
        "p90": round(sorted(regrets)[math.ceil(0.9 * len(regrets)) - 1], 4),
        "worst": round(max(regrets), 4),
        "seconds": round(statistics.fmean(seconds), 1),
        "runs": len(regrets),
    }


def recorded(table: Path, seed: int) -> list[Outcome]:
    """One seed's noise over every model of the recorded table."""
    names = (*BUDGETS, *RIVALS)
    return [
        outcome
        for model in tuner_table.load(table)
        for outcome in courses(model, model.planned, model.workload, seed, model.name, names)
    ]


def main() -> int:
    options = _parse()
    if options.record:
        return tuner_record.record(options.table, options)
    seeds = range(options.first, options.first + options.seeds)
    groups = {} if options.recorded else _simulated(seeds, options.workers)
    if options.table.exists():
        groups["recorded"] = [o for seed in range(RECORDED_SEEDS) for o in recorded(options.table, seed)]
    elif options.recorded:
        sys.exit(f"error: no recorded table at {options.table}\n\nhint: benchmarks/tuner.py --record")
    if options.plot:
        from benchmarks import tuner_plot  # here: tests import this file, and matplotlib takes as long as all the rest

        tuner_plot.plot(groups, COLUMNS, options.plot)
    if options.json:
        print(json.dumps(_as_json(groups), indent=1))
    else:
        _print(groups)
    return 0


def _as_json(groups: Mapping[str, Sequence[Outcome]]) -> dict[str, Any]:
    """The first group by tuner, and every group under "groups" where there are more."""
    first = summary(next(iter(groups.values())))
    return {**first, "groups": {name: summary(found) for name, found in groups.items()}} if len(groups) > 1 else first


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=20, help="simulated machines of each kind [20]")
    parser.add_argument("--first", type=int, default=FIRST_SEED, help=f"the first of the seeds [{FIRST_SEED}]")
    parser.add_argument("--workers", type=int, default=2, help="processes [2]")
    parser.add_argument("--recorded", action="store_true", help="the recorded table alone")
    parser.add_argument("--json", action="store_true", help="for scripts")
    parser.add_argument("--plot", type=Path, metavar="FOLDER", help="write tuner.png and tuner.svg there")
    parser.add_argument("--table", type=Path, default=TABLE, metavar="FILE", help=f"the recorded table [{TABLE.name}]")
    tuner_record.add_options(parser)
    options = parser.parse_args()
    if options.seeds < 1 or options.workers < 1:
        parser.error("--seeds and --workers must be at least 1")
    return options


def _simulated(seeds: Iterable[int], workers: int) -> dict[str, list[Outcome]]:
    tasks = [(seed, is_off) for seed in seeds for is_off in (False, True)]
    with ProcessPoolExecutor(workers) as pool:
        outcomes = [outcome for found in pool.map(simulated, tasks) for outcome in found]
    return {
        "simulated": [o for o in outcomes if not o.where.endswith(OFF)],
        "simulated, predictor off by 2": [o for o in outcomes if o.where.endswith(OFF)],
    }


def _print(groups: Mapping[str, Sequence[Outcome]]) -> None:
    console = Console(width=120)
    for group, outcomes in groups.items():
        console.print(_table(group, outcomes))
        for where in dict.fromkeys(outcome.where for outcome in outcomes):
            found = summary(o for o in outcomes if o.where == where and o.name in BUDGETS)
            for name, cells in found.items():
                console.print(f"  {name} on {where}: " + "; ".join(f"{n}: {_in_words(c)}" for n, c in cells.items()))


def _table(group: str, outcomes: Sequence[Outcome]) -> Table:
    table = Table(title=f"{group}: regret, median / 90 % / worst, and mean seconds, after so many measurements")
    table.add_column("tuner")
    for name in COLUMNS:
        table.add_column(name, justify="right")
    for name, cells in summary(outcomes).items():
        table.add_row(name, *(_in_words(cell) for cell in cells.values()))
    return table


def _in_words(cell: Mapping[str, float]) -> str:
    return f"{cell['median']:.1%} / {cell['p90']:.1%} / {cell['worst']:.1%}, {cell['seconds']:,.0f} s"


if __name__ == "__main__":
    sys.exit(main())
