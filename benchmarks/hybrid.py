"""Experts on CPU and GPU: modelled tokens per second of our rule, of fixed ones, and the bound on time.

Everything here is modelled: a replay of recorded routing with the formula of appliance/moe/cost.py. No GPU is used. The
traces that are shipped are one prompt each, 128 decoded tokens, with fewer experts than the models have: short and
optimistic. Kept apart: the rule was chosen on gemma.csv and synthetic traces with machines drawn at random
(appliance/moe/README.md); qwen.csv and the four machines were not used for that.

    python benchmarks/hybrid.py [--json] [--plot FOLDER]          every trace, slots, machine and rule; a minute or two
    python benchmarks/hybrid.py --judge                           figures of the aims, on more machines and traces
    python benchmarks/hybrid.py --trace FILE --rates FILE         any other; each may be given more than once
    python benchmarks/hybrid.py --trace FILE --rates FILE --slots 12 --only-ours   a long one, our rule alone
    python benchmarks/hybrid.py --trace FILE --expert-mb 2.9      a trace that the engine recorded, which has no sizes
    python benchmarks/hybrid.py --write-table                     replays the traces for `appliance plan --explain`

Rates of a machine are JSON: {"name": "…", "cpu_gb_s": 52, "pcie_gb_s": 24, "dram_gb_s": 62, "expert_mb": 2.9,
"other_ms": 0.08, "cpu_fixed_ms": 0.03, "gpu_expert_ms": 0.008, "gpu_fixed_ms": 0}, measured with CPU and PCIe at work
together. Without expert_mb it is that of the trace. --trace without --rates takes CARDS, and ends with a table of what
another card or number of slots would give.
"""

from __future__ import annotations

import argparse
import gzip
import io
import json
import statistics
import sys
import time
import timeit
import zlib
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import Executor, ProcessPoolExecutor
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import pairwise, product
from pathlib import Path
from typing import IO, Any, cast

from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).parents[1]))

from appliance.moe.cache import LayerCache, SlotsTooFewError, layer_caches
from appliance.moe.cost import Cost, Rates
from appliance.moe.trace import LINE_MAX, Trace, parse_trace
from benchmarks import hybrid_read, hybrid_rivals, hybrid_table
from benchmarks.hybrid_bounds import fewest_misses_by_layer, pooled_least_ms, trace_least_ms
from benchmarks.hybrid_generated import KINDS, Generated
from benchmarks.hybrid_simulate import Result, replay, replay_part, timed

SLOTS = (6, 12, 24, 48)
TRACES = Path(__file__).parent / "hybrid_traces"
SHIPPED = (TRACES / "qwen.csv.gz", TRACES / "gemma.csv.gz")
WRONG = 1.5  # a rate is believed so much too high or too low
WRONG_RATES = ("cpu_gb_s", "pcie_gb_s", "dram_gb_s")
WRONG_SLOTS = 12  # or all that were asked for
TIMED_SLOTS = 12
TIMED_REPLAYS = 9
TIMED_TOKENS = 512  # of each layer
LOOKUPS = 20_000
LONG_BYTES = 1 << 26
JUDGED_SHARES = (1 / 32, 1 / 16, 3 / 32, 3 / 16, 3 / 8)  # slots of a layer to its experts
JUDGED_SEEDS = (200, 201)  # of each kind; looked at once, after the rule was done
NEAR = 0.99  # of the best fixed rule
OURS, BOUND = "ours", "time bound"
POOLED_BOUND = "pooled time bound"  # all layers pooled, slots kept for what prompts use


@dataclass(frozen=True, kw_only=True)
class Machine:
    name: str
    expert_mb: float | None  # None: that of the trace
    rates: Rates

    @property
    def cost(self) -> Cost:
        if self.expert_mb is None:
            hint = "give --expert-mb, or add it to --rates FILE"
            message = f"{self.name}: neither the rates nor the trace name expert_mb: {hint}"
            raise ValueError(message)
        return Cost(self.rates, self.expert_mb)


