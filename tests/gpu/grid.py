"""Which cells a coarse sweep tries, and what the tuner's choice loses against them: pure."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from benchmarks.tuner_record import SYNTHETIC
from tests.shapes import PUBLISHED, Shape

PICK = "pick"


@dataclass(frozen=True, kw_only=True)
class Case:
    """A model and what is swept on it, by the names of settings. `leave_mib` is what a card of that size would have."""

    shape: Shape
    ctx_size: int
    grid: Mapping[str, Sequence[int | str]]
    leave_mib: int | None = None


KV = ("f16", "q8_0")
CASES = {
    "dense": Case(
        shape=PUBLISHED["llama-3.1-8b"],
        ctx_size=16384,
        grid={"threads": (1, 8), "ubatch": (256, 512, 1024, 2048), "kv_type": KV},
    ),
    # 18.6 GB on 12 GiB: the planner puts the experts of 22 of its 48 layers into host memory; with 20 it would have to
    # leave whole layers there.
    "moe": Case(
        shape=PUBLISHED["qwen3-30b-a3b"],
        ctx_size=16384,
        grid={"n_cpu_moe": (22, 26, 32), "threads": (8, 16), "ubatch": (512, 2048), "kv_type": KV},
        leave_mib=12288,
    ),
    # The same model with the best static placement, and with slots for experts beside it. Its weights are random, so
    # tokens use all experts alike: a trained model has more hits.
    "slots": Case(
        shape=PUBLISHED["qwen3-30b-a3b"],
        ctx_size=16384,
        grid={"moe_slots": ("off", 12, 24), "threads": (4, 8, 16)},
        leave_mib=12288,
    ),
    # llama.cpp's later rule (every miss is copied, nothing runs on the CPU), no copies, and nothing at the same time.
    "slots-rules": Case(
        shape=PUBLISHED["qwen3-30b-a3b"],
        ctx_size=16384,
        grid={
            "moe_slots": (12, 24),
            "engine_arg": ("--moe-policy split", "--moe-policy lru", "--moe-policy cpu", "--no-moe-overlap"),
        },
        leave_mib=12288,
    ),
    "small": Case(
        shape=SYNTHETIC["moe-16x"],
        ctx_size=2048,
        grid={"threads": (1, 2), "ubatch": (128, 512), "kv_type": KV},
    ),
}


def cells(grid: Mapping[str, Sequence[int | str]], count: int) -> list[dict[str, str]]:
    """Return the first `count` cells in a fixed, scattered order, so that a sweep that is cut short is spread as
    well."""
    rows = [dict(zip(grid, map(str, values), strict=True)) for values in itertools.product(*grid.values())]
    random.Random(0).shuffle(rows)
    return rows[:count]


def name_of(cell: Mapping[str, str]) -> str:
    return " ".join(f"{name}={value}" for name, value in cell.items())


@dataclass(frozen=True, kw_only=True)
class Row:
    """One start of the engine, or one that was refused. `where` says on what: rows of elsewhere do not count."""

    where: str
    cell: str
    plan: str | None = None
    job_s: float | None = None
    decode_ms: Mapping[str, float] = field(default_factory=dict)
    seconds: float = 0.0
    error: str | None = None
    disturbance: str | None = None


@dataclass(frozen=True, kw_only=True)
class KvCheck:
    """`regret` as a fraction, below zero where the choice beats every cell; `spread`: how far looks at it differ."""

    pick_s: float
    best: str
    best_s: float
    regret: float
    spread: float | None
    measured: int
    failed: int


def judge(rows: Iterable[Row]) -> KvCheck | None:
    """Compare the tuner's choice with the cells. If the choice was measured several times, the mean counts. None until
    both a choice and a cell were measured."""
    seen = list(rows)
    picks = [row.job_s for row in seen if row.cell == PICK and row.job_s is not None]
    swept = [(row.job_s, row.cell) for row in seen if row.cell != PICK and row.job_s is not None]
    if not picks or not swept:
        return None
    pick_s = sum(picks) / len(picks)
    best_s, best = min(swept)
    return KvCheck(
        pick_s=pick_s,
        best=best,
        best_s=best_s,
        regret=(pick_s - best_s) / best_s,
        spread=(max(picks) - min(picks)) / min(picks) if len(picks) > 1 else None,
        measured=len(swept),
        failed=sum(row.cell != PICK and row.job_s is None for row in seen),
    )


def table(rows: Iterable[Row]) -> str:
    """Return the rows as a table: the fastest first, then failures with their reason."""
    lines = [f"{'job s':>9}  {'decode ms by depth':<32}  cell"]
    for row in sorted(rows, key=lambda row: (row.job_s is None, row.job_s or 0.0, row.cell)):
        points = " ".join(f"{depth}:{ms:.2f}" for depth, ms in row.decode_ms.items())
        shown = f"{row.job_s:9.3f}  {points:<32}" if row.job_s is not None else f"{'-':>9}  {'':<32}"
        notes = [row.plan, row.error, row.disturbance and f"disturbed: {row.disturbance}"]
        lines.append("  ".join([shown, row.cell, *(note for note in notes if note)]))
    return "\n".join(lines)
