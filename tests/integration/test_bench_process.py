"""A llama-bench that behaves, and one that does not: what of it becomes figures, and which error the rest is."""

from __future__ import annotations

import asyncio
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from supervisor_harness import children

from appliance.command import Command
from appliance.engines.llama.facts import parse_facts
from appliance.engines.llama_bench import Cell, Grid, Steps, command
from appliance.errors import EngineArgumentsError, EngineGpuMemoryError, EngineNotReadyError
from appliance.image_facts import EngineFacts
from appliance.plan import Memory, Plan
from appliance.tune.bench import BenchRun, bench
from appliance.tune.curve import Point
from appliance.tune.measure import Step

FAKE = Path(__file__).parents[1] / "fakes/fake_bench.py"
USAGE = (Path(__file__).parents[1] / "unit/appliance/llama-server-help.txt").read_text()
FACTS: EngineFacts = parse_facts(version="version: 0.5.0-dev (build 11312, commit 0c1e57098)", usage=USAGE)
PLAN = Plan(
    engine="llama",
    model_path="/data/models/m.gguf",
    alias="m",
    context=4096,
    kv_type="f16",
    threads=1,
    threads_batch=1,
    batch=2048,
    ubatch=512,
    parallel=1,
    cache_ram_mib=0,
    flash_attention=True,
    load_mode="mmap",
    is_embedding=False,
    memory=Memory(weights=1.0, kv=1.0, compute=1.0, output=0.0, cache=0.0, overhead=0.0),
    usable_mib=1000.0,
)
GRID = Grid(threads=(1, 2), ubatches=(512, 256), kv_type="f16")
STEPS = Steps(stretch=128, decode_tokens=8)
OUT_OF_MEMORY = (
    "ggml_backend_cuda_buffer_type_alloc_buffer: allocating 1536.00 MiB on device 0: cudaMalloc failed: out of memory"
)


class Run:
    """One run of the fake with knobs, and what was heard of it."""

    def __init__(self, *knobs: str, stall_timeout_s: float = 60.0) -> None:
        self.knobs, self.stall_timeout_s = knobs, stall_timeout_s
        self.told: list[str] = []
        self.done: list[tuple[Cell, tuple[Point, ...]]] = []
        self.at_work = asyncio.Event()

    def start(self, plan: Plan, grid: Grid, steps: Steps) -> Command:
        paths = {"engine_dir": Path("/opt/llama"), "cache_dir": Path("/tmp")}
        made = command(plan, FACTS, grid, steps, stall_timeout_s=self.stall_timeout_s, **paths)
        return replace(made, argv=(sys.executable, "-I", "-S", str(FAKE), *self.knobs, *made.argv[1:]))

    def tell(self, step: Step) -> None:
        self.told.append(step.what)

    def keep(self, cell: Cell, points: tuple[Point, ...]) -> None:
        self.done.append((cell, points))
        self.at_work.set()

    async def bench(self) -> BenchRun:
        return await bench(PLAN, GRID, STEPS, FACTS, self.start, tell=self.tell, done=self.keep)


@pytest.mark.parametrize("knobs", [(), ("--dots",)])
async def test_every_cell_comes_as_it_is_measured_and_no_process_stays(knobs: tuple[str, ...]) -> None:
    before, run = children(), Run(*knobs)
    found = await run.bench()
    assert list(found.cells) == run.done
    assert [cell for cell, _ in run.done] == list(GRID.cells)
    for cell, points in run.done:
        assert points == (
            Point(depth=0, decode_ms=1.0 * cell.threads, prefill_ms=0.0, prefill_tokens=0),
            Point(depth=128, decode_ms=1.0 * cell.threads, prefill_ms=0.01 * cell.threads, prefill_tokens=128),
        )
    assert run.told[:2] == ["loading", "task 1 of 16: 1 threads, ubatch 512, KV f16: reading 128 tokens at depth 0"]
    assert run.told[-1].startswith("task 16 of 16: 2 threads, ubatch 256, KV f16: decoding 8 tokens at depth 128")
    assert 0 < found.load_s <= found.seconds
    assert children() == before


@pytest.mark.parametrize(
    "lie", ['{"n_threads": 3}', '{"type_v": "q8_0"}', '{"n_depth": 64}', '{"devices": "none"}', '{"n_gen": 9}']
)
async def test_a_row_of_other_work_is_an_error(lie: str) -> None:
    run = Run("--lie", lie)
    with pytest.raises(EngineNotReadyError, match="did other work than asked"):
        await run.bench()
    assert run.done == []


async def test_an_end_without_all_rows_is_an_error_and_what_was_whole_is_kept() -> None:
    run = Run("--rows", "7")
    with pytest.raises(EngineNotReadyError, match=r"without all its rows: the next was to be 2 threads.*at depth 128"):
        await run.bench()
    assert [cell for cell, _ in run.done] == list(GRID.cells[:1])


async def test_a_torn_row_is_an_error() -> None:
    with pytest.raises(EngineNotReadyError, match="gave no time"):
        await Run("--lie", '{"samples_ns": []}').bench()
    with pytest.raises(EngineNotReadyError, match="a row that cannot be read: ValueError"):
        await Run("--lie", '{"n_threads": "many"}').bench()


async def test_out_of_memory_is_told_with_what_was_missing_and_what_was_measured_is_kept() -> None:
    run = Run("--fail-after", "5", "--words", OUT_OF_MEMORY)
    with pytest.raises(EngineGpuMemoryError, match="engine llama-bench exited with code 1") as caught:
        await run.bench()
    assert caught.value.was_memory
    assert caught.value.needed_mib == 1536.0
    assert len(run.done) == 1


async def test_a_flag_that_it_lacks_is_no_lack_of_memory() -> None:
    with pytest.raises(EngineArgumentsError, match="--n-cpu-moo"):
        await Run("--fail-after", "0", "--words", "error: invalid parameter for argument: --n-cpu-moo").bench()


async def test_one_that_hangs_is_ended_by_its_stall_timer() -> None:
    before, run = children(), Run("--hang-after", "4", stall_timeout_s=0.5)
    with pytest.raises(EngineNotReadyError, match="made no progress"):
        await run.bench()
    assert len(run.done) == 1
    assert children() == before


async def test_cancelled_it_leaves_no_process_and_keeps_what_it_measured() -> None:
    before, run = children(), Run("--hang-after", "9")
    task = asyncio.create_task(run.bench())
    await run.at_work.wait()
    assert children() != before
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert children() == before
    assert 1 <= len(run.done) <= 2


async def test_an_interrupt_out_of_a_callback_ends_it_too() -> None:
    before, run = children(), Run()

    def refuse(cell: Cell, _: tuple[Point, ...]) -> None:
        message = f"enough after {cell}"
        raise RuntimeError(message)

    with pytest.raises(RuntimeError, match="enough"):
        await bench(PLAN, GRID, STEPS, FACTS, run.start, tell=run.tell, done=refuse)
    assert children() == before