def _machine(name: str, *figures: float) -> Machine:
    names = ("cpu_gb_s", "pcie_gb_s", "dram_gb_s", "expert_mb", "other_ms", "cpu_fixed_ms", "gpu_expert_ms")
    given = dict(zip(names, figures, strict=True))
    return Machine(name=name, expert_mb=given.pop("expert_mb"), rates=Rates(**given))


MACHINES = (
    _machine("H200 box bf16", 60, 50, 110, 9.44, 0.10, 0.04, 0.012),
    _machine("H200 box int4", 40, 45, 110, 2.51, 0.10, 0.04, 0.010),
    _machine("DDR5 desktop", 52, 24, 62, 2.9, 0.08, 0.03, 0.008),
    _machine("DRAM saturated", 30, 13, 31.75, 2.9, 0.08, 0.03, 0.008),
)
# Kinds of machines of today, by data sheets; not measured.
CARDS = (
    _machine("laptop", 45, 12, 65, 2.9, 0.09, 0.03, 0.012),
    _machine("RTX 4090", 60, 24, 72, 2.9, 0.07, 0.03, 0.006),
    _machine("RTX 3090, DDR4", 65, 22, 78, 2.9, 0.08, 0.03, 0.008),
    _machine("H100", 220, 50, 260, 13.2, 0.06, 0.03, 0.009),
    _machine("H100, 2 Xeon AMX", 380, 48, 480, 13.2, 0.06, 0.03, 0.009),
    _machine("RTX 4060, PCIe 3 x8", 30, 6, 40, 13.2, 0.12, 0.03, 0.06),
    _machine("weak CPU, fast link", 15, 52, 120, 2.9, 0.08, 0.03, 0.006),
)
Source = Path | Generated


@dataclass(frozen=True, kw_only=True)
class Row:
    """One trace, machine and number of slots. `tokens_per_s` by rule, the bounds last; empty where it was refused."""

    trace: str
    machine: str
    slots: int
    tokens_per_s: dict[str, float]
    hit_rate: float = 0.0
    best_hit_rate: float = 0.0
    fetched: float = 0.0  # experts a layer and token
    uploads: float = 0.0
    takeovers: tuple[str, ...] = ()
    refused: str = ""

    @property
    def best_fixed(self) -> str:
        return max(hybrid_rivals.NAMES, key=lambda name: self.tokens_per_s[name])

    def share_of(self, rule: str) -> float:
        return self.tokens_per_s[OURS] / self.tokens_per_s[rule]


@dataclass(frozen=True, kw_only=True)
class Wrong:
    """Speed lost, as a fraction, when one rate is believed `factor` times what it is."""

    trace: str
    machine: str
    slots: int
    rate: str
    factor: float
    loss: float


def read_trace(path: Path, workers: int = 1) -> Trace:
    """Read a trace: in blocks if the file is regular, else line by line, cutting lines that are too long for a trace.

    Raises TraceError, OSError.
    """
    with ProcessPoolExecutor(workers) if workers > 1 else nullcontext() as pool:
        mapped = hybrid_read.ahead(pool, workers) if pool else map
        trace = hybrid_read.read_regular(lambda: _opened(path), mapped)
    if trace:
        return trace
    with io.TextIOWrapper(_opened(path), encoding="utf-8") as file:
        return parse_trace(iter(lambda: file.readline(LINE_MAX + 1), ""))


def _opened(path: Path) -> IO[bytes]:
    return cast("IO[bytes]", gzip.open(path)) if path.suffix == ".gz" else path.open("rb")


def read_machine(path: Path) -> Machine:
    """Raises ValueError naming what is wrong."""
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(document, dict):
            message = "not an object with the rates"
            raise TypeError(message)
        name, size = str(document.pop("name", path.stem)), document.pop("expert_mb", None)
        machine = Machine(name=name, expert_mb=None if size is None else float(size), rates=Rates(**document))
        if size is not None:
            Cost(machine.rates, float(size))
    except (TypeError, ValueError) as error:
        message = f"{path}: {error}"
        raise ValueError(message) from error
    return machine


