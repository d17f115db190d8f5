"""Prompts where weights lie in host memory: the ubatch and the way to load are priced by a long prompt."""

from __future__ import annotations

import pytest

from appliance.engines.llama.planning.arguments.launch import launch_of
from appliance.engines.llama.planning.memory.memory import padded
from appliance.engines.llama.planning.placement.job_time import job_ms
from appliance.engines.llama.planning.space import Space
from appliance.model import Model
from appliance.plan import LONG_PROMPTS, Plan
from appliance.probe import Hardware
from appliance.settings import resolve_settings
from tests.builders import facts, machine, model
from tests.fakes.machines import hardware_of
from tests.golden.matrix import MODELS, Cell
from tests.random_machines import gpu, job_s, layer_of, space_of, stacked, with_gpus
from tests.unit.engines.llama.planning.test_plan_context import reason, sized


def space(machine: str, **flags: str) -> Space:
    oss = model("gpt-oss-120b", "MXFP4")
    return Space(resolve_settings(flags, {}), *facts(has_cuda=True), hardware_of(machine), oss)


def prefill(plan: Plan) -> float:
    assert plan.speed
    return plan.speed.prefill_tokens_per_s


@pytest.mark.thorough
@pytest.mark.parametrize("machine", ["4090", "5090", "2x4090", "24+8"])
def test_a_long_prompt_is_read_many_times_as_fast_as_with_the_engines_defaults(machine: str) -> None:
    found = space(machine).best
    assert launch_of(found).ubatch >= 2048
    assert launch_of(found).batch >= launch_of(found).ubatch
    assert launch_of(found).load_mode == "none"
    usual = space(machine, ubatch="512", load_mode="mmap").best
    assert prefill(found) > 4 * prefill(usual)
    assert found.speed
    assert usual.speed
    assert found.speed.decode_tokens_per_s > 0.8 * usual.speed.decode_tokens_per_s


# A larger ubatch would take 22 to 28 % of the context for 10 % of a long job, or 12 to 18 % of a chat for 12 to 31.
TIGHT = [
    ("4090", "gpt-oss-20b", "MXFP4", "15000", "speed"),
    ("3090d", "gpt-oss-20b", "MXFP4", "18000", "balanced"),
    ("2x2080Ti", "gpt-oss-20b", "MXFP4", "18000", "speed"),
    ("4090", "qwen3-next-80b-a3b", "Q4_K_M", "21000", "speed"),
]


@pytest.mark.thorough
@pytest.mark.parametrize(("machine", "name", "quantization", "reserved_mib", "mode"), TIGHT)
def test_a_larger_ubatch_takes_no_more_than_it_saves(
    machine: str, name: str, quantization: str, reserved_mib: str, mode: str
) -> None:
    """The context shrinks by at most twice the share of time that a long job saves. In mode speed a short chat slows by
    at most half of that share."""
    cell = Cell(
        machine=machine, model=name, quantization=quantization, flags={"reserve_mib": reserved_mib, "mode": mode}
    )
    here, usual = cell.space(), cell.space(ubatch="512")
    found, before = here.best, usual.best
    assert launch_of(found).ubatch > 512 or (found.context, found.kv_type) == (before.context, before.kv_type)
    now, then = usual.costs(before), here.costs(found)
    saved = 1 - job_ms(then, 2048, tokens_in=4096) / job_ms(now, 2048, tokens_in=4096)
    assert 1 - found.context / before.context <= 2 * saved + 0.001
    if mode == "speed":
        assert job_ms(then, 640) / job_ms(now, 640) - 1 <= saved / 2 + 0.001


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("machine", "name", "quantization"), [("4090", "qwen3-next-80b-a3b", "Q4_K_M"), ("MIG20", "deepseek-v3", "Q2_K")]
)
def test_speed_gives_up_to_half_of_the_context_where_a_long_prompt_gains_much(
    machine: str, name: str, quantization: str
) -> None:
    """Example: DeepSeek-V3 on a slice gives up 39 % of the context and takes less than half of the time."""
    cell = Cell(machine=machine, model=name, quantization=quantization, flags={"mode": "speed", "fill_minutes": "0"})
    found, usual = cell.space().best, cell.space(ubatch="512").best
    assert launch_of(found).ubatch == 4096
    assert usual.context / 2 <= found.context < usual.context
    assert found.speed
    assert usual.speed
    assert found.speed.job_s < 0.6 * usual.speed.job_s


@pytest.mark.thorough
@pytest.mark.parametrize(("machine", "name"), [("4090", "gpt-oss-120b"), ("2x2080Ti", "qwen3-next-80b-a3b")])
def test_speed_leaves_half_of_the_context(machine: str, name: str) -> None:
    """A ubatch of 4,096 would take 68 and 85 % of the context."""
    cell = Cell(machine=machine, model=name, quantization=dict(MODELS)[name], flags={"mode": "speed"})
    found, usual = cell.space().best, cell.space(ubatch="512").best
    assert 512 < launch_of(found).ubatch < 4096
    assert found.context >= usual.context / 2


def test_the_words_say_what_each_of_both_brings() -> None:
    found = space("4090").best
    assert f"a prompt of 4,096 tokens is read at {prefill(found):,.0f} tok/s, with 512 at " in reason(found, "ubatch")
    assert f"read at {prefill(found):,.0f} tok/s, from mapped pages at " in reason(found, "load_mode")


