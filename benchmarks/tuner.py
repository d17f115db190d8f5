"""How near the tuner comes to the best there is, and at what price: against others, on machines that are simulated and
on a table that was recorded.

Regret is (T_pick - T_best) / T_best, of the noiseless time of a chat job; seconds count loads. A run is asked for its
pick after 3, 6 and 12 measurements. `off` are the same machines with each rate of the predictor wrong by a factor of 2.

    python3 -m benchmarks.tuner [--seeds 20] [--json] [--plot FOLDER]   simulated, and the recorded table if it is there
    python3 -m benchmarks.tuner --recorded [--json]                     the recorded table alone
    python3 -m benchmarks.tuner --record [--cells N]                    fill the table from the real llama-server
"""

from __future__ import annotations

# First: the project's own Python takes over where this one lacks what follows.
import images.own_python  # noqa: F401 # isort: skip

import argparse
import json
import math
import random
import statistics
import sys
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from rich.console import Console
from rich.table import Table

from appliance.tune.curve import LONGER, Curve, Point
from appliance.tune.guided import Ask, Effort, OutOfMemory, Search, Trial
from appliance.tune.terms import Candidate
from appliance.tune.workload import CHAT, Workload, job_s, only, without_limits
from benchmarks import tuner_plot, tuner_record, tuner_table
from benchmarks.tuner_machines import SPECS, Machine, Missing, candidates
from benchmarks.tuner_rivals import RIVALS, Seen

AT = (3, 6, 12)
TOKENS_EACH = 24
OFF = ", off by 2"
FIRST_SEED = 100  # the few constants of the search were chosen on seeds below it
RECORDED_SEEDS = 20
TABLE = Path(__file__).with_name("tuner_table.jsonl")
WALKED: dict[str, Any] = {"depths": (20,), "tokens": 200}  # a prompt of about 20 tokens, 200 decoded after it
FAILS_AFTER = 0.5  # of a load: when a start that does not fit ends


class World(Protocol):
    """A machine, simulated or recorded."""

    noise: float
    depths: tuple[int, ...]

    def fails(self, candidate: Candidate) -> Missing | None: ...
    def job_s(self, candidate: Candidate, workload: Workload) -> float: ...
    def load_s(self) -> float: ...
    def points(
        self, candidate: Candidate, depths: tuple[int, ...], tokens: int, noise: float, draw: random.Random
    ) -> tuple[tuple[Point, ...], float]: ...


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """One run of one tuner: regret and seconds after so many measurements."""

    name: str
    where: str
    regret: Mapping[int, float]
    seconds: Mapping[int, float]


class Course:
    """One run: every measurement is made through it, and it remembers what would have been picked after each."""

    def __init__(self, world: World, found: Sequence[Candidate], workload: Workload, seed: int) -> None:
        self._world = world
        self._workload = workload
        self._draw = random.Random(seed)
        self._best_s = min(world.job_s(candidate, workload) for candidate in found)
        self.regrets: list[float] = []
        self.seconds: list[float] = []

    def points(
        self, candidate: Candidate, *, is_long: bool, depths: tuple[int, ...] = (), tokens: int = 0
    ) -> tuple[tuple[Point, ...], Missing | None, float]:
        """What is seen, or what is missing, and the seconds of the load."""
        load = self._world.load_s()
        if (missing := self._world.fails(candidate)) is not None:
            self._spend(load * FAILS_AFTER)
            return (), missing, load
        tokens = tokens or TOKENS_EACH * (LONGER if is_long else 1)
        noise = self._world.noise / math.sqrt(LONGER) if is_long else self._world.noise
        points, seconds = self._world.points(candidate, depths or self._world.depths, tokens, noise, self._draw)
        self._spend(load + seconds)
        return points, None, load

    def _spend(self, seconds: float) -> None:
        self.seconds.append(seconds + (self.seconds[-1] if self.seconds else 0.0))

    def pick(self, candidate: Candidate | None) -> None:
        """After a measurement. Nothing that works yet is as bad as ten times the best."""
        picked = self._world.job_s(candidate, self._workload) if candidate else math.inf
        self.regrets.append(min(10.0, picked / self._best_s - 1))

    def outcome(self, name: str, where: str) -> Outcome:
        last = len(self.regrets) - 1
        return Outcome(
            name=name,
            where=where,
            regret={n: self.regrets[min(n - 1, last)] for n in AT},
            seconds={n: self.seconds[min(n - 1, last)] for n in AT},
        )


