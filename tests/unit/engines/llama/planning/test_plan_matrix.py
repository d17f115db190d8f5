"""The matrix of 14 models on 14 machines: as it was read, and each letter on examples of the review that found it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import cache

import pytest

from appliance.engines.llama.planning.arguments.launch import launch_of
from appliance.engines.llama.planning.memory.memory import UBATCH
from appliance.plan import CONTEXT_STEP, SMALLEST_CONTEXT, Plan
from tests.builders import some
from tests.golden import letters, matrix
from tests.golden.letters import Judged, is_on_gpus
from tests.golden.matrix import CELLS, MODELS, Cell

MOST_WITH_A_LETTER = 1  # the aim is 5 at most: lower it with every cell that goes


@cache
def judged(machine: str, name: str, **flags: str) -> Judged:
    quantization = dict(MODELS)[name]
    return Cell(machine=machine, model=name, quantization=quantization, flags=flags).judged()


def with_plan(of: Judged, plan: Plan) -> Judged:
    return replace(of, plan=plan)


@pytest.mark.thorough
@pytest.mark.parametrize("name", some([name for name, _ in MODELS]))
def test_every_cell_is_the_line_that_was_read(name: str) -> None:
    """`python -m tests.golden.matrix` writes them anew; read the difference before keeping it."""
    section = matrix.TABLE.read_text().partition(f"\n## {name} ")[2].partition("\n## ")[0].strip().splitlines()
    own = [cell for cell in CELLS if cell.model == name]
    lines = [matrix.line(cell) for cell in own]
    assert section[4:] == [str(line) for line in lines]
    known = matrix.known()
    for line in lines:
        assert set(line.letters) == set(known.get(line.cell.name, {})), line.cell.name


def test_cells_with_a_letter_are_few_and_each_has_a_reason() -> None:
    known = matrix.known()
    assert {name for name in known if name not in {cell.name for cell in CELLS}} == set()
    assert [name for name, row in known.items() if not row or not all(row.values())] == []
    assert len(known) == MOST_WITH_A_LETTER


def test_the_grid_says_what_the_lines_say() -> None:
    text = matrix.TABLE.read_text()
    begins = tuple(f"| {name} |" for name, _ in MODELS)
    grid = [row.strip("| ").split(" | ") for row in text.splitlines() if row.startswith(begins)]
    marks = {(row[0], at): mark for row in grid for at, mark in zip(matrix.MACHINES, row[1:], strict=True)}
    assert len(marks) == len(CELLS) == 196
    known = matrix.known()
    for cell in CELLS:
        assert marks[cell.model, cell.machine] in ("".join(known.get(cell.name, {})) or "ok", "ref")


# Of the review, S3: f16 was kept although layers had to leave the GPUs for it.
S3: list[tuple[str, str, Mapping[str, str]]] = [
    ("H100", "llama-3.3-70b", {"kv_type": "f16", "ctx_size": "131072"}),
    ("3060", "llama-3.1-8b", {"kv_type": "f16", "ctx_size": "48128", "ubatch": "512"}),
    ("T4", "llama-3.1-8b", {"kv_type": "f16", "ctx_size": "78848"}),
    ("5090", "qwen3-30b-a3b-2507", {"kv_type": "f16", "ctx_size": "152576"}),
    ("4090", "qwen3-30b-a3b-2507", {"kv_type": "f16", "ctx_size": "80128"}),
    ("2x2080Ti", "qwen3-30b-a3b-2507", {"kv_type": "f16", "ctx_size": "261632"}),
    ("L8", "qwen2.5-vl-7b", {"kv_type": "f16", "ctx_size": "54784"}),
]


@pytest.mark.thorough
@pytest.mark.parametrize(("machine", "name", "flags"), some(S3))
def test_d_is_f16_at_the_price_of_layers(machine: str, name: str, flags: Mapping[str, str]) -> None:
    found = judged(machine, name, **flags)
    assert not is_on_gpus(found.plan)
    words = letters.beaten(found)
    assert words is not None
    assert words.startswith("q8_0 holds ")
    rounded = next(rival for rival in found.rivals if rival.kv_type == "q8_0")
    assert letters.beaten(with_plan(found, rounded)) is None


def test_d_is_no_objection_to_f16_that_lies_on_the_gpu() -> None:
    found = judged("4090", "llama-3.1-8b", kv_type="f16", ctx_size="32768")
    assert is_on_gpus(found.plan)
    assert letters.beaten(found) is None


# S4: the last tokens were bought with a quarter to a third of the speed.
S4 = [
    ("H100", "llama-3.3-70b", {"kv_type": "f16", "ctx_size": "131072"}),
    ("4090", "qwen3-32b", {"kv_type": "q8_0", "ctx_size": "40960"}),
    ("2x4090", "llama-3.3-70b", {"kv_type": "q8_0", "ctx_size": "40960"}),
    ("2x2080Ti", "llama-3.3-70b", {"kv_type": "q8_0", "ctx_size": "17408"}),
]


@pytest.mark.thorough
@pytest.mark.parametrize(("machine", "name", "flags"), S4)
def test_k_is_a_little_more_context_for_much_of_the_speed(machine: str, name: str, flags: Mapping[str, str]) -> None:
    found = judged(machine, name, **flags)
    assert (letters.past_the_knee(found) or "").endswith("of decode")
    knee = next(rival for rival in found.rivals if rival.kv_type == flags["kv_type"])
    assert letters.past_the_knee(with_plan(found, knee)) is None
    assert letters.past_the_knee(with_plan(found, replace(found.plan, context=2 * knee.context))) is None


# Knees that only llama.cpp's own ubatch has: a larger one is predicted, and its buffer takes their room.
NARROW = [
    ("2x4090", "qwen3-next-80b-a3b", {"q8_0": 10240}),
    ("MIG20", "qwen3-30b-a3b", {"f16": 13824, "q8_0": 25088}),
    ("MIG20", "qwen3-30b-a3b-2507", {"f16": 13824, "q8_0": 25088}),
    ("4090", "qwen3-30b-a3b-2507", {"f16": 62464, "q8_0": 112384}),
    ("3090d", "qwen3-30b-a3b", {"f16": 27392}),
]


@pytest.mark.thorough
@pytest.mark.parametrize(("machine", "name", "knees"), some(NARROW))
def test_a_knee_is_measured_too_where_a_larger_ubatch_is_predicted(
    machine: str, name: str, knees: Mapping[str, int]
) -> None:
    space = Cell(machine=machine, model=name, quantization=dict(MODELS)[name]).space()
    usual = [plan for plan in space.all() if plan.placement.is_whole and launch_of(plan).ubatch == UBATCH]
    assert launch_of(space.best).ubatch > UBATCH
    assert {kind: tokens for kind, tokens in widest(usual).items() if kind in knees} == knees


@pytest.mark.thorough
@pytest.mark.parametrize("name", some([name for name, _ in MODELS]))
def test_every_knee_of_the_matrix_is_among_the_plans(name: str) -> None:
    """Knees are those with llama.cpp's own ubatch. Contexts below the smallest that any mode serves do not count."""
    for cell in (cell for cell in CELLS if cell.model == name):
        usual = replace(cell, flags={"ubatch": str(UBATCH)})
        knees = {plan.kv_type: plan.context for plan in usual.knees() if plan.context >= SMALLEST_CONTEXT}
        found = widest(cell.space().all() if knees else ())
        missing = {kind: at for kind, at in knees.items() if found.get(kind, 0) // CONTEXT_STEP < at // CONTEXT_STEP}
        assert missing == {}, cell.name


def widest(plans: Iterable[Plan]) -> dict[str, int]:
    """Return the longest context with everything on GPUs, keyed by the type of the KV cache."""
    found: dict[str, int] = {}
    for plan in plans:
        if plan.placement.is_whole:
            found[plan.kv_type] = max(found.get(plan.kv_type, 0), plan.context)
    return found


# S5: attention and a large cache in host memory.
@pytest.mark.thorough
def test_a_is_attention_that_leaves_before_the_experts() -> None:
    flags = {"kv_type": "f16", "ctx_size": "98304", "gpu_layers": "17", "n_cpu_moe": "48"}
    found = judged("L8", "qwen3-30b-a3b-2507", **flags)
    assert letters.attention_away(found) == "attention of 32 layers is on the CPU, which only experts should be"
    on_gpu = judged("L8", "qwen3-30b-a3b-2507", kv_type="f16", ctx_size="40960")
    assert on_gpu.plan.placement.cpu_expert_layers > 40
    assert letters.attention_away(on_gpu) is None


@pytest.mark.thorough
def test_a_is_a_large_cache_in_host_memory() -> None:
    found = judged("4090", "llama-3.3-70b", kv_type="f16", ctx_size="108544")
    assert found.plan.placement.cpu_layers > 40
    assert (letters.attention_away(found) or "").endswith("MiB of the cache are in host memory")
    assert letters.attention_away(judged("4090", "llama-3.3-70b", kv_type="q8_0", ctx_size="8192")) is None
    assert letters.attention_away(judged("CPU64", "llama-3.3-70b", kv_type="f16", ctx_size="40960")) is None


# S6: host weights are copied for each batch.
@pytest.mark.thorough
@pytest.mark.parametrize("machine", ["4090", "5090", "24+8"])
def test_p_is_a_small_batch_with_experts_in_host_memory(machine: str) -> None:
    found = judged(machine, "gpt-oss-120b", ubatch="512", kv_type="f16", ctx_size="32768")
    assert "times as fast" in (letters.slow_prompts(found) or "")
    large = judged(machine, "gpt-oss-120b", ubatch="4096", kv_type="f16", ctx_size="32768")
    assert letters.slow_prompts(large) is None
    assert letters.slow_prompts(judged(machine, "phi-4", ubatch="512", ctx_size="16384")) is None


@pytest.mark.thorough
def test_p_is_a_small_batch_for_experts_on_one_gpu() -> None:
    found = judged("GB10", "gpt-oss-120b", ubatch="512")
    assert is_on_gpus(found.plan)
    assert (letters.slow_prompts(found) or "").startswith("ubatch 2048 and ")
    assert letters.slow_prompts(judged("GB10", "gpt-oss-120b")) is None
    assert letters.slow_prompts(judged("H100", "llama-3.1-8b", ubatch="512")) is None  # dense: little to gain


# S7: one card works at a time.
@pytest.mark.thorough
def test_t_is_several_cards_without_the_mode_in_which_all_work() -> None:
    found = judged("2x4090", "qwen3-32b", ctx_size="40960", kv_type="f16")
    assert len(found.plan.placement.shares) == 2
    layers = replace(found, splits=lambda: frozenset({"layer"}))
    assert letters.no_tensor_mode(layers) == "2 cards, one at work at a time"
    assert letters.no_tensor_mode(replace(found, splits=lambda: frozenset({"layer", "tensor"}))) is None
    other = replace(layers, model=replace(found.model, architecture="nemotron_h"))
    assert letters.no_tensor_mode(other) is None
    alone = judged("2x4090", "phi-4", ctx_size="16384")
    assert len(alone.plan.placement.shares) == 1
    assert letters.no_tensor_mode(alone) is None


# S2: f16 copies of a rounded cache, and the CUDA context, beyond a margin that was meant for something else.
@pytest.mark.thorough
@pytest.mark.parametrize(("name", "context"), [("gemma-3-27b", "131072"), ("llama-3.1-8b", "131072")])
def test_o_is_a_plan_without_the_copies_of_a_rounded_cache(name: str, context: str) -> None:
    found = judged("MIG20", name, kv_type="q8_0", ctx_size=context)
    assert letters.out_of_memory(found) is None
    (share,) = found.plan.placement.shares
    copies = letters.copies_mib(found, share, is_first=True)
    assert copies >= 512
    assert share.memory.compute >= copies
    filled = as_planned_before(found.plan, compute=300.0)
    said = letters.out_of_memory(with_plan(found, filled))
    assert (said is not None) is (copies - 300 > 1024 - letters.CUDA_CONTEXT_MIB)
    assert letters.out_of_memory(with_plan(found, replace(filled, kv_type="f16"))) is None


def as_planned_before(plan: Plan, *, compute: float) -> Plan:
    """Return the plan with only these compute buffers, on a GPU that they fill completely."""
    (share,) = plan.placement.shares
    memory = replace(share.memory, compute=compute)
    gpu = replace(share.gpu, free_mib=memory.total, held_back_mib=1024.0)
    full = replace(share, memory=memory, gpu=gpu)
    return replace(plan, placement=replace(plan.placement, shares=(full,), cpu_layers=0))


@pytest.mark.thorough
def test_a_letter_is_written_with_what_was_seen() -> None:
    cell = Cell(machine="3060", model="llama-3.1-8b", quantization="Q5_K_M", flags=dict(S3[1][2]))
    line = matrix.line(cell)
    assert line.mark[0] == "D"
    assert str(line).startswith("| 3060 | 48,128 | f16 | CUDA0 ")
    assert "**D** q8_0 holds " in str(line)
    before = {cell.name: {"D": "by order"}}
    assert f"{cell.name}:\n  D: by order\n" in matrix.known_text((line,), before)