def sized(machines: Sequence[Machine], trace: Trace) -> tuple[Machine, ...]:
    """Return the machines with the trace's size of an expert if they name none. Raises ValueError if neither does."""
    found = tuple(replace(each, expert_mb=each.expert_mb or trace.expert_mb) for each in machines)
    for machine in found:
        _ = machine.cost
    return found


_traces: dict[Source, Trace] = {}  # read once, before processes are forked


def _trace(source: Source, workers: int = 1) -> Trace:
    if source not in _traces:
        _traces[source] = source.trace() if isinstance(source, Generated) else _from_file(source, workers)
    return _traces[source]


def _from_file(path: Path, workers: int) -> Trace:
    """Raises ValueError that names the file, and the line of a damaged one."""
    try:
        size = path.stat().st_size
        is_long = size > LONG_BYTES
        if is_long:
            print(f"reading {path}: {size // 10**6} MB", file=sys.stderr)
        return read_trace(path, workers if is_long else 1)
    except (ValueError, OSError, EOFError, zlib.error) as error:
        message = f"{path}: {error}"
        raise ValueError(message) from error


def ours_of(pool: Executor, cells: Sequence[tuple[Path, int]], machines: Sequence[Machine], workers: int) -> list[Row]:
    """Our rule alone; where there are fewer replays than processes, layers are shared out."""
    asked = [(path, slots, machine) for path, slots in cells for machine in sized(machines, _trace(path))]
    shares = -(-workers // len(asked))
    parts = []
    for path, slots, machine in asked:
        layers = 0 if _refusal(_trace(path), slots) else len(_trace(path).top_k)
        ends = [layers * number // shares for number in range(shares + 1)]
        tasks = [(path, slots, machine, range(*pair)) for pair in pairwise(ends) if layers]
        parts.append([pool.submit(_part_of, task) for task in tasks])
    return [_ours(*each, [part.result() for part in futures]) for each, futures in zip(asked, parts, strict=True)]


def _refusal(trace: Trace, slots: int) -> str:
    most = max(trace.top_k.values())
    if most <= slots <= trace.experts:
        return ""
    return f"{slots} slots cannot hold one token's {most} experts, or are more than there are"


def _refused(name: str, machine: Machine, slots: int, why: str) -> Row:
    return Row(trace=name, machine=machine.name, slots=slots, tokens_per_s={}, refused=why)


def _part_of(task: tuple[Path, int, Machine, range]) -> Result:
    path, slots, machine, layers = task
    return replay_part(_trace(path), slots, machine.cost, layers)


def _ours(path: Path, slots: int, machine: Machine, parts: Sequence[Result]) -> Row:
    trace, name = _trace(path), path.name.partition(".")[0]
    if not parts:
        return _refused(name, machine, slots, _refusal(trace, slots))
    result = timed(trace, machine.cost, parts)
    return Row(
        trace=name,
        machine=machine.name,
        slots=slots,
        tokens_per_s={OURS: result.tokens_per_s},
        hit_rate=result.hit_rate,
        fetched=result.fetched / result.layer_tokens,
        uploads=result.uploads / result.layer_tokens,
        takeovers=tuple(takeover.in_words() for takeover in result.takeovers),
    )


def rows_of(task: tuple[Source, int, tuple[Machine, ...]]) -> list[Row]:
    """One trace and number of slots: what does not depend on the machine is found once."""
    source, slots, machines = task
    trace, name = _trace(source), source.name.partition(".")[0]
    if why := _refusal(trace, slots):
        return [_refused(name, machine, slots, why) for machine in machines]
    layers = hybrid_rivals.layer_tokens(trace)
    rules = {**hybrid_rivals.FIXED, hybrid_rivals.ORACLE: hybrid_rivals.oracle_static}
    steps = {rule: hybrid_rivals.counted(layers, partial(run, slots=slots)) for rule, run in rules.items()}
    shared = hybrid_rivals.shared_lru(trace, slots)
    misses = tuple(fewest_misses_by_layer(trace, slots, is_prompt_free=free) for free in (True, False))
    return [_row(trace, name, machine, slots, layers, steps, shared, misses) for machine in machines]


def _row(
    trace: Trace,
    name: str,
    machine: Machine,
    slots: int,
    layers: Sequence[hybrid_rivals.Tokens],
    steps: dict[str, Counter[tuple[int, int, int]]],
    shared: Counter[tuple[int, int]],
    misses: tuple[dict[int, int], ...],
) -> Row:
    cost, tokens = machine.cost, trace.decoded
    speeds = {rule: tokens / hybrid_rivals.seconds(trace, counts, cost) for rule, counts in steps.items()}
    offload = hybrid_rivals.seconds(trace, steps["LRU insert-all"], cost, always_fetches=True)
    speeds[hybrid_rivals.OFFLOAD] = tokens / offload
    fetched = hybrid_rivals.fetched_by_ratio(cost)
    by_ratio = hybrid_rivals.counted(layers, lambda of_layer: hybrid_rivals.q_star(of_layer, slots, fetched))
    speeds[hybrid_rivals.RATIO] = tokens / hybrid_rivals.seconds(trace, by_ratio, cost, always_fetches=True)
    speeds[hybrid_rivals.SHARED_LRU] = tokens / hybrid_rivals.shared_lru_seconds(trace, shared, cost)
    result = replay(trace, cost, slots)
    speeds[OURS] = result.tokens_per_s
    speeds[BOUND] = 1000 * tokens / trace_least_ms(trace, cost, misses[0])
    speeds[POOLED_BOUND] = 1000 * tokens / pooled_least_ms(trace, cost, misses[1])
    return Row(
        trace=name,
        machine=machine.name,
        slots=slots,
        tokens_per_s=speeds,
        hit_rate=result.hit_rate,
        best_hit_rate=1 - sum(misses[0].values()) / (tokens * sum(trace.top_k.values())),
        fetched=result.fetched / result.layer_tokens,
        uploads=result.uploads / result.layer_tokens,
        takeovers=tuple(takeover.in_words() for takeover in result.takeovers),
    )


def wrong_of(task: tuple[Path, int, Machine]) -> list[Wrong]:
    path, slots, machine = task
    trace = _trace(path)
    try:
        right = replay(trace, machine.cost, slots).tokens_per_s
    except SlotsTooFewError:
        return []
    found = []
    for rate in WRONG_RATES:
        for factor in (WRONG, 1 / WRONG):
            rates = replace(machine.rates, **{rate: getattr(machine.rates, rate) * factor})
            believed = replace(machine, rates=rates).cost
            loss = 1 - replay(trace, machine.cost, slots, believed_cost=believed).tokens_per_s / right
            name = path.name.partition(".")[0]
            found.append(Wrong(trace=name, machine=machine.name, slots=slots, rate=rate, factor=factor, loss=loss))
    return found


def decision_us(path: Path, slots: int, machine: Machine) -> dict[str, float]:
    """Microseconds of a look-up in the table of splits, of a whole decision, and of what follows it off the critical
    path: medians over one replay, of the least of several replays for each layer and token, since other processes only
    ever add to a time. `slowest`: 99 of 100 decisions take less. `rows_per_s`: layers and tokens that the fastest
    replay handled in a second of CPU time, clocks included."""
    trace = _trace(path)
    top_k = list(trace.top_k.values())
    if slots < max(top_k):
        return {}
    replays = [
        _timed(layer_caches([machine.cost] * len(top_k), slots=slots, experts=trace.experts, top_k=top_k), trace)
        for _ in range(TIMED_REPLAYS)
    ]
    least = [list(map(min, zip(*each, strict=True))) for each in zip(*(found[:2] for found in replays), strict=True)]
    splits, k = machine.cost.splits, top_k[0]
    looked_up = timeit.repeat(lambda: splits(k, k // 2)[1], number=LOOKUPS, repeat=TIMED_REPLAYS)
    return {
        "lookup": 1e6 * min(looked_up) / LOOKUPS,
        "decide": statistics.median(least[0]) / 1000,
        "slowest": statistics.quantiles(least[0], n=100)[-1] / 1000,
        "observe": statistics.median(least[1]) / 1000,
        "rows_per_s": len(least[0]) / min(seconds for _, _, seconds in replays),
    }


def _timed(caches: Sequence[LayerCache], trace: Trace) -> tuple[list[int], list[int], float]:
    """Nanoseconds of each `decide` and of each `observe`, and CPU seconds of them all."""
    decide, observe, clock = [], [], time.perf_counter_ns
    spent = time.process_time()
    for layer_cache, tokens in zip(caches, hybrid_rivals.layer_tokens(trace), strict=True):
        for _, used in tokens[:TIMED_TOKENS]:
            began = clock()
            decision = layer_cache.decide(used)
            decide.append(clock() - began)
            for upload in decision.uploads:
                layer_cache.landed(upload)
            began = clock()
            layer_cache.observe()
            observe.append(clock() - began)
    return decide, observe, time.process_time() - spent


def summary(rows: Sequence[Row]) -> dict[str, float]:
    """Summary of the rows that were not refused. `over …` is the geometric mean of our speed to that rule's."""
    kept = [row for row in rows if not row.refused]
    shares = [row.share_of(row.best_fixed) for row in kept]
    over = {rule: statistics.geometric_mean(row.share_of(rule) for row in kept) for rule in hybrid_rivals.NAMES}
    found = {
        "cells": float(len(kept)),
        f"share of cells ≥ {NEAR} of the best fixed rule": sum(share >= NEAR for share in shares) / len(kept),
        "least share of the best fixed rule": min(shares),
        "least over a single rule": min(over.values()),
    }
    found["least share of the time bound"] = min(row.share_of(BOUND) for row in kept)
    found[f"least share of {POOLED_BOUND}"] = min(row.share_of(POOLED_BOUND) for row in kept)
    return found | {f"over {rule}": mean for rule, mean in over.items()}


def judged(workers: int) -> list[Row]:
    """Rows of the shipped traces and of made-up ones whose seeds no constant was chosen on, on every machine."""
    sources: list[Source] = [*SHIPPED, *(Generated(kind, seed) for kind in KINDS for seed in JUDGED_SEEDS)]
    tasks: list[tuple[Source, int, tuple[Machine, ...]]] = []
    for source in sources:
        trace = _trace(source)
        least = max(trace.top_k.values())
        slots = sorted({max(least, round(share * trace.experts)) for share in JUDGED_SHARES})
        tasks += [(source, count, (*MACHINES, *CARDS)) for count in slots]
    with ProcessPoolExecutor(workers) as pool:
        return [row for found in pool.map(rows_of, tasks) for row in found]


def _judge(options: argparse.Namespace) -> int:
    rows = judged(options.workers)
    shipped = {path.name.partition(".")[0] for path in SHIPPED}
    groups = {name: [row for row in rows if row.trace == name] for name in shipped}
    groups["made up"] = [row for row in rows if row.trace not in shipped]
    groups["all"] = rows
    if options.json:
        found = {name: summary(own) for name, own in groups.items()}
        print(json.dumps({"modelled": True, "summary": found, "rows": [asdict(row) for row in rows]}, indent=1))
        return 0
    for name, own in groups.items():
        near, least, over = list(summary(own).values())[1:4]
        worst = min(own, key=lambda row: row.share_of(row.best_fixed))
        where = f"{worst.trace}, {worst.machine}, {worst.slots} slots, {worst.best_fixed}"
        print(
            f"{name}: {len(own)} cells, {near:.1%} ≥ {NEAR} of the best fixed rule, least {least:.3f} ({where}), ",
            end="",
        )
        print(f"each single rule × {over:.3f} or more on the geometric mean")
    return 0


def main() -> int:
    options = _parse()
    began = time.monotonic()
    if options.judge:
        return _judge(options)
    machines = tuple(replace(card, expert_mb=options.expert_mb) for card in CARDS) if options.trace else MACHINES
    paths = options.trace or SHIPPED
    try:
        machines = tuple(read_machine(path) for path in options.rates) or machines
        for path in paths:
            sized(machines, _trace(path, options.workers))  # refused here, with its line, before any work
    except (ValueError, OSError) as error:
        sys.exit(f"error: {error}")
    if options.write_table:
        return hybrid_table.write({path.name.partition(".")[0]: _trace(path) for path in paths})
    cells = list(product(paths, options.slots))
    with ProcessPoolExecutor(options.workers) as pool:
        if options.only_ours:
            return _show_ours(options, ours_of(pool, cells, machines, options.workers), began)
        tasks = [(path, slots, sized(machines, _trace(path))) for path, slots in cells]
        wrong_cells = [task for task in tasks if task[1] == WRONG_SLOTS] or tasks
        wrong_tasks = [(path, slots, machine) for path, slots, own in wrong_cells for machine in own]
        rows = [row for found in pool.map(rows_of, tasks) for row in found]
        wrong = [each for found in pool.map(wrong_of, wrong_tasks) for each in found]
    if not any(not row.refused for row in rows):
        sys.exit(f"error: {rows[0].refused}")
    decision = decision_us(paths[0], TIMED_SLOTS, tasks[0][2][0])
    if options.plot:
        from benchmarks import hybrid_plot  # here: tests import this file, and matplotlib takes as long as all the rest

        hybrid_plot.plot([row for row in rows if not row.refused], options.plot, OURS, BOUND)
    if options.json:
        document = _as_json(rows, wrong, time.monotonic() - began)
        print(json.dumps({**document, "decision_us": decision}, indent=1))
    else:
        _print(rows, wrong, time.monotonic() - began, is_given=bool(options.trace))
        if decision:
            print(
                "table look-up {lookup:.2f} µs; decide {decide:.1f} µs, 99 % {slowest:.1f}; observe {observe:.1f} µs; "
                "{rows_per_s:.0f} layer-tokens/s".format(**decision)
            )
    return 0


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--trace", type=Path, action="append", default=[], metavar="FILE", help="instead of those that are shipped"
    )
    parser.add_argument(
        "--rates", "--machine", type=Path, action="append", default=[], metavar="FILE", help="machines, instead of ours"
    )
    parser.add_argument("--expert-mb", type=float, metavar="MB", help="size of an expert, if the trace does not say it")
    parser.add_argument("--judge", action="store_true", help="print the figures of the aims; several minutes")
    parser.add_argument("--slots", type=int, action="append", metavar="N", help="in each layer [6, 12, 24, 48]")
    parser.add_argument("--workers", type=int, default=2, help="processes [2]")
    parser.add_argument(
        "--only-ours", action="store_true", help="without other rules, bounds, wrong rates: 54,000 tokens in a minute"
    )
    parser.add_argument("--json", action="store_true", help="for scripts")
    parser.add_argument("--plot", type=Path, metavar="FOLDER", help="write hybrid.png and hybrid.svg there")
    parser.add_argument("--write-table", action="store_true", help="write replays.json of the planner from the traces")
    options = parser.parse_args()
    options.slots = options.slots or list(SLOTS)
    if options.workers < 1 or min(options.slots) < 1:
        parser.error("--workers and --slots must be at least 1")
    if options.expert_mb is not None and not options.expert_mb > 0:
        parser.error("--expert-mb must be above 0")
    return options


def _show_ours(options: argparse.Namespace, rows: Sequence[Row], began: float) -> int:
    kept = [row for row in rows if not row.refused]
    if not kept:
        sys.exit(f"error: {rows[0].refused}")
    seconds = time.monotonic() - began
    if options.json:
        print(
            json.dumps(
                {"modelled": True, "rows": [asdict(row) for row in rows], "seconds": round(seconds, 1)}, indent=1
            )
        )
        return 0
    for row in rows:
        where = f"{row.trace}, {row.machine}, {row.slots} slots"
        print(f"{where}: {row.refused or f'modelled {row.tokens_per_s[OURS]:.1f} tok/s, {row.hit_rate:.1%} hits'}")
        for words in row.takeovers:
            print(f"{where}: {words}")
    print(f"{seconds:.0f} s")
    return 0


def _as_json(rows: Sequence[Row], wrong: Sequence[Wrong], seconds: float) -> dict[str, Any]:
    return {
        "modelled": True,
        "rows": [asdict(row) for row in rows],
        "wrong_rates": [asdict(each) for each in wrong],
        "summary": summary(rows),
        "seconds": round(seconds, 1),
    }


def _print(rows: Sequence[Row], wrong: Sequence[Wrong], seconds: float, *, is_given: bool) -> None:
    console = Console(width=216)
    for trace in dict.fromkeys(row.trace for row in rows):
        console.print(_table(trace, [row for row in rows if row.trace == trace]))
        for words in dict.fromkeys(row.refused for row in rows if row.trace == trace and row.refused):
            console.print(f"refused: {words}")
        if is_given:
            console.print(_by_slots(trace, [row for row in rows if row.trace == trace and not row.refused]))
    for words in _in_words(rows, wrong):
        console.print(words)
    console.print(f"{seconds:.0f} s")


def _table(trace: str, rows: Sequence[Row]) -> Table:
    table = Table(title=f"{trace}: modelled tokens per second")
    for column in (
        "machine",
        "slots",
        hybrid_rivals.ORACLE,
        *hybrid_rivals.NAMES,
        OURS,
        "of best fixed",
        BOUND,
        "of it",
        "of the pooled",
        "hits",
        "at most",
    ):
        table.add_column(column, justify="left" if column == "machine" else "right")
    for row in rows:
        if row.refused:
            table.add_row(row.machine, str(row.slots), "refused")
            continue
        speeds = [f"{row.tokens_per_s[name]:.1f}" for name in (hybrid_rivals.ORACLE, *hybrid_rivals.NAMES, OURS)]
        shares = (f"{row.share_of(row.best_fixed):.3f}", f"{row.tokens_per_s[BOUND]:.1f}", f"{row.share_of(BOUND):.3f}")
        hits = (f"{row.share_of(POOLED_BOUND):.3f}", f"{row.hit_rate:.1%}", f"{row.best_hit_rate:.1%}")
        table.add_row(row.machine, str(row.slots), *speeds, *shares, *hits)
    return table


def _by_slots(trace: str, rows: Sequence[Row]) -> Table:
    """Our speed by slots and machine, and its ratio to all-CPU."""
    machines = list(dict.fromkeys(row.machine for row in rows))
    found = {(row.slots, row.machine): row for row in rows}
    table = Table("slots", *machines, title=f"{trace}: ours on other cards and slots, modelled tok/s and × all-CPU")
    for slots in sorted({row.slots for row in rows}):
        own = [found[slots, machine] for machine in machines]
        table.add_row(str(slots), *(f"{row.tokens_per_s[OURS]:.1f} ×{row.share_of('all-CPU'):.2f}" for row in own))
    return table


def _in_words(rows: Sequence[Row], wrong: Sequence[Wrong]) -> Iterator[str]:
    for name, value in summary(rows).items():
        yield f"{name}: {value:.3f}"
    yield f"a rate believed {WRONG} times too high or low: worst loss by trace and slots"
    for cell in dict.fromkeys((each.trace, each.slots) for each in wrong):
        worst = max((each for each in wrong if (each.trace, each.slots) == cell), key=lambda each: each.loss)
        yield f"  {cell[0]}, {cell[1]}: {worst.loss:.1%} ({worst.machine}, {worst.rate} ×{worst.factor:.2f})"
    yield from (f"{row.trace}, {row.machine}, {row.slots}: {words}" for row in rows for words in row.takeovers)


if __name__ == "__main__":
    sys.exit(main())