def run_ours(course: Course, found: Sequence[Candidate], workload: Workload, effort: Effort) -> None:
    search = Search(found, without_limits(only(workload)), effort)
    trials: list[Trial] = []
    while len(trials) < max(AT) and isinstance(ask := search.ask(trials, left_s=math.inf), Ask):
        points, missing, load = course.points(ask.candidate, is_long=ask.is_long)
        lacking = OutOfMemory(device=missing.device, missing_mib=missing.mib) if missing else None
        trials.append(Trial(key=ask.candidate.key, points=points, is_long=ask.is_long, load_s=load, lacking=lacking))
        ranked = search.rank(trials)
        course.pick(ranked[0].candidate if ranked and ranked[0].is_measured else None)


def run_rival(name: str, course: Course, found: Sequence[Candidate], workload: Workload, seed: int) -> None:
    best: tuple[float, Candidate | None] = (math.inf, None)

    def measure(candidate: Candidate) -> Seen:
        nonlocal best
        how = WALKED if name == "walk-down" else {}
        points, _, _ = course.points(candidate, is_long=True, **how)
        seen = Seen(job_s=math.inf, empty_ms=math.inf)
        if points:
            seen = Seen(job_s=job_s(Curve(points=points), workload), empty_ms=points[0].decode_ms)
        value = seen.empty_ms if name == "walk-down" else seen.job_s
        best = min(best, (value, candidate), key=lambda pair: pair[0]) if math.isfinite(value) else best
        course.pick(best[1])
        return seen

    RIVALS[name](found, measure, max(AT), random.Random(seed))


def simulated(task: tuple[int, bool]) -> list[Outcome]:
    """One seed on every machine."""
    seed, is_off = task
    outcomes = []
    for spec in SPECS:
        machine = Machine(spec, seed)
        found = candidates(spec, off=random.Random(seed) if is_off else None)
        where = spec.name + OFF if is_off else spec.name
        effort = Effort(depths=machine.depths, tokens_each=TOKENS_EACH, load_s=spec.load_s)
        course = Course(machine, found, CHAT, seed)
        run_ours(course, found, CHAT, effort)
        outcomes.append(course.outcome("ours", where))
        for name in RIVALS if not is_off else ():  # the others predict nothing that could be off
            course = Course(machine, found, CHAT, seed)
            run_rival(name, course, found, CHAT, seed)
            outcomes.append(course.outcome(name, where))
    return outcomes


def summary(outcomes: Iterable[Outcome]) -> dict[str, dict[str, dict[str, float]]]:
    """By tuner and number of measurements: median and worst regret as fractions, mean seconds."""
    outcomes = list(outcomes)
    found: dict[str, dict[str, dict[str, float]]] = {}
    for name in dict.fromkeys(outcome.name for outcome in outcomes):
        own = [outcome for outcome in outcomes if outcome.name == name]
        found[name] = {str(n): _cell([o.regret[n] for o in own], [o.seconds[n] for o in own]) for n in AT}
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
    outcomes = []
    for model in tuner_table.load(table):
        effort = Effort(depths=model.depths, tokens_each=TOKENS_EACH, load_s=model.load_s(), noise=model.noise)
        found = model.candidates
        workload = model.workload
        course = Course(model, found, workload, seed)
        run_ours(course, found, workload, effort)
        outcomes.append(course.outcome("ours", model.name))
        for name in RIVALS:
            course = Course(model, found, workload, seed)
            run_rival(name, course, found, workload, seed)
            outcomes.append(course.outcome(name, model.name))
    return outcomes


def main() -> int:
    options = _parse()
    if options.record:
        return tuner_record.record(options.table, options)
    groups = {} if options.recorded else _simulated(range(FIRST_SEED, FIRST_SEED + options.seeds), options.workers)
    if options.table.exists():
        groups["recorded"] = [o for seed in range(RECORDED_SEEDS) for o in recorded(options.table, seed)]
    elif options.recorded:
        sys.exit(f"error: no recorded table at {options.table}\n\nhint: benchmarks/tuner.py --record")
    if options.plot:
        tuner_plot.plot(groups, AT, options.plot)
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
            ours = [outcome for outcome in outcomes if outcome.where == where and outcome.name == "ours"]
            cells = summary(ours)["ours"]
            console.print(f"  ours on {where}: " + "; ".join(f"{n}: {_in_words(cell)}" for n, cell in cells.items()))


def _table(group: str, outcomes: Sequence[Outcome]) -> Table:
    table = Table(title=f"{group}: regret, median / 90 % / worst, and mean seconds, after so many measurements")
    table.add_column("tuner")
    for n in AT:
        table.add_column(str(n), justify="right")
    for name, cells in summary(outcomes).items():
        table.add_row(name, *(_in_words(cell) for cell in cells.values()))
    return table


def _in_words(cell: Mapping[str, float]) -> str:
    return f"{cell['median']:.1%} / {cell['p90']:.1%} / {cell['worst']:.1%}, {cell['seconds']:,.0f} s"


if __name__ == "__main__":
    sys.exit(main())
