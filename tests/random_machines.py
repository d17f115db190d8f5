"""Machines and models for properties of the planner: of every kind that it tells apart, and small, so that it is quick.

Sizes are drawn from few values: a machine that is odd in one thing is found sooner than one that is odd in all.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from hypothesis import strategies as st

from appliance.engines.llama.planning.space import Space
from appliance.model import Layer, Model
from appliance.plan import Plan
from appliance.probe import Gpu, Hardware, Speeds
from appliance.settings import resolve_settings
from tests.builders import LARGE, facts, machine
from tests.golden.letters import EMPTY, decode_tokens_per_s, prefill_tokens_per_s

MIB = 2**20
CHAT_IN, CHAT_OUT = 512, 256
OUTPUT_MIB, EMBEDDING_MIB = 300, 250


def gpu(index: int, *, free_mib: int = 8000, gb_s: float = 450.0, lanes: int = 16, total_mib: int | None = None) -> Gpu:
    total = total_mib or free_mib
    return Gpu(
        index=index,
        name=f"card of {total} MiB",
        uuid=f"GPU-{index}",
        sm="86",
        vram_total_mib=total,
        vram_free_mib=free_mib,
        pci_bus_id=f"00000000:{index + 1:02X}:00.0",
        bandwidth_gb_s=gb_s,
        pcie_generation=4,
        pcie_width=lanes,
        pcie_generation_max=4,
        pcie_width_max=lanes,
    )


def with_gpus(hardware: Hardware, gpus: Sequence[Gpu]) -> Hardware:
    """Return the machine with these GPUs; their order sets indices, uuids and addresses."""
    placed = tuple(
        replace(each, index=at, uuid=f"GPU-{at}", pci_bus_id=f"00000000:{at + 1:02X}:00.0")
        for at, each in enumerate(gpus)
    )
    return replace(hardware, gpus=replace(hardware.gpus, gpus=placed), gpu_requested=bool(placed))


@st.composite
def gpus(draw: st.DrawFn) -> Gpu:
    return gpu(
        0,
        free_mib=draw(st.sampled_from([2500, 4000, 6000, 8000, 12000, 16000, 24000])),
        gb_s=draw(st.sampled_from([200.0, 360.0, 600.0, 936.0, 1790.0])),
        lanes=draw(st.sampled_from([1, 4, 16])),
    )


@st.composite
def machines(draw: st.DrawFn, *, cards: st.SearchStrategy[list[Gpu]] | None = None) -> Hardware:
    total = draw(st.sampled_from([8000, 16000, 32000, 64000, 128000]))
    cores = draw(st.sampled_from([2, 8, 16]))
    dram = draw(st.sampled_from([None, 20.0, 60.0, 250.0]))
    found = machine(total_mib=total, logical=2 * cores, physical=cores)
    with_speed = replace(found, speeds=None if dram is None else Speeds(dram_gb_s=dram))
    return with_gpus(with_speed, draw(cards if cards is not None else st.lists(gpus(), max_size=3)))


@st.composite
def models(draw: st.DrawFn) -> Model:
    count, experts = draw(st.integers(2, 12)), draw(st.sampled_from([0, 0, 8, 64]))
    layer = layer_of(
        dense_mib=draw(st.sampled_from([20, 150, 600, 1500])),
        expert_mib=draw(st.sampled_from([200, 800, 2500])) if experts else 0,
        k_elements=draw(st.sampled_from([256, 1024])),
        v_elements=draw(st.sampled_from([256, 1024])),
    )
    slides = draw(st.sampled_from([0, 0, 2, 6]))  # of so many layers one attends to everything
    stack = tuple(sliding(layer) if slides and at % slides else layer for at in range(count))
    return stacked(stack, draw(st.sampled_from([4096, 40960, 131072])), experts=experts)


def layer_of(*, dense_mib: int, expert_mib: int = 0, k_elements: int = 256, v_elements: int = 256) -> Layer:
    """Return a layer with full attention."""
    return Layer(
        kind="full",
        k_elements=k_elements,
        v_elements=v_elements,
        window=None,
        state_bytes=0,
        dense_bytes=dense_mib * MIB,
        expert_bytes=expert_mib * MIB,
    )


def sliding(layer: Layer) -> Layer:
    return replace(layer, kind="sliding", window=1024)


def stacked(stack: Sequence[Layer], native: int, *, experts: int = 0) -> Model:
    return replace(
        LARGE,
        stack=tuple(stack),
        layers=len(stack),
        kv_heads=(8,) * len(stack),
        native_context=native,
        weights_bytes=sum(each.dense_bytes + each.expert_bytes for each in stack) + (OUTPUT_MIB + EMBEDDING_MIB) * MIB,
        expert_bytes=sum(each.expert_bytes for each in stack),
        embedding_bytes=EMBEDDING_MIB * MIB,
        output_bytes=OUTPUT_MIB * MIB,
        output_is_tied=False,
        experts=experts,
        experts_used=min(experts, 2 if experts == 8 else 6),
        expert_length=64,
    )


def space_of(hardware: Hardware, model: Model, **flags: str) -> Space:
    image, engine = facts(has_cuda=bool(hardware.gpus.gpus))
    return Space(resolve_settings(flags, {}), image, engine, hardware, model)


def job_s(space: Space, plan: Plan, depth: float = EMPTY, *, tokens_in: int = CHAT_IN) -> float:
    """Return the seconds of a chat whose answer begins with `depth` tokens in the cache."""
    costs = space.costs(plan)
    return CHAT_OUT / decode_tokens_per_s(costs, depth) + tokens_in / prefill_tokens_per_s(costs, tokens_in)