def test_the_buffer_of_a_larger_ubatch_is_counted() -> None:
    large, usual = space("4090").best, space("4090", ubatch="512").best
    (more,), (less,) = large.placement.shares, usual.placement.shares
    assert more.memory.compute > less.memory.compute + 200
    assert more.memory.total <= more.gpu.free_mib
    assert large.placement.cpu_expert_layers > usual.placement.cpu_expert_layers


def test_what_is_asked_for_stays() -> None:
    found = space("4090", ubatch="1024", load_mode="mmap").best
    assert (launch_of(found).ubatch, launch_of(found).load_mode) == (1024, "mmap")


@pytest.mark.thorough
def test_the_workload_decides_how_long_a_prompt_is() -> None:
    sizes = [launch_of(space("24+8", workload=jobs).best).ubatch for jobs in LONG_PROMPTS]
    assert sizes == sorted(sizes)
    assert "a prompt of 16,384 tokens" in reason(space("24+8", workload="document").best, "ubatch")
    assert "a prompt of 6,144 tokens" in reason(space("24+8", workload="chat:1,agent:1").best, "ubatch")


def test_with_everything_on_gpus_nothing_is_copied() -> None:
    found = Space(resolve_settings({}, {}), *facts(has_cuda=True), hardware_of("4090"), sized("8b")).best
    assert (launch_of(found).ubatch, launch_of(found).load_mode) == (512, "mmap")
    assert "llama.cpp's default" in reason(found, "ubatch")


@pytest.mark.thorough
def test_the_tuner_may_measure_mapped_weights_beside_it_and_no_smaller_batches() -> None:
    """The tuner's prompts are too short to show the cost of smaller batches."""
    found = space("4090").all()
    assert {launch_of(plan).load_mode for plan in found} == {"none", "mmap"}
    assert {launch_of(plan).ubatch for plan in found} == {4096}
    assert {launch_of(plan).ubatch for plan in space("4090", ubatch="512").all()} == {512}
    best = found[0]
    assert best.speed
    for plan in found:
        assert plan.speed
        if launch_of(plan).load_mode == "mmap" and plan.placement == best.placement:
            assert plan.speed.prefill_tokens_per_s < best.speed.prefill_tokens_per_s


def test_memory_that_gpu_and_host_share_is_not_filled_with_pages_of_the_file() -> None:
    found = space("gb10").best
    assert launch_of(found).load_mode == "dio"
    assert "GPU and host share one memory" in reason(found, "load_mode")
    assert launch_of(space("gb10", load_mode="mmap", ctx_size="8192").best).load_mode == "mmap"


def test_a_mapped_file_takes_its_room_in_shared_memory_beside_the_weights() -> None:
    mapped, past = (space("gb10", load_mode=mode, ctx_size="8192").best for mode in ("mmap", "auto"))
    (of_mapped,), (of_past,) = mapped.placement.shares, past.placement.shares
    assert of_mapped.memory.total <= of_mapped.gpu.free_mib < of_past.gpu.free_mib - 60_000


def cards(*sizes: tuple[int, float]) -> Hardware:
    """Return a machine with one GPU for each pair of free MiB and GB/s."""
    found = [gpu(at, free_mib=mib, gb_s=gb_s) for at, (mib, gb_s) in enumerate(sizes)]
    return with_gpus(machine(total_mib=64000, logical=16, physical=8), found)


SMALL_MOE = layer_of(dense_mib=600, expert_mib=200, k_elements=1024)
ROOM = [  # with 512 a layer more lies on a slower card
    (cards((6000, 200.0), (4000, 600.0)), stacked([layer_of(dense_mib=600, expert_mib=200)] * 2, 40960, experts=8)),
    (cards((12000, 600.0), (12000, 360.0)), stacked([SMALL_MOE] * 5, 131072, experts=64)),
]


@pytest.mark.parametrize(("room", "cards_used"), [(ROOM[0], (2, 1)), (ROOM[1], (1, 2))])
def test_a_smaller_buffer_that_keeps_layers_on_the_faster_card_is_taken(
    room: tuple[Hardware, Model], cards_used: tuple[int, int]
) -> None:
    hardware, mixture = room
    here, usual = space_of(hardware, mixture), space_of(hardware, mixture, ubatch="512")
    found, before = here.best, usual.best
    assert launch_of(found).ubatch == 256
    assert (len(found.placement.shares), len(before.placement.shares)) == cards_used
    assert found.context >= before.context
    for tokens in (512, 4096):
        assert job_s(here, found, tokens_in=tokens) < 0.95 * job_s(usual, before, tokens_in=tokens)
    words = f"its smaller buffer leaves room on faster cards; 512 would hold {before.context:,} at f16 and decode "
    assert words in reason(found, "ubatch")


def test_context_that_a_smaller_ubatch_leaves_for_nothing_is_taken_too() -> None:
    found = space_of(*ROOM[1]).best
    assert found.context == 131072 > space_of(*ROOM[1], ubatch="512").best.context
    asked = space_of(*ROOM[1], ctx_size="100000").best
    assert (launch_of(asked).ubatch, padded(asked.context)) == (256, padded(100000))


def test_what_is_on_the_fastest_card_alone_keeps_the_usual_ubatch() -> None:
    hardware = cards((24000, 600.0), (12000, 360.0))
    assert launch_of(space_of(hardware, ROOM[1][1]).best).ubatch == 512
