"""llama-bench: its argument list held against its own --help, and its rows."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
from facts import ENGINE, IMAGE, SMALL, machine
from hypothesis import given
from hypothesis import strategies as st

from appliance.engines.llama.planning.space import plan
from appliance.engines.llama_bench import (
    BINARY,
    KV_TYPES,
    Cell,
    Grid,
    Row,
    Setup,
    Steps,
    Task,
    arguments,
    command,
    is_loaded,
    parse_row,
    tasks,
    unsuitable,
)
from appliance.errors import EngineNotReadyError
from appliance.plan import Memory, Placement, Plan, Share
from appliance.settings import resolve_settings
from appliance.tune.bench import points

USAGE = (Path(__file__).parent / "llama-bench-help.txt").read_text()
CUDA = replace(ENGINE, backends=("libggml-cpu-haswell.so", "libggml-cuda.so"))
GRID = Grid(threads=(2, 1), ubatches=(512, 256), kv_type="q8_0")
LINE = (Path(__file__).parent / "llama-bench-row.jsonl").read_text()


def chosen(**flags: str) -> Plan:
    given_flags = {"ctx_size": "4096", "threads": "3", "ubatch": "256", **flags}
    return plan(resolve_settings(given_flags, {}), IMAGE, ENGINE, machine(), SMALL)[0]


def on_gpus(*layers: int, experts: int = 0) -> Plan:
    memory = Memory(weights=1.0, kv=1.0, compute=1.0, output=0.0, cache=0.0, overhead=0.0)
    sizes = {"free_mib": 1000.0, "held_back_mib": 0.0, "bandwidth_gb_s": 100.0}
    shares = tuple(Share(id=f"GPU-{n}", name=f"GPU {n}", layers=n, memory=memory, **sizes) for n in layers)
    mode = "layer" if len(layers) > 1 else "none"
    return replace(chosen(), placement=Placement(shares=shares, split_mode=mode, cpu_expert_layers=experts))


def test_the_whole_argument_list_of_one_grid() -> None:
    line = (
        "--model /data/models/small.gguf --output jsonl --repetitions 1 --n-prompt 512 --n-gen 24 --n-depth 0,512"
        " --threads 2,1 --ubatch-size 512,256 --batch-size 2048 --cache-type-k q8_0 --cache-type-v q8_0"
        " --flash-attn on --load-mode mmap --verbose --progress"
    )
    assert arguments(chosen(), GRID, Steps(), ENGINE) == tuple(line.split())


def test_on_gpus_a_slash_parts_devices_since_a_comma_would_make_two_runs_of_them() -> None:
    argv = " ".join(arguments(on_gpus(20, 13, experts=7), GRID, Steps(), CUDA))
    placed = "--device CUDA0/CUDA1 --n-gpu-layers 33 --split-mode layer --tensor-split 20/13 --main-gpu 0 --n-cpu-moe 7"
    assert f" {placed} " in argv


def test_a_cpu_plan_of_a_cuda_build_takes_no_gpu() -> None:
    argv = arguments(chosen(), GRID, Steps(), CUDA)
    assert ("--device", "none") in set(pairwise(argv))
    assert "--device" not in arguments(chosen(), GRID, Steps(), ENGINE)


@pytest.mark.parametrize("found", [chosen(), on_gpus(33), on_gpus(20, 13, experts=7)])
@pytest.mark.parametrize("facts", [ENGINE, CUDA])
def test_every_flag_is_one_of_its_own_help(found: Plan, facts: object) -> None:
    known = set(re.findall(r"(?<!\S)(--?[a-z-]+)(?=[,\s])", USAGE))
    assert {"--model", "-ngl", "--progress"} <= known
    used = {word for word in arguments(found, GRID, Steps(), CUDA if facts is CUDA else ENGINE) if word[:2] == "--"}
    assert used <= known
    assert len(used) >= 15


def test_a_batch_is_never_below_a_ubatch_which_it_would_cut() -> None:
    argv = arguments(chosen(), replace(GRID, ubatches=(512, 4096)), Steps(), ENGINE)
    assert ("--batch-size", "4096") in set(pairwise(argv))


def test_what_it_runs_is_in_its_own_order_and_all_of_one_type() -> None:
    found = tasks(chosen(), GRID, Steps(stretch=128, stretches=2, decode_tokens=8), ENGINE)
    assert [(t.ubatch, t.threads) for t in found[::6]] == [(512, 2), (512, 1), (256, 2), (256, 1)]
    assert [(t.depth, t.read_tokens, t.decode_tokens) for t in found[:6]] == [
        (0, 128, 0), (0, 0, 8), (128, 128, 0), (128, 0, 8), (256, 128, 0), (256, 0, 8),
    ]  # fmt: skip
    assert {(t.k_type, t.v_type) for t in found} == {("q8_0", "q8_0")}
    assert GRID.cells[1] == Cell(threads=1, ubatch=512, kv_type="q8_0")


def test_a_real_row() -> None:
    row = parse_row(LINE)
    assert row is not None
    assert row.ms == pytest.approx(10997.504716)
    assert row.task == Task(
        threads=1,
        ubatch=512,
        k_type="f16",
        v_type="f16",
        depth=0,
        read_tokens=512,
        decode_tokens=0,
        setup=Setup(batch=2048, flash_attention=1, load_mode="mmap"),
    )
    assert row.task.in_words() == "1 threads, ubatch 512, KV f16: reading 512 tokens at depth 0"
    assert parse_row("....." + LINE) == row
    expected = tasks(chosen(), Grid(threads=(1,), ubatches=(512,), kv_type="f16"), Steps(), ENGINE)
    assert expected[0] == row.task


def test_a_gpu_plans_rows_are_awaited_with_its_devices() -> None:
    setup = tasks(on_gpus(20, 13, experts=7), GRID, Steps(), CUDA)[0].setup
    assert (setup.devices, setup.gpu_layers, setup.cpu_expert_layers) == ("CUDA0/CUDA1", 33, 7)


@given(st.text())
def test_other_lines_are_no_rows(line: str) -> None:
    assert parse_row(line.replace('{"build_commit":', "")) is None


@given(st.integers(0, len(LINE) - 2))
def test_a_row_that_was_cut_is_an_error_and_no_figure(length: int) -> None:
    cut = LINE[:length]
    if '{"build_commit":' not in cut:
        assert parse_row(cut) is None
        return
    with pytest.raises(EngineNotReadyError, match="printed a row that cannot be read"):
        parse_row(cut)


@given(
    st.sampled_from(sorted(json.loads(LINE))),
    st.none() | st.booleans() | st.floats() | st.text() | st.lists(st.floats() | st.text(), max_size=3),
)
def test_a_row_with_anything_in_it_is_a_positive_time_or_an_error(name: str, value: object) -> None:
    line = json.dumps({**json.loads(LINE), name: value})
    try:
        row = parse_row(line)
    except EngineNotReadyError:
        return
    assert row is not None
    assert 0 < row.ms < float("inf")


@pytest.mark.parametrize("samples", [[], [0], [12, 0], [-1]])
def test_a_row_without_a_time_is_an_error(samples: list[int]) -> None:
    with pytest.raises(EngineNotReadyError, match="gave no time for 1 threads, ubatch 512"):
        parse_row(json.dumps({**json.loads(LINE), "samples_ns": samples}))


@given(
    st.integers(1, 4096),
    st.integers(1, 4),
    st.integers(1, 200),
    st.lists(st.floats(0.001, 1e6), min_size=10, max_size=10),
)
def test_a_point_is_what_was_read_up_to_its_depth(stretch: int, stretches: int, made: int, times: list[float]) -> None:
    steps = Steps(stretch=stretch, stretches=stretches, decode_tokens=made)
    cell = Grid(threads=(1,), ubatches=(512,), kv_type="f16")
    rows = [Row(task=t, ms=ms) for t, ms in zip(tasks(chosen(), cell, steps, ENGINE), times, strict=False)]
    found = points(rows)
    assert tuple(point.depth for point in found) == steps.depths
    assert [point.prefill_tokens for point in found] == [0, *[stretch] * stretches]
    for number, point in enumerate(found):
        assert point.decode_ms == pytest.approx(rows[2 * number + 1].ms / made)
        if number:
            assert point.prefill_ms == pytest.approx(rows[2 * number - 2].ms / stretch)


def test_when_the_load_is_over() -> None:
    assert is_loaded("llama-bench: benchmark 1/8: warmup prompt run")
    assert not is_loaded("llama-bench: benchmark 1/8: starting")
    assert not is_loaded("load: warmup prompt run")


async def test_it_is_never_ready_so_that_its_stall_timer_runs_to_the_end(tmp_path: Path) -> None:
    found = command(
        chosen(), ENGINE, GRID, Steps(), engine_dir=Path("/opt/llama"), cache_dir=tmp_path, stall_timeout_s=3.0
    )
    assert found.argv[0] == f"/opt/llama/{BINARY}"
    assert found.argv[1:] == arguments(chosen(), GRID, Steps(), ENGINE)
    assert not await found.is_ready()
    assert found.stall_timeout_s == 3.0


@pytest.mark.parametrize(
    ("found", "has_experts", "words"),
    [
        (chosen(), True, "random token ids"),
        (replace(chosen(), is_embedding=True), False, "nothing to decode"),
        (replace(chosen(), threads_batch=8), False, "the plan two: 3 and 8"),
        (replace(chosen(), kv_type="f32"), False, "f32"),
        (replace(chosen(), context=1023), False, "a window of 1,024 tokens for it, and the plan's has 1,023"),
        (replace(chosen(), model_path="/data/models/a,b.gguf"), False, "/data/models/a,b.gguf"),
    ],
)
def test_what_it_would_not_measure_is_said_in_words(found: Plan, has_experts: bool, words: str) -> None:
    assert words in (unsuitable(found, Steps(), has_experts=has_experts) or "")


def test_a_dense_model_is_suitable() -> None:
    assert unsuitable(chosen(), Steps(), has_experts=False) is None
    assert set(KV_TYPES) < set(ENGINE.kv_types)
