"""Several models on one machine: seconds of reloads by our rule, by others' rules, and the least that is possible.

Everything here is modelled: made-up fleets and requests, a reload is bytes at the disk's rate and a constant, and each
model has one plan. Ours is `admit` with `Uses`, as the product calls them. The first load of each model is not
counted, for any rule. The constants in appliance/fleet/use.py and successors.py were chosen on even seeds; odd ones
judge.

    python3 -m benchmarks.fleet [--seeds 60] [--first 1] [--json]    60 traces, of seeds 1, 3, 5, …; two minutes
    python3 -m benchmarks.fleet --restart-hours 24 [--seeds 30]      what kept histories of use would save
    python3 -m benchmarks.fleet --steps 10000 [--first 1]             random steps on fake devices, see fleet_steps.py
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TypeVar

from rich.console import Console
from rich.table import Table

from appliance.fleet.admit import Evict, Load, Resident, Variant, admit
from appliance.fleet.use import Uses
from benchmarks import fleet_steps
from benchmarks.fleet_rivals import RIVALS, least_s
from benchmarks.fleet_traces import KINDS, Model, Trace, make_trace

_Row = TypeVar("_Row")
PLACE = "host"
AIM = 1.05  # of the best rival's reload seconds, on every trace


@dataclass(frozen=True, kw_only=True)
class Row:
    """Reload seconds of one trace. `least_s` is the exact optimum of one who knows the future."""

    seed: int
    kind: str
    is_equal: bool
    models: int
    days: float
    ours_s: float
    least_s: float
    rivals_s: dict[str, float]

    @property
    def best(self) -> str:
        return min(self.rivals_s, key=lambda name: self.rivals_s[name])

    @property
    def of_best(self) -> float:
        """Our reload seconds as a share of the best rival's; infinite if only that rival reloads nothing."""
        best_s = self.rivals_s[self.best]
        return self.ours_s / best_s if best_s else (math.inf if self.ours_s else 1.0)

    @property
    def has_shares(self) -> bool:
        """True if every rule reloads something, so that shares have a geometric mean."""
        return min(self.ours_s, self.least_s, *self.rivals_s.values()) > 0


class Ours:
    """The product's decision on a trace: loaded models, and the history of their use."""

    def __init__(self, trace: Trace) -> None:
        self.trace = trace
        self.uses = Uses()
        self.loaded: dict[str, Model] = {}

    def ask(self, model: Model, at_s: float) -> bool:
        """Serve a request. Return True if the model had to be loaded."""
        self.uses.note(model.name, at_s)
        if model.name in self.loaded:
            return False
        residents = [
            Resident(
                name=name,
                holds={PLACE: each.mib},
                reload_s=each.reload_s,
                use_chance=self.uses.chance(name, model.name, at_s),
            )
            for name, each in self.loaded.items()
        ]
        free = {PLACE: self.trace.free_mib - sum(each.mib for each in self.loaded.values())}
        match admit(model.name, [Variant(key="only", needs={PLACE: model.mib}, speed=1.0)], residents, free):
            case Evict(victims=victims):
                for name in victims:
                    del self.loaded[name]
            case Load():
                pass
            case other:
                message = f"seed {self.trace.seed}: {other}"
                raise AssertionError(message)
        self.loaded[model.name] = model
        return True


def ours_s(trace: Trace) -> float:
    """Return our reload seconds, without the first load of each model."""
    ours, seen, spent = Ours(trace), set[str](), 0.0
    for request in trace.requests:
        model = trace.models[request.name]
        if ours.ask(model, request.at_s):
            spent += model.reload_s if model.name in seen else 0.0
            seen.add(model.name)
    return spent


def restarted_s(trace: Trace, every_s: float, *, keeps: bool) -> float:
    """Return our reload seconds if the appliance is restarted every so often, without the first load of each model.
    With `keeps`, the histories of use outlive a restart."""
    ours, seen, spent, due_s = Ours(trace), set[str](), 0.0, every_s
    for request in trace.requests:
        if request.at_s >= due_s:
            due_s += every_s * math.ceil((request.at_s - due_s + 1) / every_s)
            ours.loaded = {}
            ours.uses = ours.uses if keeps else Uses()
        model = trace.models[request.name]
        if ours.ask(model, request.at_s):
            spent += model.reload_s if model.name in seen else 0.0
            seen.add(model.name)
    return spent


def restarts_of(seed: int, every_s: float) -> tuple[str, float, float]:
    """Return the kind of the trace, and the reload seconds with kept and with lost histories."""
    trace = make_trace(seed)
    return trace.kind, restarted_s(trace, every_s, keeps=True), restarted_s(trace, every_s, keeps=False)


def row_of(seed: int) -> Row:
    trace = make_trace(seed)
    return Row(
        seed=seed,
        kind=trace.kind,
        is_equal=trace.is_equal,
        models=len(trace.models),
        days=trace.requests[-1].at_s / 86_400,
        ours_s=ours_s(trace),
        least_s=least_s(trace),
        rivals_s={name: spent_s(trace) for name, spent_s in RIVALS.items()},
    )


def summary(rows: Sequence[Row]) -> dict[str, float]:
    """Return what the aims are judged by. Means are geometric, over traces in which every rule reloads something.
    Means over one rival are of traces whose models differ in size, as all made-up fleets differ in use."""
    kept = [row for row in rows if row.has_shares]
    unequal = [row for row in kept if not row.is_equal]
    found = {
        "traces": float(len(rows)),
        "traces in means": float(len(kept)),
        "of the best rival, mean": _mean(row.of_best for row in kept),
        "of the best rival, worst": max(row.of_best for row in rows),
        f"traces above {AIM}": float(sum(row.of_best > AIM for row in rows)),
        "of the optimum, mean": _mean(row.ours_s / row.least_s for row in kept),
    }
    for name in RIVALS if unequal else ():
        found[f"of {name}, mean"] = _mean(row.ours_s / row.rivals_s[name] for row in unequal)
        found[f"optimum of {name}, mean"] = _mean(row.least_s / row.rivals_s[name] for row in unequal)
    return found


