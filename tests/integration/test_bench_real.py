"""The real llama-bench on a small model: its rows, its endings, and its figures beside the server's."""

from __future__ import annotations

import asyncio
import tempfile
from dataclasses import replace
from pathlib import Path

import pytest
from engine_stage import find_engine
from supervisor_harness import children
from test_bench_process import FACTS, PLAN

from appliance.command import Command
from appliance.engines import llama_server
from appliance.engines.llama_bench import Grid, Steps, command
from appliance.errors import EngineArgumentsError, ModelUnreadableError
from appliance.plan import Plan
from appliance.probe import probe
from appliance.probe.watch import Watch
from appliance.tune.bench import bench
from appliance.tune.measure import Look, measure
from tests.shapes import SMALL, write_gguf

SMOLLM2 = Path(__file__).parents[2] / ".make/models/SmolLM2-135M-Instruct.Q4_1.gguf"
GRID = Grid(threads=(1, 2), ubatches=(128, 64), kv_type="q8_0")
STEPS = Steps(stretch=128, stretches=2, decode_tokens=4)


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Plan:
    path = tmp_path_factory.mktemp("model") / "m.gguf"
    return replace(PLAN, model_path=str(write_gguf(path, SMALL["gqa"], quantization="Q4_K_M", with_data=True)))


def start(plan: Plan, grid: Grid, steps: Steps) -> Command:
    folder = find_engine("llama-bench").parent
    return command(plan, FACTS, grid, steps, engine_dir=folder, cache_dir=Path("/tmp"), stall_timeout_s=120.0)


def serve(plan: Plan) -> Command:
    socket_path = Path(tempfile.mkdtemp(prefix="sv", dir="/tmp")) / "e.sock"
    folder = find_engine("llama-server").parent
    return llama_server.command(
        plan, FACTS, engine_dir=folder, socket_path=socket_path, cache_dir=Path("/tmp"), stall_timeout_s=120.0
    )


async def test_its_rows_are_what_was_asked_for_in_the_order_that_is_awaited(small: Plan) -> None:
    """bench() refuses any other row, so that it ends well says that argument list, order and names are true."""
    before = children()
    found = await bench(small, GRID, STEPS, FACTS, start, tell=lambda _: None, done=lambda *_: None)
    assert [cell for cell, _ in found.cells] == list(GRID.cells)
    for _, points in found.cells:
        assert [(point.depth, point.prefill_tokens) for point in points] == [(0, 0), (128, 128), (256, 128)]
        assert all(point.decode_ms > 0 for point in points)
        assert all(point.prefill_ms > 0 for point in points[1:])
    assert 0 < found.load_s < found.seconds
    assert children() == before


async def test_cancelled_in_the_middle_it_leaves_no_process(small: Plan) -> None:
    before, first = children(), asyncio.Event()
    task = asyncio.create_task(
        bench(small, GRID, STEPS, FACTS, start, tell=lambda _: None, done=lambda *_: first.set())
    )
    await first.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert children() == before


@pytest.mark.parametrize("data", [None, b"", b"no model at all" * 100, b"GGUF\x03\x00\x00\x00" + b"\xff" * 100])
async def test_a_model_that_is_missing_or_none_is_unreadable(small: Plan, tmp_path: Path, data: bytes | None) -> None:
    path = tmp_path / "bad.gguf"
    if data is not None:
        path.write_bytes(data)
    with pytest.raises(ModelUnreadableError, match="llama-bench exited with code 1") as caught:
        await bench(
            replace(small, model_path=str(path)), GRID, STEPS, FACTS, start, tell=lambda _: None, done=lambda *_: None
        )
    assert caught.value.log


async def test_a_value_that_it_does_not_know_is_no_lack_of_memory(small: Plan) -> None:
    with pytest.raises(EngineArgumentsError, match="--cache-type-k"):
        await bench(small, replace(GRID, kv_type="f32"), STEPS, FACTS, start, tell=lambda _: None, done=lambda *_: None)


@pytest.mark.skipif(not SMOLLM2.exists(), reason="no model in .make/models: `make up` fetches one")
async def test_its_figures_beside_the_servers(capsys: pytest.CaptureFixture[str]) -> None:
    """How far apart they are is printed and not judged: the machine may be busy."""
    plan = replace(PLAN, model_path=str(SMOLLM2), parallel=1, threads=1, threads_batch=1)
    grid = Grid(threads=(plan.threads,), ubatches=(plan.ubatch,), kv_type=plan.kv_type)
    benched = await bench(plan, grid, Steps(stretch=256), FACTS, start, tell=lambda _: None, done=lambda *_: None)
    hardware = probe(Path("/tmp"), {})
    served = await measure(plan, serve, Look(depths=(32, 256)), tell=lambda _: None, watch=lambda: Watch(hardware, {}))
    (_, points), *_ = benched.cells
    with capsys.disabled():
        print(f"\nllama-bench {benched.seconds:.1f} s, load {benched.load_s:.2f} s; server {served.seconds:.1f} s")
        for name, found in (("llama-bench", points), ("server", served.points)):
            print(name, *(f"{p.decode_ms:.2f} ms at {p.depth}, prefill {p.prefill_ms:.2f} ms" for p in found), sep="; ")
    assert [point.depth for point in points] == [0, 256]
    assert [point.depth for point in served.points] == [32, 256]
    assert (points[1].prefill_tokens, served.points[1].prefill_tokens) == (256, 224)
