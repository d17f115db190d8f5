"""The recorded table: what one real machine did with each cell, as JSON lines, and a machine made of it.

A line is of a kind: "machine" (facts of it), "model" (what a planner knows), "cell" (knobs and what was measured, or an
error; `repeat` counts the same cell measured again, for the noise).
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from appliance.engines.llama.planning.arguments.launch import LlamaLaunch
from appliance.engines.llama.planning.hardware.assumptions import DRAM_GB_S, DRAM_SHARE
from appliance.engines.llama.planning.placement.batch import BATCH
from appliance.engines.llama.planning.placement.roofline import CPU_FIXED_MS, cpu_costs, with_threads
from appliance.plan import NOTHING, Costs, Plan
from appliance.tune.figures.curve import Curve, Point
from appliance.tune.figures.workload import CHAT, Workload, cost_s, only, scaled
from appliance.tune.search.cost_terms import Candidate, Value
from benchmarks.tuner_ours import Missing, Planned

KNOBS = ("kv_type", "load_mode", "threads", "ubatch")
PLANNED_GB_S = DRAM_GB_S.value * DRAM_SHARE.value  # where memory was not measured: the search has to live with it
PREFERRED: tuple[Value, ...] = ("f16", "mmap", 512)  # a start has plans with these before others
LEAST_NOISE = 0.01
CONTEXT = 4096  # of the server that each cell was measured on


class Recorded:
    """One model's cells as a machine. Replays add the noise floor, as if each cell were measured anew."""

    def __init__(self, facts: Mapping[str, Any], cells: Sequence[Mapping[str, Any]]) -> None:
        self.name = str(facts["name"])
        self._facts = facts
        self._cells = {key_of(cell): cell for cell in reversed(cells) if not cell["repeat"]}
        self.noise = noise_floor(cells)
        in_order = sorted(self._cells.items(), key=lambda pair: _preference(pair[1]))
        found = [self._candidate(key, cell) for key, cell in in_order]
        self.planned = Planned([plan_of(candidate.by_knob) for candidate in found], found)
        good = [cell for cell in self._cells.values() if cell["points"]]
        self.workload: Workload = scaled(CHAT, good[0]["points"][-1]["depth"])
        self._load_s = statistics.median(cell["load_s"] for cell in good)

    def fails(self, candidate: Candidate) -> Missing | None:
        return None if self._cells[candidate.key]["points"] else Missing(device="ram", mib=0.0)

    def cost_s(self, candidate: Candidate, workload: Workload) -> float:
        points = _points(self._cells[candidate.key])
        return cost_s(Curve(points=points), only(workload)) if points else math.inf

    def load_s(self, candidate: Candidate) -> float:
        del candidate
        return float(self._load_s)

    def decode_ms(self, candidate: Candidate, depth: float) -> float:
        return Curve(points=_points(self._cells[candidate.key])).decode_ms(depth)

    def prefill_ms(self, candidate: Candidate, first: int, last: int) -> float:
        return 1000 * Curve(points=_points(self._cells[candidate.key])).prefill_s(first, last)

    def _candidate(self, key: str, cell: Mapping[str, Any]) -> Candidate:
        """With the costs that a real start has for it."""
        weights = self._facts["read_mb"] * 1e6
        whole = cpu_costs(weights, self._facts["kv_values"], cell["kv_type"], PLANNED_GB_S)
        work = with_threads(whole + Costs(fixed_ms=CPU_FIXED_MS), cell["threads"], self._facts["cores"])
        # "context" and "cpu_layers" are one value each: every machine is asked for them.
        knobs: tuple[tuple[str, Value], ...] = (
            *((name, cell[name]) for name in KNOBS),
            ("cpu_layers", 0),
            ("context", CONTEXT),
        )
        return Candidate(key=key, knobs=knobs, context=CONTEXT, work=work)


def plan_of(cell: Mapping[str, Any], model_path: str = "") -> Plan:
    """On the CPU, where there is nothing else to place."""
    threads, ubatch = (int(cell[name]) for name in ("threads", "ubatch"))
    launch = LlamaLaunch(
        threads=threads,
        threads_batch=threads,
        batch=max(BATCH, ubatch),
        ubatch=ubatch,
        cache_ram_mib=0,
        flash_attention=True,
        load_mode=str(cell["load_mode"]),
    )
    return Plan(
        engine="llama",
        model_path=model_path,
        alias="cell",
        context=CONTEXT,
        kv_type=str(cell["kv_type"]),
        parallel=1,
        is_embedding=False,
        launch=launch,
        memory=NOTHING,
        usable_mib=0,
    )


def _preference(cell: Mapping[str, Any]) -> tuple[Any, ...]:
    """The order in which a real start has its plans, every core first."""
    unlike = (cell[name] not in PREFERRED for name in ("kv_type", "ubatch", "load_mode"))
    return (*unlike, -cell["threads"], key_of(cell))


def load(path: Path) -> list[Recorded]:
    rows = read(path)
    facts = [row for row in rows if row["kind"] == "model"]
    cells = {row["name"]: [c for c in rows if c["kind"] == "cell" and c["model"] == row["name"]] for row in facts}
    return [Recorded(row, cells[row["name"]]) for row in facts if any(c["points"] for c in cells[row["name"]])]


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] if path.exists() else []


def key_of(cell: Mapping[str, Any]) -> str:
    return "/".join(str(cell[name]) for name in KNOBS)


def noise_floor(cells: Iterable[Mapping[str, Any]]) -> float:
    """The relative deviation of decode times of one cell at one depth, over its repeats; at least 1 %."""
    times: dict[tuple[str, int], list[float]] = {}
    repeated = {key_of(cell) for cell in cells if cell["repeat"]}
    for cell in cells:
        if key_of(cell) in repeated:
            for point in cell["points"]:
                times.setdefault((key_of(cell), point["depth"]), []).append(math.log(point["decode_ms"]))
    deviations = [statistics.stdev(logs) for logs in times.values() if len(logs) > 1]
    return max(LEAST_NOISE, statistics.fmean(deviations)) if deviations else LEAST_NOISE


def _points(cell: Mapping[str, Any]) -> tuple[Point, ...]:
    return tuple(Point(**point) for point in cell["points"])