def _mean(shares: Iterable[float]) -> float:
    found = list(shares)
    return statistics.geometric_mean(found) if found else math.nan


def main() -> int:
    options = _parse()
    began = time.monotonic()
    if options.steps:
        loads = fleet_steps.read_loads(options.loads)
        counts = fleet_steps.walk(options.steps, options.first, loads, foreign_mib=options.foreign_mib)
        print(json.dumps(asdict(counts), indent=1) if options.json else counts.in_words())
        return 0 if counts.is_clean else 1
    seeds = range(options.first, options.first + 2 * options.seeds, 2)
    if options.restart_hours:
        with ProcessPoolExecutor(options.workers) as pool:
            restarted = pool.map(partial(restarts_of, every_s=3600 * options.restart_hours), seeds)
            _print_restarts(list(_shown(restarted, len(seeds))))
        return 0
    with ProcessPoolExecutor(options.workers) as pool:
        rows = list(_shown(pool.map(row_of, seeds), len(seeds)))
    seconds = time.monotonic() - began
    if options.json:
        document = {"modelled": True, "rows": [asdict(row) for row in rows], "summary": summary(rows)}
        print(json.dumps({**document, "seconds": round(seconds, 1)}, indent=1))
        return 0
    _print(rows)
    print(f"{seconds:.0f} s")
    return 0


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=60, metavar="N", help="so many traces, of every second seed [60]")
    parser.add_argument("--first", type=int, default=0, metavar="K", help="the first seed; odd ones judge [0]")
    parser.add_argument("--workers", type=int, default=2, help="processes [2]")
    parser.add_argument("--json", action="store_true", help="for scripts")
    parser.add_argument(
        "--restart-hours", type=float, default=0.0, metavar="H", help="instead: a restart every H hours"
    )
    parser.add_argument("--steps", type=int, metavar="N", help="instead: random steps on fake devices")
    parser.add_argument(
        "--loads", type=Path, default=fleet_steps.LOADS, metavar="FILE", help="table of loads for --steps"
    )
    parser.add_argument(
        "--foreign-mib",
        type=float,
        default=fleet_steps.FOREIGN_MIB,
        metavar="MIB",
        help="most that other programs take during one load, for --steps [%(default)s]",
    )
    options = parser.parse_args()
    if (
        options.seeds < 1
        or options.workers < 1
        or min(options.first, options.restart_hours) < 0
        or (options.steps or 1) < 1
    ):
        parser.error("--seeds, --workers and --steps must be at least 1, --first and --restart-hours at least 0")
    return options


def _print_restarts(rows: Sequence[tuple[str, float, float]]) -> None:
    for kind in (*KINDS, "all"):
        group = [(kept_s, lost_s) for of_kind, kept_s, lost_s in rows if kind in (of_kind, "all") and kept_s and lost_s]
        if group:
            mean = _mean(kept_s / lost_s for kept_s, lost_s in group)
            kept_s, lost_s = (sum(each) for each in zip(*group, strict=True))
            print(f"{kind}: {mean:.3f} of the reload seconds with kept histories; {kept_s:,.0f} s of {lost_s:,.0f} s")


def _shown(rows: Iterable[_Row], count: int) -> Iterator[_Row]:
    """Yield the rows, and say on stderr how many are done."""
    for number, row in enumerate(rows, 1):
        print(f"\r{number} of {count} traces", end="\n" if number == count else "", file=sys.stderr, flush=True)
        yield row


def _print(rows: Sequence[Row]) -> None:
    console = Console(width=160)
    table = Table(title="reload seconds, modelled: our share of …, geometric means")
    for column in ("traces", "", "best rival", "worst", f"above {AIM}", *RIVALS, "optimum", "best rivals"):
        table.add_column(column, justify="left" if column in ("traces", "best rivals") else "right")
    groups: list[tuple[str, Callable[[Row], bool]]] = [
        *((kind, lambda row, kind=kind: row.kind == kind) for kind in KINDS),
        ("sizes differ", lambda row: not row.is_equal),
        ("sizes are equal", lambda row: row.is_equal),
        ("all", lambda row: True),
    ]
    for name, belongs in groups:
        if group := [row for row in rows if belongs(row)]:
            table.add_row(name, *_cells(group))
    console.print(table)
    for row in rows:
        if row.of_best > AIM:
            console.print(
                f"seed {row.seed}, {row.kind}: {row.of_best:.3f} of {row.best}"
                f" ({row.ours_s:.0f} s, {row.rivals_s[row.best]:.0f} s; optimum {row.least_s:.0f} s)"
            )
    for name, value in summary(rows).items():
        console.print(f"{name}: {value:.3f}")


def _cells(rows: Sequence[Row]) -> list[str]:
    kept = [row for row in rows if row.has_shares]
    best = Counter(row.best for row in rows)
    return [
        str(len(rows)),
        f"{_mean(row.of_best for row in kept):.3f}",
        f"{max(row.of_best for row in rows):.3f}",
        str(sum(row.of_best > AIM for row in rows)),
        *(f"{_mean(row.ours_s / row.rivals_s[name] for row in kept):.3f}" for name in RIVALS),
        f"{_mean(row.ours_s / row.least_s for row in kept):.3f}",
        ", ".join(f"{name} {count}" for name, count in best.most_common()),
    ]


if __name__ == "__main__":
    sys.exit(main())
